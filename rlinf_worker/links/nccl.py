"""Buffers on a GPU, to a process with another GPU: a thin adapter over torch's ProcessGroupNCCL.

For: `meet_gpus`. Not for: a gang's collectives; each link has groups of its own, on a store of its own
under a key that nobody used before, and knows no default group.

    listener   rank 0: the store, on a port of its own, and the key; both told in the yes to the hello
    dialer     rank 1
    two groups of two, one for each direction: sends and receives of one communicator share a stream and would wait for
    each other. Both are made and tried with one byte each, in one order, before the first message: making a
    communicator waits for the device, and so must not meet a transfer.

    rule                                  held by
    one rank per GPU                      `devices.choose`
    no key twice                          the listener draws it; the dialer refuses one that it has seen
    the same order at both ends           numbers only rise, one message at a time (`devices`); tag = number
    nothing after abort                   `Groups` looks under its lock
    abort wakes waiters                   ncclCommAbort ends the kernels; threads poll, and look at `killed`

A dead peer is the word of the link's connection or of the control plane: it kills the lane, and that aborts. torch's
own watchdog must not end this process for that, as by default it does: error handling is off for these groups.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import importlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from rlinf_worker.links.beside import Beside, DeviceLane
from rlinf_worker.links.devices import DEVICE_ERRORS, Gpu, place, room_for
from rlinf_worker.links.lane import Lane, LaneError, Pieces

logger = logging.getLogger(__name__)

BUILD_TIMEOUT_S: Final = 60.0
"""For both communicators. NCCL takes 1 to 5 s; meanwhile all goes by way of the host."""

STALL_S: Final = 1800.0
"""A receiver that takes nothing for so long breaks the lane, which NCCL cannot be told not to do. Longer than any step;
as setting peer_wait_s."""

STORE_TIMEOUT_S: Final = 10.0
"""For both ends to meet at the store. Takes 5 ms; the rest is a loaded machine."""

STORE_WAIT_S: Final = 3.0
"""For a store, within a hello's 5 s. torch asks the DNS for the name of every peer, only to log it: as a rule 5 ms."""

_POLL_S: Final = (0.00002, 0.002)
"""First and longest pause between two looks: 1 MB over NVLink takes 10 us, 1 GB 5 ms."""

_LINK_ENDED: Final = "the link ended"
_ERROR_HANDLING: Final = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_constructing = threading.Lock()
_keys_seen: deque[str] = deque(maxlen=4096)


@contextlib.contextmanager
def _no_error_handling() -> Iterator[None]:
    """torch reads it in the constructor, and only there; a gang's groups in this process keep theirs."""
    with _constructing:
        before = os.environ.get(_ERROR_HANDLING)
        os.environ[_ERROR_HANDLING] = "0"
        try:
            yield
        finally:
            if before is None:
                del os.environ[_ERROR_HANDLING]
            else:
                os.environ[_ERROR_HANDLING] = before


def new_group(store: Any, key: str, rank: int) -> Any:
    """A ProcessGroupNCCL of two. A function, so that a test without two GPUs can give another one."""
    distributed: Any = importlib.import_module("torch.distributed")
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = datetime.timedelta(seconds=STALL_S)
    with _no_error_handling():
        return distributed.ProcessGroupNCCL(distributed.PrefixStore(key, store), rank, 2, options)


