"""The second way of a link between pods, for the buffers of large messages: a plain socket of the same two processes.

For: `tcp`, which announces each such message on its own (mTLS) connection and gives the buffers to a `Lane`. Not for:
small messages, order, death and good-byes, which stay with that connection; nor for who may come in (`door`).

    sender    connection: announcement n (head, payload header, sizes)      lane: record n = sequence, bytes | buffers
    receiver  announcement n -> memory for it, in the queue of frames at its place -> filled from the lane -> ready

Why, what it costs and how to have none of it: docs/adr/0017.

    waits                                  for                       woken by
    sending thread, on its queue           a message                 send; finish; kill
    sending thread, in the kernel          room in the socket        the receiver; kill (shutdown of the socket)
    receiving thread, on its queue         an announcement           receive; finish; kill
    receiving thread, in the kernel        bytes                     the sender; kill

The queues hold what the link's outbox and inbox admit, so they need no bound of their own. A lane that breaks says so
once, in the loop's thread, and its link breaks with it.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import logging
import queue
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Final

logger = logging.getLogger(__name__)

RECORD: Final = struct.Struct("<QQ")
"""What precedes the buffers of a message: its sequence number on the link, and how many bytes follow."""

_IOV_MAX: Final = 512
"""Pieces in one sendmsg: half of the kernel's limit."""

_PARTING_S: Final = 1.0
"""How long the end that closes in good order reads on, so that its close is no reset that overtakes its own bytes."""

Pieces = Sequence[bytes | memoryview]


class LaneError(Exception):
    """The lane is of no more use, in words for a condition."""


