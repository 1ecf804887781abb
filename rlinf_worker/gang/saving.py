"""A checkpoint as the committing gang's rank 0 writes it: a disk that is full for a while costs that checkpoint and not
the training; the last one, without which the job's weights would be gone, is waited for.

Called by the step loop, between two steps. Not for: what is in a checkpoint (the trainer), where it lies and when it
counts (checkpoints/store.py), when to try again (the driver).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from rlinf_worker.checkpoints.store import CheckpointUnwritable
from rlinf_worker.roles.protocol import CheckpointStore, StepCommit

LAST_SAVE_S: Final = 90.0  # the time for trying to write the last checkpoint: less than the driver waits for it
LAST_SAVE_PAUSE_S: Final = 1.0


async def save(
    store: CheckpointStore,
    commit: StepCommit,
    write: Callable[[Path], None],
    *,
    failures: tuple[type[Exception], ...] = (),
) -> None:
    """`write` puts the trainer's files into a folder. `failures`: what it raises, besides OSError, where they cannot be
    written. In phase `load`, whose deadline is above LAST_SAVE_S. Raises CheckpointUnwritable where the last one could
    not be written in that time."""
    tolerated: tuple[type[Exception], ...] = (OSError, CheckpointUnwritable, *failures)
    deadline = time.monotonic() + (LAST_SAVE_S if commit.last else 0.0)
    while True:
        try:
            write(Path(store.begin(commit.version)))
            store.finish(commit.version, commit.state_json)
            return
        except tolerated as error:
            store.failed(commit.version, str(error))
            if not commit.last:
                return
            if time.monotonic() >= deadline:
                raise _given_up(commit, error) from error
        await asyncio.sleep(LAST_SAVE_PAUSE_S)


def _given_up(commit: StepCommit, error: Exception) -> CheckpointUnwritable:
    if isinstance(error, CheckpointUnwritable):
        return error
    return CheckpointUnwritable(
        f"the last checkpoint, {commit.version}, cannot be written", got=str(error),
        wanted=f"room for it within {LAST_SAVE_S:g} s", next="look at the volume in spec.checkpoint.uri",
    )  # fmt: skip
