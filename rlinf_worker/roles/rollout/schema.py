"""spec.roles[].config of kinds `torch`, `transformers` and `vllm`, as pydantic checks it before anything starts."""

from __future__ import annotations

import re
from typing import Annotated, Final, Literal

from pydantic import Field, StrictBool, field_validator, model_validator

from rlinf_api.job import Model
from rlinf_worker.roles.slot_memory import MemoryConfig

_DEVICE: Final = re.compile(r"cpu|cuda(:[0-9]{1,3})?")


class TorchConfig(Model):
    device: str = "cpu"
    """Where the policy infers: cpu, cuda or cuda:N. cpu: a pool without accelerators has nothing else."""

    @field_validator("device")
    @classmethod
    def _is_known(cls, device: str) -> str:
        """Any other word would mean the CPU, in silence."""
        if not _DEVICE.fullmatch(device):
            raise ValueError(f"got {device!r}, wanted cpu, cuda or cuda:N; write cuda for a slot's own GPU")
        return device


class LanguageConfig(Model):
    """The config of each kind that generates with a language model."""

    max_prompt_tokens: Annotated[int, Field(ge=1, le=1_000_000)] = 1024
    """Longer prompts are dropped by name. 1024: those of the usual problems in mathematics fit."""
    max_response_tokens: Annotated[int, Field(ge=1, le=1_000_000)] = 256
    """Tokens of a sample, after which it counts as truncated. 256: cheap if forgotten."""
    min_response_tokens: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """Before that many no stop token is drawn, here and in the actor's distribution."""
    temperature: Annotated[float, Field(gt=0, le=100)] = 1.0
    """The temperature of sampling, and of the log-probabilities that are trained on. 1: the model's own
    distribution."""
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=64)] = []
    """Tokens that end a sample, and belong to it. Empty: those of the model's generation config, or the tokenizer's."""
    stop_strings: Annotated[list[Annotated[str, Field(min_length=1, max_length=256)]], Field(max_length=16)] = []
    """Texts that end a sample, such as </answer>, wherever tokens begin: the token that completes one is its last, and
    learnt from. Not within minResponseTokens. 16 of 256 characters: they are looked for behind each token."""
    keep_stop_string: StrictBool = False
    """Whether the text that is rewarded has it. False: it ends before."""
    max_sequences: Annotated[int, Field(ge=1, le=100_000)] = 512
    """Samples that are generated at once, each with its part of the cache. A group has to fit."""
    prompt_column: Annotated[str, Field(min_length=1, max_length=200)] = "prompt"
    """The column of a row that has the prompt: text, or messages [{role, content}], which go through the tokenizer's
    chat template."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """The type of the engine's weights and cache, in which they are published, too. float32: log-probabilities of
    engine and actor then differ by 1e-5, of bfloat16 by up to 0.3."""
    memory: MemoryConfig | None = None
    """The role's memory on a slot, as `rlinf_worker_turn_memory_bytes` has it. None: not declared. Where all roles
    declare it, and slots are too few, placement Auto has them take turns."""

    on_new_weights: Literal["recompute", "keep", "drain"] = "recompute"
    """With maxStaleness above 0, as new weights come while samples are under way. recompute: they go on with them, and
    what was computed with the old ones is computed anew; keep: it is kept, which is cheaper, and the log-probabilities
    are of no one policy; drain: they end with the old ones first, and nothing begins until then. recompute: the longest
    sample is not waited for, and a token is of one policy."""

    @model_validator(mode="after")
    def _least_is_no_more(self) -> LanguageConfig:
        if self.min_response_tokens > self.max_response_tokens:
            raise ValueError(
                f"minResponseTokens {self.min_response_tokens} is above maxResponseTokens {self.max_response_tokens}; "
                "lower it"
            )
        return self


class TransformersConfig(LanguageConfig):
    """The config of kind `transformers`: generation by the library of that name, on CPUs."""


class VllmConfig(LanguageConfig):
    """The config of kind `vllm`, on CPUs."""

    temperature: Annotated[float, Field(ge=0.01, le=100)] = 1.0
    """As above. 0.01: vLLM raises lower ones to it, and the actor would score by another distribution."""
    kv_cache_mib: Annotated[int, Field(ge=1, le=1 << 24)] = 4096
    """Keys and values, no more of it than maxSequences use; the plan's kv goes before it. Samples that find no room
    wait, or are computed again. 4096: what vLLM itself takes on CPUs."""