class Lane(abc.ABC):
    """Both directions between two ends, each in the order of its calls.

    Called by `tcp`: `send`, `receive`, `finish`, `kill` in the loop's thread. A new lane owes `_put` and `_get`, which
    may block, and `_interrupt`, which makes them raise soon. `on_sent` and `on_lost` are called in the loop.
    """

    kind = "lane"

    def __init__(self, *, on_sent: Callable[[int], None], on_lost: Callable[[str], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_sent, self._on_lost = on_sent, on_lost
        self._out: queue.SimpleQueue[tuple[int, Pieces, int] | None] = queue.SimpleQueue()
        self._in: queue.SimpleQueue[tuple[int, memoryview, Callable[[], None]] | None] = queue.SimpleQueue()
        self._started: set[str] = set()
        self._lock = threading.Lock()
        self._running = 0
        self._over = self._released = False
        self._killed = threading.Event()

    # --- the loop's side ---

    def send(self, sequence: int, pieces: Pieces, nbytes: int) -> None:
        self._out.put((sequence, pieces, nbytes))
        self._run("out", self._sending)

    def receive(self, sequence: int, into: memoryview, arrived: Callable[[], None]) -> None:
        self._in.put((sequence, into, arrived))
        self._run("in", self._receiving)

    def finish(self) -> None:
        """Everything was sent and nothing more is expected: part in good order. Idempotent, returns at once."""
        if self._over:
            return
        self._over = True
        self._out.put(None)
        self._in.put(None)
        self._run("out", self._sending)
        self._run("in", self._receiving)

    def kill(self) -> None:
        """The link is broken. Idempotent, returns at once; the threads end by themselves."""
        if self._killed.is_set():
            return
        self._over = True
        self._killed.set()
        self._out.put(None)
        self._in.put(None)
        self._interrupt()
        self._release_if_over()

    def _run(self, direction: str, body: Callable[[], None]) -> None:
        if direction not in self._started:
            self._started.add(direction)
            with self._lock:
                self._running += 1
            # Daemons: a process that ends must not wait for a peer that does not read.
            threading.Thread(target=self._guard, args=(body,), name=f"lane-{direction}", daemon=True).start()

    def _release_if_over(self) -> None:
        with self._lock:
            if self._released or self._running or not self._over:
                return
            self._released = True
        self._release()

    # --- the threads' side ---

    def _tell(self, call: Callable[..., None], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, and with it the link
            self._loop.call_soon_threadsafe(call, *arguments)

    def _guard(self, body: Callable[[], None]) -> None:
        try:
            body()
        except LaneError as err:
            if not self._killed.is_set():
                self._tell(self._on_lost, str(err))
        except Exception as err:  # the top of the thread: whoever waits for it would wait for good
            if not self._killed.is_set():
                logger.exception("a lane ended in a way that it does not know", extra={"lane": self.kind})
                self._tell(self._on_lost, f"its {self.kind} lane failed: {type(err).__name__}: {str(err)[:200]}")
        finally:
            with self._lock:
                self._running -= 1
            self._release_if_over()

    def _sending(self) -> None:
        while (job := self._out.get()) is not None:
            sequence, pieces, nbytes = job
            self._put(sequence, pieces, nbytes)
            del job, pieces  # the next wait may be long, and must not keep the sender's arrays
            self._tell(self._on_sent, nbytes)
        if not self._killed.is_set():
            self._part_out()

    def _receiving(self) -> None:
        while (job := self._in.get()) is not None:
            sequence, into, arrived = job
            self._get(sequence, into)
            del job, into
            self._tell(arrived)
            del arrived
        if not self._killed.is_set():
            self._part_in()

    # --- what a lane is made of ---

    @abc.abstractmethod
    def _put(self, sequence: int, pieces: Pieces, nbytes: int) -> None:
        """Blocks until the peer or the kernel has it. Raises LaneError."""

    @abc.abstractmethod
    def _get(self, sequence: int, into: memoryview) -> None:
        """Blocks until `into` is full. Raises LaneError, also where another record comes."""

    @abc.abstractmethod
    def _interrupt(self) -> None:
        """From the loop's thread: wake whoever blocks in `_put` or `_get`."""

    def info(self) -> bytes | None:
        """TCP_INFO of what it goes over, for `tcp`, which watches it; None: nothing to be said."""
        return None

    def _part_out(self) -> None:  # noqa: B027 - a lane may have nothing to do here
        """After the last record, in good order."""

    def _part_in(self) -> None:  # noqa: B027 - as above
        """When nothing more is expected, in good order."""

    def _release(self) -> None:  # noqa: B027 - as above
        """Both threads are at their end, or there were none."""


class SocketLane(Lane):
    """See the module. Takes the connected socket over."""

    kind = "plain"

    def __init__(self, sock: socket.socket, *, on_sent: Callable[[int], None], on_lost: Callable[[str], None]) -> None:
        super().__init__(on_sent=on_sent, on_lost=on_lost)
        sock.setblocking(True)
        self._sock = sock

    def info(self) -> bytes | None:
        with contextlib.suppress(OSError):  # closed a moment ago, by its own threads
            return self._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
        return None

    def _put(self, sequence: int, pieces: Pieces, nbytes: int) -> None:
        left: list[bytes | memoryview] = [RECORD.pack(sequence, nbytes), *pieces]
        try:
            while left:
                sent = self._sock.sendmsg(left[:_IOV_MAX])
                done = 0
                while done < len(left) and sent >= (size := memoryview(left[done]).nbytes):
                    sent -= size
                    done += 1
                del left[:done]
                if sent:
                    left[0] = memoryview(left[0]).cast("B")[sent:]
        except OSError as err:
            raise LaneError(f"its bulk connection failed: {err.strerror or err}") from err

    def _get(self, sequence: int, into: memoryview) -> None:
        record = bytearray(RECORD.size)
        self._fill(memoryview(record))
        if (got := RECORD.unpack(record)) != (sequence, into.nbytes):
            raise LaneError(f"its bulk connection brought record {got} where {(sequence, into.nbytes)} was due")
        self._fill(into)

    def _fill(self, view: memoryview) -> None:
        at = 0
        try:
            while at < view.nbytes:
                got = self._sock.recv_into(view[at:], 0, socket.MSG_WAITALL)
                if not got:
                    raise LaneError("its process is gone (its bulk connection ended within a message)")
                at += got
        except OSError as err:
            raise LaneError(f"its bulk connection failed: {err.strerror or err}") from err

    def _interrupt(self) -> None:
        with contextlib.suppress(OSError):  # the peer was faster
            self._sock.shutdown(socket.SHUT_RDWR)

    def _part_out(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)

    def _part_in(self) -> None:
        # What the peer still sends is thrown away: closing with it unread would reset what we have just sent.
        deadline = monotonic() + _PARTING_S
        scratch = bytearray(1 << 16)
        with contextlib.suppress(OSError):
            while (left_s := deadline - monotonic()) > 0:
                self._sock.settimeout(left_s)
                if not self._sock.recv_into(scratch):
                    return

    def _release(self) -> None:
        self._sock.close()