class Groups:
    """The two communicators of one link at one end."""

    def __init__(self, gpu: Gpu, rank: int) -> None:
        self.gpu, self.rank = gpu, rank
        self.killed = threading.Event()
        self._lock = threading.Lock()
        self._groups: list[Any] = []

    def build(self, store: Any, key: str) -> None:
        """Blocks until the peer is there too and a byte went each way. Raises RuntimeError, LaneError."""
        self._on_gpu()
        for direction in (0, 1):
            group = new_group(store, f"{key}/{direction}", self.rank)
            with self._lock:
                self._check()
                self._groups.append(group)
        _, (probe,) = room_for(self.gpu.index, [1])
        for direction in (0, 1):
            self.move(direction, [probe], 0)

    def _on_gpu(self) -> None:
        """Makes it the device of this thread, which has none yet."""
        device = place(self.gpu.index)
        if device.type == "cuda":
            importlib.import_module("torch").cuda.set_device(device)

    def _check(self) -> None:
        if self.killed.is_set():
            raise LaneError("the link is broken")

    def move(self, direction: int, tensors: list[Any], tag: int) -> None:
        """Blocks until they are sent (the direction is this rank's) or here. Raises LaneError."""
        pause_s = _POLL_S[0]
        try:
            for tensor in tensors:
                with self._lock:
                    self._check()
                    group = self._groups[direction]
                    call = group.send if direction == self.rank else group.recv
                    work = call([tensor], 1 - self.rank, tag)
                while not work.is_completed():
                    if self.killed.wait(pause_s):
                        raise LaneError("the link is broken")
                    pause_s = min(2 * pause_s, _POLL_S[1])
                self._check()  # an aborted kernel is completed too
                if (error := group.get_error().name) != "SUCCESS":
                    raise LaneError(f"NCCL failed between the two GPUs ({error})")
        except DEVICE_ERRORS as err:
            raise LaneError(f"NCCL failed between the two GPUs: {str(err)[:200]}") from err

    def abort(self) -> None:
        """Wakes whoever waits. Returns at once: NCCL may take a while, and has a thread of its own for that."""
        if not self.killed.is_set():
            self.killed.set()
            threading.Thread(target=self._end, args=("abort",), name="nccl-abort", daemon=True).start()

    def _end(self, how: str) -> None:
        with self._lock:
            groups, self._groups = self._groups, []
        for group in groups:
            try:
                getattr(group, how)()
            except RuntimeError as err:
                logger.warning("NCCL did not end well", extra={"call": how, "why": str(err)[:300]})


class _Pipe(Lane):
    """The two threads of a lane; see `lane`."""

    kind = "nccl"

    def __init__(self, groups: Groups, *, on_sent: Callable[[int], None], on_lost: Callable[[str], None]) -> None:
        super().__init__(on_sent=on_sent, on_lost=on_lost)
        self._groups = groups

    def _put(self, sequence: int, pieces: Pieces, nbytes: int) -> None:
        self._move(sequence, pieces, self._groups.rank)

    def _get(self, sequence: int, into: Any) -> None:
        self._move(sequence, into, 1 - self._groups.rank)

    def _move(self, number: int, tensors: Any, direction: int) -> None:
        ready, buffers = tensors
        try:
            self._groups._on_gpu()
            if ready is not None:
                ready.synchronize()  # what the loop's thread had put on its stream when the message was given
        except DEVICE_ERRORS as err:
            raise LaneError(f"this end's GPU failed before NCCL could move a message: {str(err)[:200]}") from err
        self._groups.move(direction, buffers, number)

    def _interrupt(self) -> None:
        self._groups.abort()


def _ready_event(device: Any) -> Any:
    """Behind what this thread's stream still computes; None where there is no stream."""
    if device.type != "cuda":
        return None
    event = importlib.import_module("torch").cuda.Event()
    event.record()
    return event


