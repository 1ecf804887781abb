"""A rank's part of a checkpoint: when it is written, what becomes of one that cannot be, and the last one, that must.

    simple     state ── write, close ──────────────────────────── next step      rank 0 alone, in its step
    sharded    state (a copy) ── next step ── next step ── ...                   every rank
                      └── write, close, beside them ──┘                          one at a time: the next save waits
    the last   state ── begin ── write, close ── (again, all ranks together) ──  in its step, as nothing comes behind it

For: the step loop. Not for: what is written (the trainer), when a checkpoint is whole (checkpoints/store.py).

All that touches a disk or a store is done in threads: weights are served, and signs of life given, from this process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Final, TypeVar

from rlinf_worker.checkpoints.store import ALONE, Checkpoints, CheckpointUnwritable, Writer
from rlinf_worker.roles.protocol import Place, RoleContext, StepCommit, Trainer
from rlinf_worker.threads import in_a_thread

LAST_SAVE_S: Final = 90.0  # the time for trying to write the last checkpoint: less than the driver waits for it
LAST_SAVE_PAUSE_S: Final = 1.0

Done = TypeVar("Done")
Agree = Callable[[Exception | None], Awaitable[Exception | None]]
"""What kept a rank from it, and what kept any."""


async def beside(call: Callable[[], Done]) -> Done:
    return await asyncio.wrap_future(in_a_thread(call, name="checkpoint"))


class Saving:
    """One per worker. `at`: the gang's place in a step for what has to do with saves, of which there are as many behind
    it as are needed. `clock`: the worker's, as the driver waits for the last one by such a clock, too."""

    def __init__(self, trainer: Trainer, ctx: RoleContext, *, at: int, clock: Callable[[], float]) -> None:
        self._trainer, self._ctx, self._at, self._clock = trainer, ctx, at, clock
        self._writer = Writer(rank=ctx.rank, of=ctx.world) if trainer.sharded else ALONE
        self._tolerated: tuple[type[Exception], ...] = (OSError, CheckpointUnwritable, *trainer.failures)
        self._beside: asyncio.Task[Exception | None] | None = None  # the save that is under way

    @property
    def _store(self) -> Checkpoints:
        return self._ctx.checkpoints

    async def save(self, commit: StepCommit) -> None:
        """In phase `load`, whose deadline is above LAST_SAVE_S. A disk that is full for a while costs this checkpoint
        and not the training; the last one, without which the job's weights would be gone, is waited for. Raises
        CheckpointUnwritable where the last one could not be written in that time."""
        ctx, trainer = self._ctx, self._trainer
        if self._beside is not None:
            with ctx.span("other", step=commit.step, phase="load"):
                await self._beside
            self._beside = None
        if trainer.holds_collectives:
            await ctx.gang.meet((commit.version.branch, commit.step, self._at))
        with ctx.span("other", step=commit.step, phase="load"):
            state = trainer.state()  # of all ranks together
            if commit.last and (trainer.sharded or ctx.rank == 0):
                await self._until_kept(commit, state)
            elif trainer.sharded:
                self._beside = asyncio.create_task(self._try(commit, state, _nobody_else))
            elif ctx.rank == 0:
                await self._try(commit, state, _nobody_else)

    def look(self) -> None:
        """Between two steps. Raises what a save that was under way has raised and nobody tolerates."""
        if self._beside is not None and self._beside.done():
            self._beside.result()

    async def leave(self) -> None:
        """The role ends otherwise than with its last step: who takes its place begins on what is whole by then."""
        if self._beside is not None:
            self._beside.cancel()
            await asyncio.wait([self._beside])
            if not self._beside.cancelled():
                self._beside.result()

    async def _until_kept(self, commit: StepCommit, state: Any) -> None:
        deadline = self._clock() + LAST_SAVE_S
        places = ((commit.version.branch, commit.step, self._at + number) for number in count(1))
        together = partial(self._agree, places) if self._trainer.sharded else _nobody_else
        while (error := await self._try(commit, state, together)) is not None:
            if self._clock() >= deadline:
                raise _given_up(commit, error) from error
            await asyncio.sleep(LAST_SAVE_PAUSE_S)

    async def _try(self, commit: StepCommit, state: Any, agree: Agree) -> Exception | None:
        """What kept it from being written. Ranks that try together begin together: no part of a try before is taken for
        one of this."""
        store, version, writer = self._store, commit.version, self._writer
        error: Exception | None = None
        folder = Path()
        try:
            folder = await beside(lambda: store.begin(version, writer))
        except self._tolerated as raised:
            error = raised
        if (error := await agree(error)) is None:
            try:
                await beside(lambda: self._write(commit, folder, state))
            except self._tolerated as raised:
                error = raised
            error = await agree(error)
        if error is not None:
            problem = str(error)
            await beside(lambda: store.failed(version, problem, writer))
        return error

    def _write(self, commit: StepCommit, folder: Path, state: Any) -> None:
        self._trainer.write(folder, state)
        self._store.finish(commit.version, commit.state_json, self._writer)

    async def _agree(self, places: Iterator[Place], error: Exception | None) -> Exception | None:
        """The error of the first rank that has one."""
        problems = await self._ctx.gang.meet(next(places), str(error or ""))
        found = next((problem for problem in problems if problem), "")
        return error if str(error or "") == found else OSError(found)


async def _nobody_else(error: Exception | None) -> Exception | None:
    return error


def _given_up(commit: StepCommit, error: Exception) -> CheckpointUnwritable:
    if isinstance(error, CheckpointUnwritable):
        return error
    return CheckpointUnwritable(
        f"the last checkpoint, {commit.version}, cannot be written", got=str(error),
        wanted=f"room for it within {LAST_SAVE_S:g} s", next="look at the place in spec.checkpoint.uri",
    )  # fmt: skip
