"""A role that waits until its job ends, and imports nothing: beside one that fails before anybody needs the others."""

from rlinf_worker.roles.protocol import RoleContext


class Waiting:
    async def run(self, ctx: RoleContext) -> None:
        await ctx.stopping.wait()