class NcclLane(DeviceLane):
    """See the module."""

    kind = "nccl"

    def __init__(self, groups: Groups, beside: Beside) -> None:
        super().__init__(groups.gpu, beside)
        self._pipe = _Pipe(groups, on_sent=lambda _: None, on_lost=beside.lost)

    def give(self, number: int, tensors: list[Any]) -> None:
        try:
            job: Any = (_ready_event(place(self.gpu.index)), tensors)
        except DEVICE_ERRORS as err:
            self.beside.lost(f"this end cannot hand over GPU memory (NCCL: {str(err)[:200]})")
            return
        self._pipe.send(number, job, 0)

    def heard(self, word: str, number: int, extra: list[Any]) -> bool:
        if word != "done" or not self.is_asked_for(number):
            return False
        self.let_go(number)  # not when it was sent: NCCL may still hold a part of it in this end's memory
        return True

    def receive(self, number: int, sizes: list[int], arrived: Callable[[list[Any]], None]) -> None:
        _, buffers = room_for(self.gpu.index, sizes)
        job: Any = (_ready_event(place(self.gpu.index)), buffers)

        def received() -> None:
            self.say("done", number)
            arrived(buffers)

        self._pipe.receive(number, job, received)
        self.say("go", number)

    def kill(self) -> None:
        self._held.clear()
        self._pipe.kill()


# --- meeting ---------------------------------------------------------------------------------------------------------


class GroupsInMaking:
    """Both ends build their groups in a thread, which nobody waits for; `ready` gets them, or None."""

    def __init__(
        self, gpu: Gpu, *, rank: int, make_store: Callable[[], Any], key: str, ready: Callable[[Groups | None], None]
    ) -> None:
        self._groups = Groups(gpu, rank)
        self._make_store = make_store  # the listener's store lives as long as the link: the dialer may come late
        self._ready = ready
        self._loop = asyncio.get_running_loop()
        self._over = False
        self._deadline = self._loop.call_later(BUILD_TIMEOUT_S, self._end, f"took more than {BUILD_TIMEOUT_S:g} s")
        # No executor: what blocks in NCCL must not keep the process from ending.
        threading.Thread(target=self._build, args=(key,), name="nccl-build", daemon=True).start()

    def _build(self, key: str) -> None:
        why = ""
        try:
            self._groups.build(self._make_store(), key)
        except (LaneError, *DEVICE_ERRORS) as err:
            why = str(err)[:300] or type(err).__name__
        with contextlib.suppress(RuntimeError):  # the loop is closed, and with it the link
            self._loop.call_soon_threadsafe(self._end, why)

    def _end(self, why: str) -> None:
        if self._over:
            return
        self._over = True
        self._deadline.cancel()
        if why:
            self._groups.abort()
            level = logging.DEBUG if why == _LINK_ENDED else logging.WARNING
            logger.log(level, "no NCCL between two GPUs, all goes by way of the host", extra={"why": why})
        self._ready(None if why else self._groups)

    def abandon(self) -> None:
        """The link is at its end. Idempotent."""
        self._end(_LINK_ENDED)


async def open_store(host: str) -> Any | None:
    """A listener's, on a port of its own; None, with the reason in the log, where it does not come about in time."""
    try:
        return await asyncio.wait_for(asyncio.to_thread(make_store, host, 0, is_master=True), STORE_WAIT_S)
    except (RuntimeError, TimeoutError) as err:
        why = str(err)[:300] or f"not there within {STORE_WAIT_S:g} s; does the DNS answer?"
        logger.warning("no store for NCCL, all goes by way of the host", extra={"host": host, "why": why})
        return None


def make_store(host: str, port: int, *, is_master: bool) -> Any:
    distributed: Any = importlib.import_module("torch.distributed")
    timeout = datetime.timedelta(seconds=STORE_TIMEOUT_S)
    return distributed.TCPStore(host, port, None, is_master=is_master, timeout=timeout, wait_for_workers=False)


def come(host: str, ticket: Mapping[str, Any]) -> tuple[Callable[[], Any], str]:
    """The dialer's. Raises LaneError for what is no ticket, or one that was shown before."""
    port, key = ticket.get("port"), ticket.get("key")
    if not isinstance(port, int) or not isinstance(key, str) or len(key) != 32:
        raise LaneError(f"got a ticket for NCCL that cannot be read: {sorted(ticket)}")
    if key in _keys_seen:
        raise LaneError("got a key for NCCL that was used before")
    _keys_seen.append(key)
    return lambda: make_store(host, port, is_master=False), key
