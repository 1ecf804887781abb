"""Roles for tests that start real worker processes: `kind: tests.fakes.toy_roles:Asker`. They import nothing heavy."""

import os
import signal
import sys
import time

from rlinf_api.errors import UserError
from rlinf_worker.roles.protocol import RoleContext


class Echo:
    """Answers whatever is asked in cycle `words`. `dies_at` so many, with a question in hand: kill -9."""

    async def run(self, ctx: RoleContext) -> None:
        await ctx.ready()
        answering, taken = ctx.answering("words"), 0
        async for item in answering:
            taken += 1
            if taken == ctx.config.get("dies_at"):
                os.kill(os.getpid(), signal.SIGKILL)
            with ctx.span("compute", step=item.step):
                reply = {**item.payload, "by": os.getpid(), "attempt": ctx.attempt}
            answering.answer(item, reply)


class Asker:
    """Asks `count` questions, `window` at a time; each must be answered, and reports how many were."""

    async def run(self, ctx: RoleContext) -> None:
        await ctx.ready()
        asking = ctx.asking("words")
        asked, count, waiting, answered = 0, int(ctx.config["count"]), set[str](), 0
        while asked < count or waiting:
            while asked < count and len(waiting) < 4:
                key = f"q{asked}"
                waiting.add(key)
                await asking.ask({"n": asked}, key=key, step=asked)
                asked += 1
            item = await asking.take()
            assert item.payload["n"] == int(item.key[1:])
            waiting.remove(item.key)
            answered += 1
            if answered % 100 == 0:
                ctx.report(step=answered, metrics={"answered": answered})
        ctx.report(step=answered, metrics={"answered": answered})
        await ctx.stopping.wait()


class Wrong:
    async def run(self, ctx: RoleContext) -> None:
        raise UserError(
            "environment 'Nowhere-v0' does not exist", wanted="one of CartPole-v1", next="write env: CartPole-v1"
        )


class Buggy:
    async def run(self, ctx: RoleContext) -> None:
        raise ValueError("the simulator has no floor")


class Blocked:
    """Blocks the event loop, as a long C call does; says so first."""

    async def run(self, ctx: RoleContext) -> None:
        await ctx.ready()
        sys.stderr.write("blocking\n")
        time.sleep(600)  # noqa: ASYNC251  that is the point


class Idle:
    async def run(self, ctx: RoleContext) -> None:
        await ctx.ready()
        ctx.phase("idle")
        with ctx.span("compute", step=3):
            pass
        await ctx.stopping.wait()
