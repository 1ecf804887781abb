"""What roles of flow grpo tell each other: the payloads of its channels, and the facts that rollouts share.

For: the flow, which declares the channels, and the roles at both of their ends. Imports neither numpy nor torch.

Shapes: P tokens of a prompt, T tokens of all its samples one after the other, G samples of a group.
"""

from __future__ import annotations

from typing import Final

ROWS: Final = "rows"
"""Fact: {"count": rows of spec.data.train, "digest": of its bytes, "eval_count", "eval_digest": of spec.data.eval, 0
and "" without}. Two rollouts that read two files fail the job."""
EVALUATION: Final = "eval"
"""Source of the keys of groups that are rewarded, and that nothing is learnt from."""
SAMPLING: Final = "sampling"
"""Fact: how tokens are drawn, which the actor has to score them by: temperature, stops (ids), least and most (tokens of
a sample), dtype (of the engine's weights), tokenizer (a digest)."""

PROMPT: Final = {"index": "int", "pass": "int"}
ANSWERS: Final = {
    "prompt": "int32[p]",
    "tokens": "int32[t]",
    "logprobs": "float32[t]",  # of the distribution that each was drawn from
    "versions": "int32[t, 2]",  # (branch, number) of the weights that made each
    "lengths": "int32[g]",
    "finished": "bool[g]",  # ended by itself, and not for want of room
}
SAMPLES: Final = {**ANSWERS, "texts": "list", "row": "dict"}
REWARDED: Final = {**ANSWERS, "reward": "float32[g]", "parts": "dict"}


def is_evaluation(key: str) -> bool:
    """
    >>> is_evaluation("eval:20/3/0"), is_evaluation("train:0/3/0")
    (True, False)
    """
    return key.startswith(f"{EVALUATION}:")


REWARD: Final = "reward"
"""The part of a reward function that answers numbers, and names none."""
