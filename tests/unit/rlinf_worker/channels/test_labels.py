"""What may be written on an item: plain values come out, or a sentence."""

import math
from typing import Any

import numpy
import pytest

from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_worker.channels import labels
from rlinf_worker.channels.labels import LabelError
from rlinf_worker.channels.protocol import FIRST_VERSION, PolicyVersion
from rlinf_worker.links import frames
from rlinf_worker.queues.units import UnitInfo


def checked(**changed: Any) -> labels.Labels:
    said: dict[str, Any] = {"key": "k", "step": 1, "branch": 0, "weight": 1.0, "version": None}
    return labels.checked("units", **said | changed)


class Key(str):
    pass


def version_of(branch: Any, number: Any) -> PolicyVersion:
    return PolicyVersion(branch, number)


@pytest.mark.parametrize(
    ("changed", "same"),
    [
        ({}, ("k", 1, 0, 1.0, FIRST_VERSION)),
        ({"key": Key("a")}, ("a", 1, 0, 1.0, FIRST_VERSION)),
        ({"key": "schlüssel"}, ("schlüssel", 1, 0, 1.0, FIRST_VERSION)),
        ({"key": ""}, ("", 1, 0, 1.0, FIRST_VERSION)),
        ({"step": numpy.int64(3), "branch": numpy.uint8(2)}, ("k", 3, 2, 1.0, FIRST_VERSION)),
        ({"weight": numpy.float32(0.5)}, ("k", 1, 0, 0.5, FIRST_VERSION)),
        ({"weight": numpy.float64(0.5)}, ("k", 1, 0, 0.5, FIRST_VERSION)),
        ({"weight": 7}, ("k", 1, 0, 7.0, FIRST_VERSION)),
        ({"weight": 0.0}, ("k", 1, 0, 0.0, FIRST_VERSION)),
        ({"step": -1}, ("k", -1, 0, 1.0, FIRST_VERSION)),
        ({"version": version_of(1, numpy.int64(4))}, ("k", 1, 0, 1.0, PolicyVersion(1, 4))),
    ],
)
def test_what_can_be_said_comes_out_as_plain_values(changed, same):
    said = checked(**changed)
    assert said == same
    assert [type(value) for value in said] == [str, int, int, float, PolicyVersion]
    number = said.version
    frames.encode(frames.Ask(1, 0, said.key, said.step, said.branch, number.branch, number.number, []))


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"key": 3}, r"the key of item 3 of channel 'units' cannot be sent: got int 3, wanted a str .*use str"),
        ({"key": b"k"}, "got bytes b'k', wanted a str"),
        ({"key": "a\ud800"}, r"got 'a\\ud800', whose character 1 is half of a pair, wanted text that UTF-8 can write"),
        ({"key": "k" * 5000}, "got 5000 characters, wanted a str of at most 4096 characters"),
        (
            {"step": "3"},
            "the step of item 'k' of channel 'units' .* got str '3', wanted an int of 64 bits; pass",
        ),
        ({"step": None}, "the step .* got NoneType None"),
        ({"step": True}, "the step .* got bool True"),
        ({"step": 1.0}, "the step .* got float 1.0"),
        ({"step": 1 << 63}, "the step .* got int 9223372036854775808"),
        ({"step": numpy.uint64(1 << 63)}, "the step .* got uint64"),
        ({"branch": None}, "the branch .* got NoneType None, wanted an int of 32 bits"),
        ({"branch": 1 << 31}, "the branch .* got int 2147483648"),
        ({"weight": "x"}, "the weight of item 'k' .* got str 'x', wanted a number from 0 on, neither infinite nor NaN"),
        ({"weight": math.nan}, "the weight .* got float nan"),
        ({"weight": numpy.float32("nan")}, "the weight .* got float32"),
        ({"weight": math.inf}, "the weight .* got float inf"),
        ({"weight": -0.5}, "the weight .* got float -0.5"),
        ({"weight": 10**400}, "the weight .* got int 1000"),
        ({"weight": True}, "the weight .* got bool True"),
        ({"weight": None}, "the weight .* got NoneType"),
        ({"version": 3}, "the version .* got int 3, wanted a PolicyVersion"),
        ({"version": version_of(1, "2")}, "the version.number .* got str '2', wanted an int of 64 bits"),
    ],
)
def test_what_cannot_be_said_is_refused_with_its_place(changed, sentence):
    with pytest.raises(LabelError, match=sentence) as raised:
        checked(**changed)
    str(raised.value).encode()  # it goes into a condition


def test_a_weight_of_zero_is_zero_at_the_driver_and_one_that_was_not_said_is_one():
    masked = UnitInfo(key="k", branch=0, step=1, weight=0.0)
    assert UnitInfo.from_pb(pb.Unit.FromString(masked.to_pb().SerializeToString())).weight == 0.0
    assert UnitInfo.from_pb(pb.Unit(key="k")).weight == 1.0
