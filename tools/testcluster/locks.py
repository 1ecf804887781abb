"""Locks of the whole machine, whatever state root a cluster has: names and subnets are the machine's.

    NAME.lock     while somebody makes or removes the cluster of that name
    .SUBNET.lock  while a subnet is chosen; no cluster's name begins like that

state.py and network.py call this. Where two checkouts or two users have state roots of their own, they meet here.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from tools.testcluster.waiting import until

FOLDER = Path("/run/rlinf-testcluster")
"""Root's own, and gone with a reboot, as all is that a lock could be about."""
TIMEOUT_S = 600.0
"""Above all that one `up` may take, waits and images included."""
LOOK_EVERY_S = 0.02
SUBNET = ".SUBNET"


@contextmanager
def held(name: str, *, what: str, report: Callable[[str], None]) -> Iterator[None]:
    """Says once that it waits, for `what` to end. The file goes with the lock, as most names come only once."""
    FOLDER.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = FOLDER / f"{name}.lock"
    lock = _try(file)
    if lock is None:
        report(f"waiting for {what} to end")
        lock = until(lambda: _try(file), what=f"{what} to end", timeout_s=TIMEOUT_S, every_s=LOOK_EVERY_S)
    with lock:
        try:
            yield
        finally:
            file.unlink(missing_ok=True)


def _try(file: Path) -> TextIO | None:
    """The lock's file, locked as long as it is open; None while another has it."""
    with contextlib.ExitStack() as stack:
        lock = stack.enter_context(file.open("a"))
        with contextlib.suppress(BlockingIOError, FileNotFoundError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Whom we waited for may have removed it, and another may hold a new one.
            if os.path.samestat(file.stat(), os.fstat(lock.fileno())):
                stack.pop_all()
                return lock
    return None


def remove_abandoned() -> None:
    """Removes the locks of those who were killed, whose cluster's name may never come again; who waits for one makes a
    new file."""
    for file in FOLDER.glob("*.lock"):
        if not file.name.startswith(".") and (lock := _try(file)) is not None:
            with lock:
                file.unlink(missing_ok=True)
