"""The two hellos as they are on the wire, and each reason for a no with its code and its whole sentence."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from rlinf_api.errors import RLinfError
from rlinf_worker.links import hello
from rlinf_worker.links.errors import LinkBroken, LinkRefused, LinkStale, ShmTooSmall
from rlinf_worker.links.hello import Identity, Refusal

ME = Identity(job="job-1", worker="rollout/0", attempt=2)
PEER = Identity(job="job-1", worker="env/0", attempt=1)
FROM_PEER = {"job": "job-1", "worker": "env/0", "attempt": 1}
ASK: dict[str, Any] = {
    "magic": "rlinf-link", "protocol": 1, "from": FROM_PEER, "to_worker": "rollout/0", "to_attempt": 2, "extra": {},
}  # fmt: skip
YES: dict[str, Any] = {"magic": "rlinf-link", "protocol": 1, "from": FROM_PEER, "ok": True, "extra": {"way": "ipc"}}


def test_what_the_three_kinds_of_hello_say():
    decode = msgspec.msgpack.decode
    assert decode(hello.ask(PEER, ME)) == ASK
    assert decode(hello.ask(PEER, ME, extra={"bulk": "plain"})) == ASK | {"extra": {"bulk": "plain"}}
    assert decode(hello.yes(PEER)) == YES | {"extra": {}}
    assert decode(hello.yes(PEER, extra={"way": "ipc"})) == YES
    assert decode(hello.no(PEER, Refusal("stale", "x" * 3000))) == {
        "magic": "rlinf-link", "protocol": 1, "from": FROM_PEER,
        "ok": False, "code": "stale", "sentence": "x" * 2000, "extra": {},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "code", "sentence"),
    [
        ([1], "garbage", "got 2 bytes that are no hello of a worker: Expected `object`, got `array`"),
        (
            ASK | {"magic": "x"}, "garbage",
            "got a hello without the mark 'rlinf-link': something else than a worker is calling",
        ),
        (
            {"magic": "rlinf-link", "protocol": 1}, "garbage", "got a hello without an identity: 'from'",
        ),
        (
            {"magic": "rlinf-link", "from": FROM_PEER}, "garbage", "got a hello without an identity: 'protocol'",
        ),
        (
            ASK | {"from": {"job": "job-1", "worker": "env/0"}}, "garbage",
            "got a hello without an identity: Object missing required field `attempt`",
        ),
        (
            ASK | {"protocol": 2}, "protocol",
            "worker env/0#1 speaks link protocol 2, worker rollout/0#2 speaks 1; run the same version of rlinf_worker "
            "in all images of a job",
        ),
        (ASK | {"extra": []}, "garbage", "got a hello whose extras are no map"),
        (
            ASK | {"from": FROM_PEER | {"job": "job-2"}}, "job",
            "worker env/0#1 is of job job-2, worker rollout/0#2 of job job-1",
        ),
        (
            ASK | {"to_worker": "actor/0"}, "worker",
            "worker env/0#1 wants worker 'actor/0', but this address is worker rollout/0#2's now",
        ),
        (ASK | {"to_attempt": 1}, "stale", "worker env/0#1 wants attempt 1 of worker rollout/0, which is at 2"),
        (ASK | {"to_attempt": 3}, "stale", "worker env/0#1 wants attempt 3 of worker rollout/0, which is at 2"),
    ],
)  # fmt: skip
def test_why_a_listener_says_no(fields, code, sentence):
    asked = list[Identity]()
    with pytest.raises(Refusal) as caught:
        hello.check_ask(msgspec.msgpack.encode(fields), ME, admit=lambda who, certificate: asked.append(who))
    assert (caught.value.code, caught.value.sentence, str(caught.value)) == (code, sentence, sentence)
    assert asked == [], "whoever is refused already is nobody's guest"


def test_a_listener_learns_who_it_is_and_what_else_was_said_and_asks_with_the_certificate():
    asked = []
    raw = msgspec.msgpack.encode(ASK | {"extra": {"gpu": None}})
    certificate = {"subject": ()}
    found = hello.check_ask(raw, ME, certificate=certificate, admit=lambda *shown: asked.append(shown))
    assert found == (PEER, {"gpu": None})
    assert asked == [(PEER, certificate)]
    assert hello.check_ask(raw, ME, admit=None) == found


@pytest.mark.parametrize(
    ("fields", "code", "sentence"),
    [
        (YES | {"ok": False, "code": "stale", "sentence": "too old"}, "stale", "too old"),
        (YES | {"ok": 1, "code": "admit", "sentence": "no"}, "admit", "no"),
        (
            YES | {"from": FROM_PEER | {"attempt": 2}}, "worker",
            "dialled env/0#1 of job job-1, reached env/0#2 of job job-1",
        ),
        (
            YES | {"from": FROM_PEER | {"job": "job-2"}}, "worker",
            "dialled env/0#1 of job job-1, reached env/0#1 of job job-2",
        ),
    ],
)  # fmt: skip
def test_why_a_dialer_does_not_take_the_answer(fields, code, sentence):
    with pytest.raises(Refusal) as caught:
        hello.check_answer(msgspec.msgpack.encode(fields), ME, PEER)
    assert (caught.value.code, caught.value.sentence) == (code, sentence)


def test_a_dialer_learns_the_extras_and_none_of_a_peer_that_says_none():
    assert hello.check_answer(msgspec.msgpack.encode(YES), ME, PEER) == {"way": "ipc"}
    assert hello.check_answer(msgspec.msgpack.encode(YES | {"extra": 3}), ME, PEER) == {}


@pytest.mark.parametrize(
    ("code", "kind", "said"),
    [
        ("stale", LinkStale, "worker env/0#1 and this worker do not agree on attempts: got so it says"),
        ("shm", ShmTooSmall, "worker env/0#1 cannot make its ring: got so it says"),
        ("admit", LinkRefused, "no link to worker env/0#1: got so it says"),
    ],
)
def test_what_a_dial_raises_for_a_no(code, kind, said):
    error: RLinfError = Refusal(code, "so it says").as_error(str(PEER))
    assert (type(error), str(error)) == (kind, said)


def test_a_broken_link_names_its_peer_and_is_dialled_again_soon():
    error = LinkBroken("env/0#1", "it hung up")
    assert (error.peer, error.why, error.delay_s) == ("env/0#1", "it hung up", 0.1)
    assert str(error) == "the link to worker env/0#1 is broken: it hung up; dial its next attempt"
