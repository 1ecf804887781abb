"""The role of kind `synthetic`: reads its numbers, chooses the service, and lets the runtime load and offload it.

Timers stand for work; channels, turns, control and weights are those of any role. docs/synthetic.md says what each
number means. Imports neither numpy nor torch: a worker of it starts in a third of a second of CPU and holds 45 MiB.
"""

from __future__ import annotations

from rlinf_worker.roles.protocol import Memory, RoleContext
from rlinf_worker.roles.synthetic.committing import Committing
from rlinf_worker.roles.synthetic.cycle import Back, Front
from rlinf_worker.roles.synthetic.desk import Desk, figures_of
from rlinf_worker.roles.synthetic.figures import Figures
from rlinf_worker.roles.synthetic.pace import Pacer
from rlinf_worker.roles.synthetic.services import Concurrent, Serial

Service = Serial | Concurrent | Front | Back


class SyntheticRole:
    def __init__(self) -> None:
        self._figures: Figures | None = None
        self._is_loaded = False
        self._switching = Pacer()

    async def run(self, ctx: RoleContext) -> None:
        figures = self._figures = figures_of(ctx)
        desk = Desk(ctx, figures)
        if ctx.role == desk.graph.committing:
            await ctx.train(Committing(desk, in_turn=self._in_turn))
            return
        service = self._service(desk)
        await ctx.ready()
        async with ctx.turn():
            self._in_turn()
            await service.run()

    def _in_turn(self) -> None:
        self._is_loaded = True  # where no lease set is over its slots, nobody loads it

    @staticmethod
    def _service(desk: Desk) -> Service:
        cycle, role = desk.graph.cycle, desk.ctx.role
        if cycle is not None and role == cycle.front:
            return Front(desk)
        if cycle is not None and role == cycle.back:
            return Back(desk)
        return Concurrent(desk) if desk.figures.concurrent else Serial(desk)

    # --- Offloadable: called by the runtime ---------------------------------------------------------------------------
    def memory(self) -> Memory:
        figures = self._figures
        if figures is None:
            return Memory(now=0)
        now = figures.resident_bytes if self._is_loaded else figures.offloaded_bytes
        return Memory(now=now, resident=figures.resident_bytes, peak=figures.peak_bytes)

    async def load(self) -> None:
        if self._figures is not None and not self._is_loaded:
            await self._switching.spend(self._figures.load_s)
            self._is_loaded = True

    async def offload(self) -> None:
        if self._figures is not None and self._is_loaded:
            await self._switching.spend(self._figures.offload_s)
            self._is_loaded = False
