"""spec.roles[].config of kind `fsdp`, as pydantic checks it before anything starts."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StrictBool

from rlinf_api.job import Model
from rlinf_worker.roles.slot_memory import MemoryConfig


class FsdpConfig(Model):
    weights_delta: StrictBool = False
    """Whether an edition of the weights carries only blocks that changed. False: PPO changes every block, and finding
    that out costs a hash each."""
    memory: MemoryConfig | None = None
    """The role's memory on a slot, as `rlinf_worker_turn_memory_bytes` has it. None: not declared. Where all roles
    declare it, and slots are too few, placement Auto has them take turns."""


class TextFsdpConfig(Model):
    """The config of an actor of flow grpo, which trains a language model."""

    precision: Literal["float32", "bfloat16"] = "float32"
    """The type of numbers in forward and backward pass; the weights that are trained are float32 either way."""
    token_budget: Annotated[int, Field(ge=16, le=100_000_000)] = 16384
    """Tokens, padding included, of one forward and backward pass. 16,384: about 2 GiB for a model of 0.5 billion
    parameters. A sample that is longer is alone in its pass."""
    activation_checkpointing: StrictBool = False
    """Whether a layer's activations are made again in the backward pass instead of kept: a third more computing, and
    memory of one layer instead of all. False: what a token budget needs is bounded by the budget."""
    weights_delta: StrictBool = False
    """Whether an edition of the weights carries only blocks that changed. False: AdamW changes every block."""
    tensorboard: Annotated[str, Field(max_length=1024)] = ""
    """A folder for TensorBoard that the actor's pods mount, with numbers of each step; in a run of `rljob run` one that
    is no absolute path lies in the work dir. At most 128 MiB. Empty: none, as metrics.jsonl has the same numbers."""
    memory: MemoryConfig | None = None
    """The role's memory on a slot, as `rlinf_worker_turn_memory_bytes` has it. None: not declared. Where all roles
    declare it, and slots are too few, placement Auto has them take turns."""
