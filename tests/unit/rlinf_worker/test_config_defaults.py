"""What a job has that leaves a field of its flow's or a role's config out: an edit here changes every such job."""

from typing import Any

import pytest
from pydantic import BaseModel

from rlinf_worker.flows.grpo import GrpoConfig
from rlinf_worker.flows.ppo import PpoConfig
from rlinf_worker.roles.actor.schema import FsdpConfig, TextFsdpConfig
from rlinf_worker.roles.reward.schema import RuleConfig
from rlinf_worker.roles.rollout.schema import TorchConfig, TransformersConfig, VllmConfig
from rlinf_worker.roles.synthetic.schema import SyntheticConfig

TEXT = {
    "max_prompt_tokens": 1024, "max_response_tokens": 256, "min_response_tokens": 0, "temperature": 1.0,
    "stop_token_ids": [], "max_sequences": 512, "prompt_column": "prompt", "on_new_weights": "recompute",
}  # fmt: skip
DEFAULTS: dict[type[BaseModel], dict[str, Any]] = {
    PpoConfig: {
        "env_kwargs": {}, "num_envs": 32, "slices": 2, "horizon": 32, "hidden_sizes": [64, 64], "activation": "tanh",
        "gamma": 0.99, "gae_lambda": 0.95, "epochs": 10, "final_epochs": None, "minibatches": 4, "learning_rate": 3e-4,
        "schedule": "constant", "clip_range": 0.2, "value_clip_range": None, "value_coefficient": 0.5,
        "entropy_coefficient": 0.0, "max_grad_norm": 0.5, "normalise_advantage": True, "channels": {},
        "order": "arrival",
    },
    GrpoConfig: {
        "prompts_per_step": 64, "samples_per_prompt": 8, "updates_per_step": 1, "old_logprobs": "recompute",
        "channels": {}, "order": "arrival",
    },
    TorchConfig: {"device": "cpu"},
    TransformersConfig: TEXT,
    VllmConfig: TEXT | {"kv_cache_mib": 4096},
    RuleConfig: {
        "function": "exact", "answer_column": "answer", "pattern": "", "weights": {}, "timeout_seconds": 30,
        "on_error": "zero",
    },
    FsdpConfig: {"weights_delta": False},
    TextFsdpConfig: {"precision": "float32", "token_budget": 16384, "weights_delta": False},
    SyntheticConfig: {
        "name": "", "service": "serial", "load_ms": 0.0, "offload_ms": 0.0, "lanes": 1, "gang": False, "sync_ms": 0.0,
        "ranks": [], "slots_per_worker": 1, "scaling": 1.0, "options": [], "option": None, "micro_batch": None,
        "payload_bytes": 256, "weights_bytes": 4096,
    },
}  # fmt: skip


@pytest.mark.parametrize("config", DEFAULTS, ids=lambda config: config.__name__)
def test_a_field_that_is_left_out_is_this(config):
    fields = config.model_fields
    found = {name: fields[name].get_default(call_default_factory=True) for name in DEFAULTS[config]}
    assert found == DEFAULTS[config]
