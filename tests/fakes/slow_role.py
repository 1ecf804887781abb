"""A role whose import takes a minute, as one of a large library on a cold disk may."""

import time

from rlinf_worker.roles.protocol import RoleContext

time.sleep(60)


class Slow:
    async def run(self, ctx: RoleContext) -> None:
        await ctx.ready()
