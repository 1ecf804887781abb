"""spec.roles[].config of kind `rule`, as pydantic checks it before anything starts."""

from __future__ import annotations

import re
from typing import Annotated, Final, Literal

from pydantic import Field, model_validator

from rlinf_api.job import Model
from rlinf_worker.roles.samples import REWARD
from rlinf_worker.roles.slot_memory import MemoryConfig

EXACT: Final = "exact"
REGEX: Final = "regex"
MATH: Final = "math"
_OWN: Final = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class RuleConfig(Model):
    function: Annotated[str, Field(min_length=1, max_length=200)] = EXACT
    """exact: the text is the answer, blanks at its ends apart. regex: `pattern` finds the answer in it. math: its last
    expression equals the answer, as Math-Verify reads both. module:function of the user's own: f(texts, row) -> a
    number for each text, or {"part": [numbers], ...}."""
    answer_column: Annotated[str, Field(min_length=1, max_length=200)] = "answer"
    """The column of a row that exact, regex and math compare with."""
    pattern: Annotated[str, Field(max_length=1000)] = ""
    """The pattern of regex: its last match counts, its first group where it has one. As `####\\s*(-?\\d+)`."""
    weights: Annotated[dict[str, float], Field(max_length=64)] = {}
    """The weights of named parts, whose weighted sum is the reward. A part without one counts 1; one that has a weight
    is in each answer, or the job ends: a misspelt name would count 1 without a word."""
    timeout_seconds: Annotated[int, Field(ge=1, le=3600)] = 30
    """For one group. After that its process is killed and started again. 30: a rule takes milliseconds."""
    on_error: Literal["drop", "zero", "fail"] = "zero"
    """What becomes of a group whose function raises, hangs or answers nonsense. zero: a reward of 0 for each sample, so
    that nothing is learnt from it. drop: the step goes on without it. fail: the job ends with its sentence."""

    memory: MemoryConfig | None = None
    """The role's memory on a slot, as `rlinf_worker_turn_memory_bytes` has it. None: not declared. Where all roles
    declare it, and slots are too few, placement Auto has them take turns."""

    @model_validator(mode="after")
    def _is_known(self) -> RuleConfig:
        is_own = _OWN.fullmatch(self.function) is not None
        if self.function not in (EXACT, REGEX, MATH) and not is_own:
            raise ValueError(f"function {self.function!r} is not known; write exact, regex, math or module:function")
        if not is_own and (unknown := sorted(self.weights.keys() - {REWARD})):
            raise ValueError(
                f"weights names {', '.join(map(repr, unknown))}, and {self.function} has one part, {REWARD!r}; "
                "leave the others out, or write module:function"
            )
        if (self.function == REGEX) != bool(self.pattern):
            raise ValueError("pattern goes with function regex, and only with it; write both or neither")
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ValueError(f"pattern is no regular expression: {error}; correct it") from error
        return self
