"""How a process says why it ended: exit code, sentence, termination message."""

import asyncio
import json
import re
import traceback
from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_api import names
from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_api.errors import DeadlineExceeded, InvariantBroken, Refused, Stale, UserError, WorkerUnreachable
from rlinf_api.names import WorkerId
from rlinf_api.report import Failure
from rlinf_worker import last_words
from rlinf_worker.channels.protocol import FIRST_VERSION, Item, LineageKey
from rlinf_worker.queues.channel import QueueChannel
from rlinf_worker.queues.parents import Parents
from rlinf_worker.runtime.session import Facts


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UserError("x"), 64),
        (Refused("x"), 64),
        (WorkerUnreachable("x"), 75),
        (DeadlineExceeded("x", timeout_s=1), 75),
        (Stale("x"), 76),
        (InvariantBroken("x"), 70),
        (ValueError("x"), 70),
    ],
)
def test_every_error_has_its_exit_code(error, code):
    assert last_words.of(error).exit_code == code


def test_a_foreign_exception_is_named_and_may_have_another_code():
    failure = last_words.of(ValueError(), unknown=names.EXIT_RETRYABLE)
    assert (failure.exit_code, failure.reason, failure.message) == (75, "ValueError", "ValueError")


def test_what_a_module_raised_has_its_place_in_it_and_not_in_a_library():
    with pytest.raises(ValueError, match="Expecting") as caught:
        json.loads("{")
    said = last_words.of(caught.value).message
    assert re.fullmatch(r"JSONDecodeError: .* \(.*test_last_words\.py, line \d+\)", said)
    with pytest.raises(UserError) as told:
        json.loads("[1]", parse_int=lambda _: _raise(UserError("no such environment")))
    assert last_words.of(told.value).message == "no such environment"


async def test_a_call_of_a_channel_that_is_refused_has_its_place_in_the_role():
    host: Any = MagicMock(role="env", newest_branch=lambda: 0, weights_version=lambda: None, max_staleness=lambda: 0)
    spec = pb.ChannelSpec(name="units", producer="env", consumer="actor")
    channel, other = (QueueChannel(host, one, Parents()) for one in (spec, pb.ChannelSpec(name="others")))
    item = Item(
        channel="tickets", key=LineageKey("t"), payload=1, step=1, branch=0, source=WorkerId(""), version=FIRST_VERSION
    )
    calls: list[Callable[[], Any]] = [
        lambda: channel.put(1, key="u"),
        lambda: channel.put(object(), key="u", step=1),  # what encodes it is further in
        lambda: asyncio.create_task(other.put(1, key="u", step=1)),
        lambda: channel.ack(item),
        lambda: Facts(host).share("shape", object()),
    ]
    for call in calls:
        with pytest.raises(UserError) as refused:
            await call()
        frames = traceback.extract_tb(refused.value.__traceback__)
        line = [frame.lineno for frame in frames if frame.filename == __file__][-1]
        assert last_words.of(refused.value).message == f"{refused.value} ({__file__}, line {line})"


def _raise(error):
    raise error


@given(st.text(max_size=6000))
def test_a_termination_message_fits_and_can_be_read_back(message):
    failure = Failure(role="env", worker=3, pod="p", exit_code=70, reason="X", message=message)
    data = last_words.encode(failure)
    assert len(data) <= names.MAX_TERMINATION_BYTES
    back = last_words.decode(data)
    assert back is not None
    assert (back.role, back.worker, back.exit_code) == ("env", 3, 70)
    if len(json.dumps(message)) < 3500:
        assert back == failure


def test_a_long_message_keeps_where_it_began_and_how_it_ended():
    text = last_words.shorten("begin " + "x" * 5000 + " the cause", 100)
    assert text.startswith("begin ")
    assert text.endswith(" the cause")
    assert len(text) == 100


@pytest.mark.parametrize("data", [b"", b"Traceback", b"[1]", b'{"exit_code": "a"'])
def test_what_is_not_ours_is_none(data):
    assert last_words.decode(data) is None


def test_fields_of_a_later_version_or_a_wrong_type_are_left_out():
    assert last_words.decode(b'{"reason": "X", "later": 1, "exit_code": "7"}') == Failure(reason="X")


def test_the_file_that_is_there_is_written_and_not_another_put_in_its_place(tmp_path):
    """In a pod it is a mount of the kubelet's, which nothing can be renamed onto."""
    path = tmp_path / "t.json"
    path.write_bytes(b"x" * 5000)
    before = path.stat().st_ino
    last_words.write(Failure(message="x"), str(path))
    assert path.stat().st_ino == before
    assert last_words.decode(path.read_bytes()) == Failure(message="x")
    assert [file.name for file in tmp_path.iterdir()] == ["t.json"]


def test_a_message_that_cannot_be_written_does_not_hide_the_failure(tmp_path, caplog):
    last_words.write(Failure(message="x"), str(tmp_path / "none" / "t.json"))
    assert "termination message not written" in caplog.text
    last_words.write(Failure(message="x"), "")


def test_only_fields_that_say_something_are_written_and_others_may_stand_beside_them():
    data = last_words.encode(Failure(reason="X", exit_code=3), also={"part": "agent", "life": 2})
    assert json.loads(data) == {"reason": "X", "exit_code": 3, "part": "agent", "life": 2}
    assert last_words.encode(Failure()) == b"{}"


@pytest.mark.parametrize(
    ("limit", "short"),
    [(26, "abcdefghijklmnopqrstuvwxyz"), (25, "abcdef ... mnopqrstuvwxyz"),
     (16, "abcd ... tuvwxyz"), (15, "lmnopqrstuvwxyz"), (1, "z"), (0, "")],
)  # fmt: skip
def test_a_text_that_is_too_long_keeps_a_quarter_of_its_begin_and_the_end(limit, short):
    assert last_words.shorten("abcdefghijklmnopqrstuvwxyz", limit) == short


def test_a_message_loses_no_more_than_it_must():
    for limit in (200, 400, 1000):
        assert limit - 32 <= len(last_words.encode(Failure(message="x" * 5000), limit=limit)) <= limit


def test_an_error_of_ours_is_told_by_its_class_and_sentence():
    wanted = Failure(exit_code=64, reason="UserError", message="no pool: got 'a'")
    assert last_words.of(UserError("no pool", got="'a'")) == wanted
    assert last_words.of(KeyError("a")) == Failure(exit_code=70, reason="KeyError", message="KeyError: 'a'")
