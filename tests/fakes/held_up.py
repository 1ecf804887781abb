"""`kind: tests.fakes.held_up:SlowSaver`, `...:LateRank`: actors one of whose ranks takes its time. Config `seconds`."""

import asyncio
import time
from pathlib import Path
from typing import Any

from rlinf_worker.channels.protocol import Round
from rlinf_worker.roles.actor import portable
from rlinf_worker.roles.actor.role import FsdpRole
from rlinf_worker.roles.protocol import RoleContext


class SlowSaver(FsdpRole):
    """Its volume is slow to take the first checkpoint."""

    async def run(self, ctx: RoleContext) -> None:
        write = portable.write

        def slowly(folder: Path, **content: Any) -> None:
            portable.write = write
            time.sleep(float(ctx.config["seconds"]))
            write(folder, **content)

        portable.write = slowly  # in this process, which is this worker's
        await super().run(ctx)


class LateRank(FsdpRole):
    """The second rank has the data of a step later than the first, and says that this takes long."""

    async def build(self, ctx: RoleContext) -> None:
        self._held_up_s = float(ctx.config["seconds"]) if ctx.rank == 1 else 0.0
        self._long = ctx.span
        await super().build(ctx)

    async def take(self, part: Round) -> None:
        if part.step == 2:
            seconds, self._held_up_s = self._held_up_s, 0.0
            with self._long("other", deadline_s=10 * seconds + 1.0):
                await asyncio.sleep(seconds)
