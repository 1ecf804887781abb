"""What a flow declares of a channel's payloads: what it lets through, and the sentence for what it does not."""

import dataclasses
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from rlinf_api.errors import UserError
from rlinf_worker.channels.payload_type import PayloadMismatch, PayloadType


@dataclasses.dataclass
class Sample:
    tokens: Any
    version: int


GOOD: list[tuple[Any, Any]] = [
    ("any", object()),
    ("bytes", b"x"),
    ("float", 1),
    ("none", None),
    ("list", [1, "whatever"]),
    ("float32[n, ...]", np.zeros((3, 4, 5), "f4")),
    ("float32[n, ...]", np.zeros(3, "f4")),
    ("float32[]", np.float32(3)),
    ("bfloat16[*, 3]", torch.zeros(2, 3, dtype=torch.bfloat16)),
    ("floating[n]", torch.zeros(2, dtype=torch.float16)),
    ("integer[n]", np.zeros(2, "u1")),
    ("number[n]", np.zeros(2, "i8")),
    ("bool[n]", np.zeros(2, "?")),
    ("array[...]", np.array(["text"])),
    ({}, {}),
    ({"a": "int", "b?": "str"}, {"a": 1}),
    ({"a": "int", "b?": "str"}, {"a": 1, "b": "x"}),
    ({"x": {"y": "float32[n]"}, "z": "int64[n]"}, {"x": {"y": np.zeros(2, "f4")}, "z": np.zeros(2, "i8")}),
    ({"tokens": "int32[t]", "version": "int"}, Sample(np.zeros(2, "i4"), 3)),
]
BAD: list[tuple[Any, Any, str]] = [
    ("int", True, "payload: got bool True, wanted int"),
    ("int", 1.5, "payload: got float 1.5, wanted int"),
    ("int", np.int64(1), "payload: got int64[], wanted int"),
    ("str", None, "payload: got None, wanted str"),
    ("float32[n]", np.zeros(2), "payload: got float64[2], wanted float32[n]"),
    ("float32[n]", torch.zeros(2, 2), "payload: got float32[2, 2], wanted float32[n]"),
    ("float32[n, m, ...]", np.zeros(2, "f4"), "payload: got float32[2], wanted float32[n, m, ...]"),
    ("float32[n, 3]", np.zeros((2, 4), "f4"), "payload: got float32[2, 4], wanted float32[n, 3]"),
    ("number[n]", np.zeros(2, "?"), "payload: got bool[2], wanted number[n]"),
    ("array[n]", [1, 2], "payload: got a list, wanted array[n]"),
    ({"a": "int"}, {"a": "1"}, "payload['a']: got str '1', wanted int"),
    ({"a": "int", "b": "int"}, {"a": 1}, "payload: got no 'b', wanted a, b"),
    ({"a": "int"}, {"a": 1, "c": 2}, "payload: got 'c', which is not declared, wanted a"),
    ({"a?": "int", "b": "int"}, {"b": 1, "c": 2}, "payload: got 'c', which is not declared, wanted a?, b"),
    ({"a": "int"}, [1], "payload: got a list, wanted a dict with a"),
    ({"x": {"y": {"z": "int"}}}, {"x": {"y": {"z": None}}}, "payload['x']['y']['z']: got None, wanted int"),
    ({"tokens": "int32[t]", "version": "str"}, Sample(np.zeros(2, "i4"), 3), "['version']: got int 3, wanted str"),
    (
        {"obs": "float32[n, 4]", "action": "int64[n]"},
        {"obs": np.zeros((3, 4), "f4"), "action": np.zeros(2, "i8")},
        "payload['action']: got int64[2], wanted int64[n] where n is 3 in a field before it",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("declared", "payload"), GOOD)
def test_what_is_declared_passes_and_passes_again(declared, payload):
    type = PayloadType(declared)
    type.check(payload, "units", "k")
    again = PayloadType.of(type.text)  # as a worker is told it
    assert again is not None
    assert again.fingerprint == type.fingerprint
    again.check(payload, "units", "k")


@pytest.mark.parametrize(("declared", "payload", "says"), BAD)
def test_what_is_not_declared_is_refused_by_place_found_and_wanted(declared, payload, says):
    with pytest.raises(PayloadMismatch) as caught:
        PayloadType(declared).check(payload, "units", "k")
    sentence = str(caught.value)
    assert sentence.startswith("item 'k' of channel 'units' is not what its flow declares: payload")
    assert f"{says}; convert it first, or change the channel's payload in the flow" in sentence


def test_a_size_that_has_a_name_is_the_same_within_one_payload_and_free_in_the_next():
    type = PayloadType({"a": "float32[n]", "b": "float32[n]"})
    for n in (2, 5):
        type.check({"a": np.zeros(n, "f4"), "b": np.zeros(n, "f4")}, "units", "k")


@pytest.mark.parametrize(
    ("declared", "says"),
    [
        ("flaot32[n]", "the payload of a channel cannot be understood: got 'flaot32[n]', wanted bool, int"),
        ("float33[n]", "got 'float33[n]'"),
        ("float32", "any or DTYPE[sizes] as in 'float32[n, 3, ...]'; correct"),
        ("float32[..., n]", "got 'float32"),
        ("float32[-1]", "got 'float32"),
        ({"a": {"b": 3}}, "the payload['a']['b'] of a channel cannot be understood: got 3, wanted a type's name"),
        ({1: "int"}, "wanted a type's name, or a dict of names and types; correct the flow"),
        ({f"field{n}": "float32[n, ...]" for n in range(3000)}, "bytes, wanted at most 65536"),
    ],
)
def test_a_declaration_that_cannot_be_understood_is_a_sentence(declared, says):
    with pytest.raises(UserError) as caught:
        PayloadType(declared)
    assert says in str(caught.value)


def test_a_declaration_that_holds_itself_ends():
    declared: dict[str, Any] = {}
    declared["again"] = declared
    with pytest.raises(UserError, match="more than 16 levels"):
        PayloadType(declared)


def test_no_declaration_is_no_type():
    assert PayloadType.of("") is None


def test_a_worker_without_numpy_and_torch_can_check():
    code = """
import sys
from rlinf_worker.channels.payload_type import PayloadType
PayloadType({"a": "float32[n]", "b?": "int"})
print([name for name in ("numpy", "torch") if name in sys.modules])
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20, check=True)
    assert out.stdout.strip() == "[]"
