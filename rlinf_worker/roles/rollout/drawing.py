"""How the samples of a group are drawn: by the role's config, and in evaluations by the flow's.

For: language.py, which tells the engine, and the actor. Not for: the drawing itself (engine.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rlinf_worker.channels.protocol import Item
from rlinf_worker.roles import models
from rlinf_worker.roles.protocol import FlowSettings
from rlinf_worker.roles.rollout.engine import Sampling
from rlinf_worker.roles.rollout.schema import LanguageConfig
from rlinf_worker.roles.samples import is_evaluation


class Drawing:
    """Sampling for a ticket, `of(item)`; what of it is true of every training group, `fact()`."""

    def __init__(self, flow: FlowSettings, config: LanguageConfig, *, stops: tuple[int, ...]) -> None:
        """`stops`: the tokens that end a sample."""
        self._flow, self._config, self._stops = flow, config, stops
        self.stop_strings = tuple(config.stop_strings)

    def of(self, item: Item) -> Sampling:
        config, flow = self._config, self._flow.config
        one = Sampling(
            samples=int(flow["samples_per_prompt"]), temperature=config.temperature, most=config.max_response_tokens,
            least=config.min_response_tokens, stops=self._stops, stop_strings=self.stop_strings,
        )  # fmt: skip
        if not is_evaluation(item.key):
            return one
        other = flow["evaluation"]
        return replace(
            one, samples=int(other["samples"]), temperature=float(other["temperature"]), top_k=int(other["top_k"]),
            top_p=float(other["top_p"]),
        )  # fmt: skip

    def fact(self) -> dict[str, Any]:
        """What the actor has to know of how tokens were drawn."""
        config = self._config
        return {
            "temperature": config.temperature, "dtype": config.dtype, "stops": sorted(self._stops),
            "least": config.min_response_tokens, "most": config.max_response_tokens,
            "tokenizer": models.digest_of(self._flow.model),
        }  # fmt: skip


def most_samples(flow: FlowSettings) -> int:
    """The most samples of a group, of whatever purpose."""
    evaluated = int(flow.config["evaluation"]["samples"]) if flow.eval_data else 0
    return max(int(flow.config["samples_per_prompt"]), evaluated)
