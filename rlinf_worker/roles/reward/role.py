"""The reward role of language models: gives each sample of a group a number, by a rule in a process of its own.

One group at a time; more workers of the role work on more.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import numpy as np

from rlinf_api import names
from rlinf_api.errors import UserError
from rlinf_worker.channels.protocol import Item
from rlinf_worker.roles.protocol import RoleContext
from rlinf_worker.roles.reward.judge import Judge, NoRewards
from rlinf_worker.roles.reward.schema import RuleConfig
from rlinf_worker.roles.reward.shown import Shown
from rlinf_worker.roles.samples import ANSWERS, REWARD

logger = logging.getLogger(__name__)


class RuleRole:
    async def run(self, ctx: RoleContext) -> None:
        config = RuleConfig.model_validate(dict(ctx.config))
        judge = Judge(config.model_dump(mode="json", by_alias=True), timeout_s=config.timeout_seconds)
        shown = Shown(os.environ.get(names.ENV_OUTPUT_DIR, ""), rank=ctx.rank)
        try:
            async with ctx.turn():
                with ctx.span("load"):
                    await judge.start()
                await ctx.ready()
                samples, rewarded = ctx.channel("samples"), ctx.channel("rewarded")
                async for item in samples:
                    if item.cancelled:
                        samples.drop(item, "cancelled")
                        continue
                    deadline_s = config.timeout_seconds + 60.0  # the function has its own, which ends it by name
                    with ctx.span("compute", step=item.step, units=1, deadline_s=deadline_s):
                        parts = await self._parts(ctx, judge, item, config)
                    if parts is None:
                        samples.drop(item, "the reward function failed")
                        continue
                    payload = {name: item.payload[name] for name in ANSWERS}
                    payload["parts"] = parts
                    payload["reward"] = _total(parts, config)
                    shown.show(item, parts, payload["reward"])
                    await rewarded.put(payload, key=item.key, weight=item.weight, parents=[item])
                    samples.ack(item)
                    await ctx.safe_point()
        finally:
            shown.close()
            await judge.close()

    async def _parts(
        self, ctx: RoleContext, judge: Judge, item: Item, config: RuleConfig
    ) -> dict[str, list[float]] | None:
        """None: the group is to be dropped."""
        texts = item.payload["texts"]
        try:
            parts = await judge.rewards(texts, item.payload["row"])
        except NoRewards as error:
            named = f"reward_{error.name.replace('-', '_')}_count"
            ctx.report(step=item.step, metrics={named: 1.0}, key=item.key)
            logger.warning("a group has no rewards", extra={"key": item.key, "error": str(error)})
            if config.on_error == "fail":
                raise UserError(
                    f"unit {item.key} has no rewards", got=str(error), wanted="a finite number for each text",
                    next="correct the function, or set onError to zero or drop in spec.roles[reward].config",
                ) from error  # fmt: skip
            return None if config.on_error == "drop" else {REWARD: [0.0] * len(texts)}
        if missing := sorted(config.weights.keys() - parts):
            raise UserError(
                f"weights of spec.roles[reward].config names {', '.join(map(repr, missing))}",
                got=f"{config.function} answered {', '.join(map(repr, sorted(parts)))} of unit {item.key}",
                wanted="each part that has a weight, each time", next="correct the name, or answer 0 where it is none",
            )  # fmt: skip
        return parts


def _total(parts: dict[str, list[float]], config: RuleConfig) -> np.ndarray[Any, Any]:
    weighted = [np.array(part) * config.weights.get(name, 1.0) for name, part in parts.items()]
    return np.asarray(np.sum(weighted, axis=0), np.float32)
