"""The engine of kind `vllm`: vLLM's own, in the worker's process, stepped by us.

    engine = VllmEngine("/models/base", dtype="float32", seed=7, rows=256, positions=1280, block=32, kv_bytes=1 << 30)

What it owes is engine.py's. vLLM batches, caches and draws; this file decides what it is given between two steps, in
one thread, so that a request joins, leaves or gets other weights at no moment but those. A sample is a request of
vLLM's: its prompt is shared through the prefix cache, and it ends by itself.

vLLM draws with a generator for each request. Before each step every generator is seeded by (seed, key, sample,
position), so a token follows from these and not from how many draws there were: a group goes on from what another
worker left of it with the tokens that it would have had there.

Imported by a worker of kind `vllm` alone, before anything has imported vLLM: it reads its environment as it is
imported. It makes torch's default process group of this process and takes its threads: no trainer beside it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rlinf_api.errors import InvariantBroken, UserError
from rlinf_worker.algorithms.sampling import token_uniforms
from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.roles.rollout.emptying import Emptied
from rlinf_worker.roles.rollout.endings import StopSearch
from rlinf_worker.roles.rollout.engine import Made, Sampling

ENVIRONMENT: Final = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine is this process: weights are loaded by a call
    "TORCHDYNAMO_DISABLE": "1",  # else the first request waits 3 to 15 s for two small compiled functions
    "OMP_NUM_THREADS": "1",  # more spin in barriers where processes share cores
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else every engine of a machine binds itself to the same core
    "VLLM_HOST_IP": "127.0.0.1",  # of a process group with one member; else it asks which way leads out
    "VLLM_CONFIGURE_LOGGING": "0",  # the worker's log is the place
    "VLLM_NO_USAGE_STATS": "1",
}
PREFILL_TOKENS: Final = 1 << 13
"""Tokens of prompts that are computed in one step, where samples are shorter. Prompts are not cut: the part of a step
that draws nothing would take a draw back, which generators of CPUs cannot do."""
SEEDS: Final = 2**53
"""How many numbers a float64 in [0, 1) is drawn from: its place among them is a seed."""

for _name, _value in ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)

try:
    import vllm._custom_ops
    from vllm import SamplingParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.llm_engine import LLMEngine
except OSError as _error:  # a shared library, such as libnuma
    raise ImportError(f"vLLM does not load: {_error}; on Debian and Ubuntu: apt-get install libnuma1") from _error

# On CPUs vLLM packs each weight for oneDNN and deletes it: then nothing can be loaded into it again, and the head of a
# model with tied embeddings keeps its own old copy. Without packing it is about as fast.
vllm._custom_ops._supports_onednn = False


@dataclass(slots=True, kw_only=True, eq=False)
class _Group:
    name: str
    prompt: list[int]
    sampling: Sampling
    made: Made
    answer: Future[Made]
    seeds_TG: NDArray[np.int64]
    left: int = 0  # samples that go on


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sample:
    group: _Group
    number: int
    internal: str  # vLLM's own name of it
    ending: StopSearch | None


class VllmEngine(Emptied):
    """Called from one thread at a time."""

    def __init__(
        self,
        path: str,
        *,
        dtype: str,
        seed: int,
        rows: int,
        positions: int,
        block: int,
        kv_bytes: int,
        tokenizer: Any = None,
    ) -> None:
        """`rows`: samples at once, each of at most `positions` tokens with its prompt; of the cache, what `kv_bytes`
        hold, in blocks of `block` positions: who finds no room waits, or is computed again. `tokenizer`: of the library
        tokenizers, for requests with stop strings; vLLM itself is given none."""
        super().__init__()
        self.seed, self._tokenizer = seed, tokenizer
        self.version: PolicyVersion | None = None
        self._groups: dict[str, _Group] = {}
        self._samples: dict[str, _Sample] = {}
        self._engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=path, dtype=dtype, skip_tokenizer_init=True, trust_remote_code=False, load_format="safetensors",
                model_impl="vllm", generation_config="vllm", seed=0, enforce_eager=True, max_model_len=positions,
                max_num_seqs=rows, max_num_batched_tokens=max(positions + rows, PREFILL_TOKENS),
                enable_chunked_prefill=False, kv_cache_memory_bytes=kv_bytes, block_size=block,
                enable_prefix_caching=True, async_scheduling=False, logprobs_mode="processed_logprobs",
                disable_log_stats=True,
            )
        )  # fmt: skip
        # Stop tokens are the request's alone: vLLM would keep the folder's from being drawn within the least length,
        # too, and the actor scores by a distribution that has them.
        self._engine.input_processor.generation_config_fields = {}
        self._runner = self._engine.model_executor.driver_worker.worker.model_runner
        self._model = self._runner.model
        self._names = {name for name, _ in self._model.named_parameters()}

    # --- requests -----------------------------------------------------------------------------------------------------
    def begin(
        self, name: str, *, key: str, prompt: Sequence[int], sampling: Sampling, made: Made | None = None
    ) -> Future[Made]:
        assert self.version is not None, "weights come before requests"
        uniforms = token_uniforms(self.seed, key, tokens=sampling.most, samples=sampling.samples)
        group = _Group(
            name=name, prompt=list(prompt), sampling=sampling, made=made or Made.nothing(sampling.samples),
            answer=Future(), seeds_TG=(uniforms * SEEDS).astype(np.int64),
        )  # fmt: skip
        self._groups[name] = group
        for number in group.made.going_on(sampling.most):
            had = group.made.ids[number]
            parameters = SamplingParams(
                temperature=sampling.temperature, max_tokens=sampling.most - len(had),
                min_tokens=max(0, sampling.least - len(had)), stop_token_ids=sorted(sampling.stops), ignore_eos=True,
                top_k=sampling.top_k, top_p=sampling.top_p,
                seed=int(group.seeds_TG[len(had), number]), logprobs=0, flat_logprobs=True, detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )  # fmt: skip
            # The salt keeps what one version has cached from the requests of another.
            text = {"prompt_token_ids": group.prompt + had, "cache_salt": str(self.version)}
            external = f"{name}/{number}"
            internal = self._engine.add_request(external, text, parameters)
            self._samples[external] = _Sample(
                group=group, number=number, internal=internal, ending=self._ending(sampling, had)
            )
            group.left += 1
        if not group.left:
            self._answer(group)
        return group.answer

    def _ending(self, sampling: Sampling, had: Sequence[int]) -> StopSearch | None:
        if not sampling.stop_strings:
            return None
        ending = StopSearch(self._tokenizer, sampling.stop_strings, least=sampling.least)
        for token in had:
            ending.add(token)
        return ending

    @property
    def busy(self) -> bool:
        return bool(self._groups)

    @property
    def rows(self) -> int:
        return sum(group.sampling.samples for group in self._groups.values())

    def so_far(self, name: str) -> Made:
        return self._groups[name].made.copied()

    def abort(self, name: str) -> Made:
        group = self._groups.pop(name)
        mine = [external for external, sample in self._samples.items() if sample.group is group]
        self._engine.abort_request(mine)
        for external in mine:
            del self._samples[external]
        group.answer.cancel()
        return group.made

    def _answer(self, group: _Group) -> None:
        del self._groups[group.name]
        group.answer.set_result(group.made)

    # --- between two steps --------------------------------------------------------------------------------------------
    def load(self, version: PolicyVersion, weights: Mapping[str, Any], *, keep: bool = False) -> None:
        """vLLM fuses what belongs together, and skips the head where embeddings are tied to it."""
        loaded = set(self._model.load_weights(iter(weights.items())))
        if loaded != self._names:
            missing = ", ".join(sorted(self._names - loaded)[:5])
            raise InvariantBroken(
                f"weights {version} set {len(loaded)} of vLLM's {len(self._names)} tensors, not {missing}"
            )
        self.version = version
        if not keep:
            self._engine.reset_prefix_cache(reset_running_requests=True)

    # --- off the slots ------------------------------------------------------------------------------------------------
    def _tensors(self) -> list[Any]:
        return [*self._model.parameters(), *self._runner.kv_caches]

    def _forget(self) -> None:
        self._engine.reset_prefix_cache(reset_running_requests=True)

    # --- a step -------------------------------------------------------------------------------------------------------
    def step(self) -> int:
        self._seed_each()
        assert self.version is not None
        version, made = (self.version.branch, self.version.number), 0
        ended: list[str] = []
        for output in self._engine.step():
            sample = self._samples.get(output.request_id)
            if sample is None:
                continue
            [part] = output.outputs
            of, number = sample.group.made, sample.number
            of.ids[number] += part.token_ids
            of.logprobs[number] += part.logprobs.logprobs
            of.versions[number] += [version] * len(part.token_ids)
            made += len(part.token_ids)
            is_told = sample.ending is not None and any(map(sample.ending.add, part.token_ids))
            if is_told and not output.finished:
                ended.append(output.request_id)
            if is_told or output.finished:
                of.finished[number] = is_told or part.finish_reason == "stop"
                del self._samples[output.request_id]
                sample.group.left -= 1
                if not sample.group.left:
                    self._answer(sample.group)
        if ended:
            self._engine.abort_request(ended)
        return made

    def _seed_each(self) -> None:
        """Gives each sample that vLLM's runner knows its seed; a new request begins with the one that it brings."""
        held = self._runner.requests
        for sample in self._samples.values():
            state = held.get(sample.internal)
            if state is not None and state.generator is not None:  # without one: nothing is drawn
                at = len(sample.group.made.ids[sample.number])
                state.generator.manual_seed(int(sample.group.seeds_TG[at, sample.number]))


def check_model(architectures: Sequence[str], *, path: str) -> None:
    """UserError where vLLM has none of them."""
    if not set(architectures) & set(ModelRegistry.get_supported_archs()):
        raise UserError(
            f"vLLM has no model for spec.model.path {path!r}", got=", ".join(architectures) or "no architecture",
            wanted="an architecture of vLLM, such as Qwen2ForCausalLM",
            next="write kind: transformers for role rollout, or use another model",
        )  # fmt: skip
