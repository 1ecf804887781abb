"""A lane over torch's gloo: for networks where its transport beats a plain socket, and only by setting (`bulk: gloo`).

For: `tcp`, at ends that have torch loaded already: nothing here makes a worker import it. Not for: a gang's
collectives; each lane has groups of its own, on a store of its own, and knows no default group.

    listener   rank 0: the store, on a port of its own, and a key that nobody used before
    dialer     rank 1: port and key come with the yes to its hello
    two groups of two, one for each direction: both ends of one must call in the same order, and the directions do not

gloo cannot be interrupted: abort and shutdown do not wake a blocked call, and a time-out closes the pair for good. So
calls are broadcasts, which can be polled (a recv cannot), and whoever polls gives up when the link is broken, on the
word of the connection or of the control plane. The group is dropped in the lane's own thread, which blocks until the
other end drops its own or STALL_S have passed; nobody waits for that thread.
"""

from __future__ import annotations

import asyncio
import datetime
import importlib
import logging
import secrets
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from rlinf_worker.links.lane import Lane, LaneError, Pieces

logger = logging.getLogger(__name__)

STALL_S: Final = 1800.0
"""A receiver that takes nothing for so long breaks the lane, which gloo cannot be told not to do. Longer than any step;
as PEER_WAIT_S of the channels."""

BUILD_TIMEOUT_S: Final = 10.0
"""For both ends to meet at the store. Takes 5 ms; the rest is a loaded machine."""

STORE_WAIT_S: Final = 3.0
"""For a store, within a hello's 5 s. torch asks the DNS for the name of every peer, only to log it: as a rule 5 ms."""

_POLL_S: Final = (0.00005, 0.002)
"""First and longest pause between two looks: 64 MB take 25 ms."""


def at_hand() -> bool:
    """Torch is loaded, with gloo in it; not while another thread still imports it."""
    distributed = sys.modules.get("torch.distributed")
    return bool(getattr(distributed, "is_available", bool)() and getattr(distributed, "is_gloo_available", bool)())


class GlooLane(Lane):
    """See the module."""

    kind = "gloo"

    def __init__(
        self, out: Any, into: Any, *, rank: int, on_sent: Callable[[int], None], on_lost: Callable[[str], None]
    ) -> None:
        super().__init__(on_sent=on_sent, on_lost=on_lost)
        self._torch: Any = importlib.import_module("torch")
        self._groups: tuple[Any, Any] | None = (out, into)
        self._rank = rank

    def _put(self, sequence: int, pieces: Pieces, nbytes: int) -> None:
        whole = pieces[0] if len(pieces) == 1 else bytearray(b"".join(pieces))
        if memoryview(whole).readonly:
            whole = bytearray(whole)
        record = self._torch.tensor([sequence, nbytes], dtype=self._torch.int64)
        for tensor in (record, self._torch.frombuffer(whole, dtype=self._torch.uint8)):
            self._move(0, tensor, root=self._rank)

    def _get(self, sequence: int, into: memoryview) -> None:
        record = self._torch.zeros(2, dtype=self._torch.int64)
        self._move(1, record, root=1 - self._rank)
        if (got := tuple(record.tolist())) != (sequence, into.nbytes):
            raise LaneError(f"gloo brought record {got} where {(sequence, into.nbytes)} was due")
        self._move(1, self._torch.frombuffer(into, dtype=self._torch.uint8), root=1 - self._rank)

    def _move(self, direction: int, tensor: Any, *, root: int) -> None:
        if self._groups is None:
            raise LaneError("gloo's groups are gone")
        try:
            work = self._groups[direction].broadcast(tensor, root)
            pause_s = _POLL_S[0]
            while not work.is_completed():
                if self._killed.wait(pause_s):
                    raise LaneError("the link is broken")
                pause_s = min(2 * pause_s, _POLL_S[1])
            work.wait()
        except RuntimeError as err:
            raise LaneError(f"its process is gone (gloo: {str(err)[:200]})") from err

    def _interrupt(self) -> None:
        """Whoever polls looks at `_killed`."""

    def _release(self) -> None:
        self._groups = None  # blocks while a call is pending


class Meeting:
    """The listener's side of making a lane: its store, and what the dialer has to know."""

    def __init__(self, host: str, store: Any) -> None:
        self._host, self.key = host, secrets.token_hex(16)
        self._store = store
        self.ticket = {"gloo_port": int(self._store.port), "key": self.key}

    def groups(self) -> tuple[Any, Any]:
        """Blocks until the dialer is there, at most BUILD_TIMEOUT_S. Raises RuntimeError."""
        return _groups(self._store, self.key, rank=0, host=self._host)


def groups_of_dialer(host: str, ticket: Mapping[str, Any], *, local: str) -> tuple[Any, Any]:
    """Blocks as `Meeting.groups` does. Raises RuntimeError, and KeyError for what is no ticket."""
    store = make_store(host, ticket["gloo_port"], is_master=False)
    return _groups(store, ticket["key"], rank=1, host=local)


async def open_store(host: str) -> Any | None:
    """A listener's, on a port of its own; None, with the reason in the log, where it does not come about in time."""
    try:
        return await asyncio.wait_for(asyncio.to_thread(make_store, host, 0, is_master=True), STORE_WAIT_S)
    except (RuntimeError, TimeoutError) as err:
        why = str(err)[:300] or f"not there within {STORE_WAIT_S:g} s; does the DNS answer?"
        logger.warning("no store for a lane, all goes without one", extra={"host": host, "why": why})
        return None


def make_store(host: str, port: int, *, is_master: bool) -> Any:
    distributed: Any = importlib.import_module("torch.distributed")
    timeout = datetime.timedelta(seconds=BUILD_TIMEOUT_S)
    return distributed.TCPStore(host, port, None, is_master=is_master, timeout=timeout, wait_for_workers=False)


def _groups(store: Any, key: str, *, rank: int, host: str) -> tuple[Any, Any]:
    """What this end sends on, what it receives on."""
    distributed: Any = importlib.import_module("torch.distributed")
    made = []
    for direction in (0, 1):
        options = distributed.ProcessGroupGloo._Options()
        options._devices = [distributed.ProcessGroupGloo.create_device(hostname=host)]
        options._threads = 1
        options._timeout = datetime.timedelta(seconds=STALL_S)
        prefix = distributed.PrefixStore(f"{key}/{direction}", store)
        made.append(distributed.ProcessGroupGloo(prefix, rank, 2, options))
    return made[rank], made[1 - rank]


async def meet(make: Callable[[], tuple[Any, Any]]) -> tuple[Any, Any] | None:
    """`make` in a thread; None, with the reason in the log, where it does not come about."""
    began = time.monotonic()
    try:
        return await asyncio.wait_for(asyncio.to_thread(make), BUILD_TIMEOUT_S)
    except (RuntimeError, TimeoutError, KeyError, TypeError) as err:
        logger.warning(
            "no lane over gloo, all goes over TLS",
            extra={"why": str(err)[:300] or type(err).__name__, "after_s": round(time.monotonic() - began, 3)},
        )
        return None
