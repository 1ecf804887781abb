"""Reward functions of the rows, as a manifest names them: `tools.learn_reasoning.rewards:sevens`."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any


def sevens(texts: Sequence[str], row: Mapping[str, Any]) -> list[float]:
    """The share of the character 7 of 32 tokens, each of which is a character."""
    return [text.count("7") / 32 for text in texts]


def exact(texts: Sequence[str], row: Mapping[str, Any]) -> list[float]:
    return [float(text.strip() == row["answer"]) for text in texts]


def shuffled(texts: Sequence[str], row: Mapping[str, Any]) -> dict[str, list[float]]:
    """`exact`'s rewards, given to the samples of the group by lot; `right` is as it is, and weighs nothing."""
    right = exact(texts, row)
    given = list(right)
    random.Random("/".join((row["prompt"], *texts))).shuffle(given)
    return {"given": given, "right": right}
