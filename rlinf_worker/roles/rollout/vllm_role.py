"""The rollout role of kind `vllm`: language.py's, with vLLM as its engine.

vLLM is imported as the role loads, in a thread, or by a warm spare before: 5 to 15 s.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

from rlinf_api.errors import UserError
from rlinf_worker.roles import loading, models
from rlinf_worker.roles.protocol import FlowSettings
from rlinf_worker.roles.rollout.engine import Engine
from rlinf_worker.roles.rollout.language import LanguageRole
from rlinf_worker.roles.rollout.schema import VllmConfig

BLOCK: Final = 32
"""Positions of a block of the cache. 32, not vLLM's 128 on CPUs: prompts shorter than a block share nothing."""


class VllmRole(LanguageRole):
    schema = VllmConfig

    def warm(self, flow: FlowSettings, config: Mapping[str, Any]) -> None:
        super().warm(flow, config)
        _library()

    def engine(self, config: Any, *, path: str, shape: Any, kv_bytes: int) -> tuple[Engine, int]:
        rows = self.room(config.max_sequences, field=f"maxSequences {config.max_sequences}")
        positions = config.max_prompt_tokens + config.max_response_tokens
        library = _library()
        library.check_model(getattr(shape, "architectures", None) or [], path=path)
        found = library.VllmEngine(
            path, dtype=config.dtype, seed=self._ctx.flow.seed, rows=rows, positions=positions, block=BLOCK,
            kv_bytes=cache_bytes(config, shape, kv_bytes=kv_bytes), tokenizer=self.decoder,
        )  # fmt: skip
        return found, rows


def _library() -> Any:
    remedy = "install extra rollout-cpu in this pool's image, and libnuma1"
    return loading.module("rlinf_worker.roles.rollout.vllm_engine", what="role kind 'vllm'", next=remedy, ours=True)


def cache_bytes(config: VllmConfig, shape: Any, *, kv_bytes: int) -> int:
    """What is there, of what all samples would fill. UserError where one sample has no room."""
    there, field = config.kv_cache_mib << 20, f"kvCacheMib {config.kv_cache_mib}"
    if kv_bytes:
        there, field = kv_bytes, f"kv {kv_bytes} bytes of the plan"
    block = BLOCK * models.kv_bytes_of(shape, itemsize=getattr(torch, config.dtype).itemsize)
    each = -(-(config.max_prompt_tokens + config.max_response_tokens) // BLOCK)
    if there < (each + 1) * block:  # one block is vLLM's own
        raise UserError(
            "the cache is too small for one sample", got=field,
            wanted=f"{(each + 1) * block} bytes at least, for maxPromptTokens + maxResponseTokens",
            next="raise kvCacheMib or the plan's kv, or lower maxResponseTokens",
        )  # fmt: skip
    return min(there, (config.max_sequences * each + 1) * block)
