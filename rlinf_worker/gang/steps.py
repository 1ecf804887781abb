"""The loop of a role that ends steps: rounds in, one update, one commit; weights and acknowledgements only after it.

    take_round ... last ──> train ──> step_done ──(all ranks)──> publish ──> checkpoint ──> ack
                                                       ▲ only now may anybody see the weights, or a unit be forgotten

For: `ctx.train(trainer)`. Not for: what is computed (the trainer, roles/protocol.py), when a step counts and whether it
is saved (the driver), which round is whose (channels).

| waits | for | unblocked by |
|---|---|---|
| take_round, complete | a round, and the other inputs of its units | the driver; the units' producers |
| meet | the other ranks, before what holds collectives | their coming; meet_wait_s |
| step_done | every rank's word on the step | the driver |
| publish | receivers' confirmations | receivers; the loss of their links |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from time import perf_counter
from typing import Any, Final

from rlinf_api.errors import UserError
from rlinf_worker.channels import lineage
from rlinf_worker.channels.protocol import ChannelClosed, Item, PolicyVersion, Round
from rlinf_worker.checkpoints.store import Checkpoint
from rlinf_worker.gang.saving import Saving, beside
from rlinf_worker.queues.channel import Joined
from rlinf_worker.roles.protocol import Place, RoleContext, StepCommit, Trainer, TrainerStep

BEFORE_RESTORE: Final[Place] = (-1, 0, 0)  # the places of a gang's start come before those of all steps
RESTORE: Final[Place] = (-1, 0, 1)
UPDATE: Final = 1 << 40  # a step's last places; a trainer may meet by the numbers of its rounds before
SAVE: Final = UPDATE + 1


class StepLoop:
    """One per worker, for its life."""

    def __init__(self, trainer: Trainer, ctx: RoleContext, *, clock: Callable[[], float]) -> None:
        self._trainer, self._ctx = trainer, ctx
        self._version = PolicyVersion(0, 0)
        self._units: list[tuple[Item, ...]] = []  # of the step that is under way
        self._took_s = self._publish_s = 0.0  # in the trainer, of that step's rounds; of the last publish
        self._free_at = perf_counter()  # since when this rank has waited for the step's data
        self._saving = Saving(trainer, ctx, at=SAVE, clock=clock)

    async def run(self) -> None:
        ctx = self._ctx
        async with ctx.turn():
            await ctx.gang.form()
            await self._trainer.build(ctx)
            self._inputs = [ctx.channel(name) for name in self._trainer.inputs]
            self._joined = Joined(self._inputs)
            self._version = await self._begin()
            await self._publish()
            try:
                await self._steps()
            finally:
                await self._saving.leave()
        await ctx.stopping.wait()

    async def _begin(self) -> PolicyVersion:
        """On the newest checkpoint; the driver says what its weights are called from now on."""
        ctx, trainer, store = self._ctx, self._trainer, self._ctx.checkpoints
        with ctx.span("load"):
            found = await beside(store.latest)
        if trainer.sharded:
            # A rank of the gang before may have closed the last part of another one after rank 0 had looked.
            version, *_ = await ctx.gang.meet(BEFORE_RESTORE, str(found.version) if found is not None else "")
            if found is None or str(found.version) != version:
                found = await beside(lambda: store.of(version)) if version else None
        if found is None:
            return await ctx.ready()
        state = None
        if not trainer.sharded and (ctx.rank == 0 or not trainer.holds_collectives):
            with ctx.span("load", deadline_s=found.reading_s):  # or that of its phase, where it is later
                state = await beside(partial(_read, trainer, found))
        if trainer.holds_collectives:
            await ctx.gang.meet(RESTORE)  # rank 0 may have read for minutes
        with ctx.span("load"):
            if trainer.sharded:
                await beside(partial(trainer.read_shards, found))
            else:
                trainer.restore(state)
        return await ctx.ready(version=found.version)

    async def _steps(self) -> None:
        while not self._ctx.stopping.is_set():
            try:
                part = await self._inputs[0].take_round()
                if (part.branch, part.step) <= (self._version.branch, self._version.number):
                    continue  # a new driver cannot know that this step's last round had come
                self._joined.forget(part.branch)
                given = [await self._joined.complete(item) for item in part.items]
            except ChannelClosed:
                return
            self._units = [u for u in self._units if (u[0].branch, u[0].step) == (part.branch, part.step)] + given
            if not part.last:
                begun = perf_counter()
                await self._trainer.take(part)
                self._took_s += perf_counter() - begun
                continue
            commit = await self._step(part)
            for unit in self._units:
                for channel, item in zip(self._inputs, unit, strict=True):
                    channel.ack(item)
            self._units, self._took_s = [], 0.0
            if commit.last:
                return
            await self._ctx.safe_point()  # with nothing in hand: who is off its slots is asked back by what waits

    # --- one step -----------------------------------------------------------------------------------------------------
    async def _step(self, part: Round) -> StepCommit:
        ctx, trainer = self._ctx, self._trainer
        self._units.sort(key=lambda unit: lineage.sort_key(unit[0].key))
        step = TrainerStep(number=part.step, branch=part.branch, units=tuple(self._units))
        if trainer.holds_collectives:
            await ctx.gang.meet((step.branch, step.number, UPDATE))
        started = perf_counter()
        numbers = _numbers(await trainer.train(step), trainer)
        # Where the step's time went, as this rank sees it; what is left of step_s is the commit and its checkpoint.
        numbers["update_s"] = self._took_s + perf_counter() - started
        numbers["collect_s"] = started - self._free_at - self._took_s
        numbers["publish_s"] = self._publish_s
        keys = tuple(unit[0].key for unit in self._units)
        commit = await ctx.step_done(step.number, branch=step.branch, keys=keys, metrics=numbers)
        self._version = commit.version
        await self._publish(closes_step=True)
        if commit.checkpoint:
            await self._saving.save(commit)
        self._saving.look()
        self._free_at = perf_counter()
        return commit

    async def _publish(self, *, closes_step: bool = False) -> None:
        trainer, version, begun = self._trainer, self._version, perf_counter()
        weights = trainer.weights(version)
        with self._ctx.span("weights", step=version.number) if weights is not None else nullcontext():
            if weights:
                await self._ctx.weights.publish(version, weights, delta=trainer.delta)
            if closes_step:
                await trainer.committed(version, publish_s=perf_counter() - begun)
        self._free_at = perf_counter()
        self._publish_s = self._free_at - begun


def _read(trainer: Trainer, found: Checkpoint) -> Any:
    with found.folder() as folder:
        return trainer.read(folder)


def _numbers(told: object, trainer: Trainer) -> dict[str, float]:
    """A copy. A class that inherits from Trainer and names its method otherwise runs the protocol's, which is empty."""
    if not isinstance(told, Mapping):
        raise UserError(
            f"{type(trainer).__module__}:{type(trainer).__name__}.train returned no numbers",
            got=f"{type(told).__name__} {ascii(told)[:80]}", wanted="names and numbers, as {'loss': 0.5}",
            next="define train, and return them; {} where there are none",
        )  # fmt: skip
    return dict(told)
