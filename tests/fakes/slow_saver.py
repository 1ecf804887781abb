"""`kind: tests.fakes.slow_saver:SlowSaver`: an actor whose volume takes its time. Config `seconds`."""

import time
from pathlib import Path
from typing import Any

from rlinf_worker.roles.actor import portable
from rlinf_worker.roles.actor.role import FsdpRole
from rlinf_worker.roles.protocol import RoleContext


class SlowSaver(FsdpRole):
    async def run(self, ctx: RoleContext) -> None:
        write = portable.write

        def slowly(folder: Path, **content: Any) -> None:
            time.sleep(float(ctx.config["seconds"]))
            write(folder, **content)

        portable.write = slowly  # in this process, which is this worker's
        await super().run(ctx)
