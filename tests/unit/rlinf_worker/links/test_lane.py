"""The two threads beside a link, over a pair of sockets: whole records, in order, and how each end parts."""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import Any

import pytest

from rlinf_worker.links import lane
from rlinf_worker.links.lane import RECORD, Lane, LaneError, SocketLane


class Account:
    def __init__(self) -> None:
        self.sent, self.lost = list[int](), list[str]()


def ends() -> tuple[Any, Any, Account, Account]:
    one, two = Account(), Account()
    here, there = socket.socketpair()
    return (
        SocketLane(here, on_sent=one.sent.append, on_lost=one.lost.append),
        SocketLane(there, on_sent=two.sent.append, on_lost=two.lost.append),
        one, two,
    )  # fmt: skip


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.002)


async def test_records_of_many_and_of_large_pieces_arrive_whole_and_in_order():
    a, b, told, _ = ends()
    many: list[bytes | memoryview] = [bytes([n % 251]) * (n % 7) for n in range(1300)]
    large: list[bytes | memoryview] = [memoryview(b"l" * 700_000), b"", memoryview(b"m" * 3)]
    arrived: list[str] = []
    areas = [memoryview(bytearray(sum(map(len, many)))), memoryview(bytearray(700_003))]
    for number, (pieces, into) in enumerate(zip((many, large), areas, strict=True)):
        b.receive(number + 5, into, lambda number=number: arrived.append(str(number)))
        a.send(number + 5, pieces, into.nbytes)
    await until(lambda: len(arrived) == 2)
    assert [bytes(area) for area in areas] == [b"".join(many), b"".join(large)]
    assert arrived == ["0", "1"]
    await until(lambda: told.sent == [areas[0].nbytes, 700_003])
    for end in (a, b):
        end.finish()
        end.finish()
    await until(lambda: a._sock.fileno() == b._sock.fileno() == -1)
    assert (told.lost, a.info()) == ([], None)


async def test_an_end_that_parts_sends_all_and_reads_on_until_its_peer_has_parted_too():
    a, b, told, _ = ends()
    a.send(0, [b"x" * 2_000_000], 2_000_000)
    a.finish()
    into, arrived = memoryview(bytearray(2_000_000)), threading.Event()
    b.receive(0, into, arrived.set)
    await until(arrived.is_set)
    assert a._sock.fileno() >= 0, "what the peer may still send would be answered with a reset"
    b.finish()
    await until(lambda: a._sock.fileno() == b._sock.fileno() == -1)
    assert (bytes(into[-3:]), told.lost) == (b"xxx", [])


async def test_a_peer_that_never_parts_does_not_keep_the_socket(monkeypatch):
    monkeypatch.setattr(lane, "_PARTING_S", 0.02)
    a, b, told, _ = ends()
    a.finish()
    await until(lambda: a._sock.fileno() == -1)
    assert told.lost == []
    b.kill()


async def test_a_kill_wakes_both_threads_says_nothing_and_gives_the_socket_back():
    a, b, told, _ = ends()
    a.receive(0, memoryview(bytearray(10)), lambda: pytest.fail("nothing came"))
    a.send(0, [b"x" * 8_000_000], 8_000_000)
    await until(lambda: len(a._started) == 2)
    a.kill()
    a.kill()
    a.finish()
    await until(lambda: a._sock.fileno() == -1)
    await asyncio.sleep(0.01)
    assert (told.sent, told.lost) == ([], [])
    b.kill()
    assert b._sock.fileno() == -1, "no thread of it had begun"


@pytest.mark.parametrize(
    ("came", "why"),
    [
        (RECORD.pack(4, 10), "its bulk connection brought record (4, 10) where (3, 10) was due"),
        (RECORD.pack(3, 11), "its bulk connection brought record (3, 11) where (3, 10) was due"),
        (RECORD.pack(3, 10) + b"half", "its process is gone (its bulk connection ended within a message)"),
        (b"", "its process is gone (its bulk connection ended within a message)"),
    ],
)
async def test_what_is_not_the_record_that_is_due_is_the_end_of_the_lane_and_said_once(came, why):
    a, b, _, told = ends()
    a._sock.sendall(came)
    a._sock.shutdown(socket.SHUT_WR)
    b.receive(3, memoryview(bytearray(10)), lambda: pytest.fail("it is not whole"))
    await until(lambda: told.lost)
    assert told.lost == [why]
    for end in (a, b):
        end.kill()


async def test_a_peer_that_is_gone_is_a_sentence_for_whoever_sends():
    a, b, told, _ = ends()
    b.kill()
    a.send(0, [b"x"], 1)
    await until(lambda: told.lost)
    assert told.lost == ["its bulk connection failed: Broken pipe"]
    a.kill()


class Scripted(Lane):
    kind = "scripted"

    def __init__(self, error: Exception, **told: Any) -> None:
        super().__init__(**told)
        self.error, self.calls = error, list[Any]()

    def _put(self, sequence: int, pieces: Any, nbytes: int) -> None:
        raise self.error

    def _get(self, sequence: int, into: Any) -> None:
        self.calls.append(sequence)

    def _interrupt(self) -> None:
        self.calls.append("interrupt")

    def _release(self) -> None:
        self.calls.append("release")


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (LaneError("no more"), "no more"),
        (KeyError("x" * 400), f"its scripted lane failed: KeyError: {repr('x' * 400)[:200]}"),
    ],
)
async def test_whatever_a_lane_meets_is_told_to_its_link(error, why):
    account = Account()
    made = Scripted(error, on_sent=account.sent.append, on_lost=account.lost.append)
    assert made.info() is None
    made.send(0, [], 0)
    await until(lambda: account.lost)
    assert (account.lost, account.sent, made.calls) == ([why], [], [])
    made.kill()
    await until(lambda: "release" in made.calls)
    assert made.calls == ["interrupt", "release"]


async def test_a_lane_is_released_once_when_both_threads_are_at_their_end():
    account = Account()
    made = Scripted(LaneError("no"), on_sent=account.sent.append, on_lost=account.lost.append)
    arrived: list[int] = []
    made.receive(4, memoryview(b""), lambda: arrived.append(4))
    made.receive(5, memoryview(b""), lambda: arrived.append(5))
    made.finish()
    await until(lambda: "release" in made.calls)
    assert (made.calls, account.lost) == ([4, 5, "release"], [])
    await until(lambda: arrived == [4, 5])
