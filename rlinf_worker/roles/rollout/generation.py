"""Batched generation with a KV cache, over a model of transformers: the engine of kind `transformers`.

    engine = Generator(model, seed=7, rows=256)

What it owes is engine.py's. Requests wait while there is no room for all their samples. A row is a sample that is not
finished; rows have places of their own in the cache, however long each is, so nothing is moved as one joins. A token is
where a number of (seed, key, sample, position) falls among the cumulative probabilities.

Not for: channels, weights' transport, text (language.py). Nothing here knows an event loop.

Shapes: B rows, V tokens of the vocabulary, T positions of the cache.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from rlinf_api.errors import InvariantBroken
from rlinf_worker.algorithms.sampling import token_uniforms
from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.roles.rollout.emptying import Emptied
from rlinf_worker.roles.rollout.endings import StopSearch
from rlinf_worker.roles.rollout.engine import Made, Sampling

BLOCK: Final = 64
"""Positions by which the cache grows: a step of a small model is not made slower by copying."""
DEAD_SHARE: Final = 0.25
"""The share of rows that have ended from which on those that have not are moved together."""
SCORED_AT_ONCE: Final = 1 << 22
"""Numbers of the distributions that are in float64 at a time: 32 MiB."""
PREFILL_TOKENS: Final = 1 << 14
"""Tokens of prompts that are computed at a time."""

Int = NDArray[np.int64]


@dataclass(slots=True, kw_only=True, eq=False)
class _Request:
    name: str
    prompt: list[int]
    sampling: Sampling
    made: Made
    answer: Future[Made]
    uniforms_TG: NDArray[np.float64]
    left: int = 0  # samples in the batch

    @property
    def going_on(self) -> list[int]:
        return self.made.going_on(self.sampling.most)


class Generator(Emptied):
    """Called from one thread at a time."""

    def __init__(self, model: Any, *, seed: int, rows: int, tokenizer: Any = None) -> None:
        """`tokenizer`: of the library tokenizers, for requests with stop strings."""
        super().__init__()
        self.model, self.seed, self.most_rows, self._tokenizer = model, seed, rows, tokenizer
        self.version: PolicyVersion | None = None
        self._parameters: dict[str, Tensor] = dict(model.named_parameters())
        self._requests: dict[str, _Request] = {}
        self._waiting: deque[str] = deque()
        self._batch = _Batch(tokenizer)
        self._cache = _Rows(model)

    # --- requests -----------------------------------------------------------------------------------------------------
    def begin(
        self, name: str, *, key: str, prompt: Sequence[int], sampling: Sampling, made: Made | None = None
    ) -> Future[Made]:
        """`made`: what another has left of it, to go on from."""
        uniforms = token_uniforms(self.seed, key, tokens=sampling.most, samples=sampling.samples)
        request = _Request(
            name=name, prompt=list(prompt), sampling=sampling, made=made or Made.nothing(sampling.samples),
            answer=Future(), uniforms_TG=uniforms,
        )  # fmt: skip
        if request.going_on:
            self._requests[name] = request
            self._waiting.append(name)
        else:
            request.answer.set_result(request.made)
        return request.answer

    @property
    def busy(self) -> bool:
        return bool(self._requests)

    @property
    def rows(self) -> int:
        """Samples of all requests that are here."""
        return sum(request.sampling.samples for request in self._requests.values())

    def so_far(self, name: str) -> Made:
        """A copy."""
        request = self._requests[name]
        self._batch.store(request)
        return request.made.copied()

    def abort(self, name: str) -> Made:
        """What there is of it; whoever waits for the answer is cancelled."""
        made = self.so_far(name)
        request = self._requests.pop(name)
        if name in self._waiting:
            self._waiting.remove(name)
        self._batch.leave(request)
        request.answer.cancel()
        return made

    # --- between two steps --------------------------------------------------------------------------------------------
    def load(self, version: PolicyVersion, weights: Mapping[str, Any], *, keep: bool = False) -> None:
        if weights.keys() != self._parameters.keys():
            differ = ", ".join(sorted(weights.keys() ^ self._parameters.keys())[:5])
            raise InvariantBroken(f"weights {version} are not those of the model: {differ}")
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(torch.as_tensor(weights[name]))
        self.version = version
        if not keep:
            self._start_over()

    def _start_over(self) -> None:
        """Nothing of the cache will be used."""
        if self._batch.count:
            for name, request in self._requests.items():
                if name not in self._waiting:
                    self._batch.store(request)
                    request.left = 0
                    self._waiting.append(name)
            self._batch, self._cache = _Batch(self._tokenizer), _Rows(self.model)

    # --- off the slots ------------------------------------------------------------------------------------------------
    def _tensors(self) -> list[Tensor]:
        return [*self._parameters.values(), *self._cache.tensors()]

    def _forget(self) -> None:
        self._start_over()
        self._cache = _Rows(self.model)  # it keeps room for rows that have ended

    # --- a step -------------------------------------------------------------------------------------------------------
    @torch.inference_mode()
    def step(self) -> int:
        """One token more of each sample that has room. Returns how many."""
        assert self.version is not None, "weights come before requests"
        batch, cache = self._batch, self._cache
        if self._waiting or batch.dead > DEAD_SHARE * batch.count:
            keep = batch.compact()
            if keep is not None:
                cache.keep(keep)
        joining = self._joining()
        old = batch.count
        parts = []
        if old:
            parts.append(self._decoded())
        if joining:
            parts.append(self._prefilled(joining))
        if not parts:
            return 0
        logits = torch.cat(parts)
        chosen, logprob = self._sample(logits)
        return self._take(chosen, logprob)

    def _joining(self) -> list[_Request]:
        """Who has waited longest first; none overtakes it."""
        found: list[_Request] = []
        room = self.most_rows - self._batch.count
        while self._waiting:
            request = self._requests[self._waiting[0]]
            needs = len(request.going_on)
            if needs > room and (self._batch.count or found):
                break
            self._waiting.popleft()
            room -= needs
            found.append(request)
        return found

    def _decoded(self) -> Tensor:
        """Logits of the next token of all rows, by the token that each got last."""
        batch, cache = self._batch, self._cache
        length_B = torch.from_numpy(batch.length)
        cache.place(length_B)
        seen = int(batch.length.max()) + 1
        mask = (torch.arange(seen)[None, :] <= length_B[:, None])[:, None, None, :]
        hidden = self.model.base_model(
            input_ids=torch.from_numpy(batch.last)[:, None], position_ids=length_B[:, None], attention_mask=mask,
            past_key_values=cache, use_cache=True,
        ).last_hidden_state  # fmt: skip
        batch.length = batch.length + 1
        return self._logits(hidden[:, -1])

    def _prefilled(self, joining: list[_Request]) -> Tensor:
        """Likewise of those who join: prompts once for all their samples, what was made before of each."""
        texts: list[list[int]] = []
        owners: list[tuple[_Request, int, int]] = []  # (whose, which sample, which text)
        for request in joining:
            first = len(texts)
            if not (has_begun := request.made.has_begun):
                texts.append(request.prompt)
            for sample in request.going_on:
                if has_begun:
                    texts.append(request.prompt + request.made.ids[sample])
                owners.append((request, sample, len(texts) - 1 if has_begun else first))
        text_of = np.array([text for _, _, text in owners])
        longest = max(map(len, texts))
        lengths = np.array([len(text) for text in texts])
        self._cache.room(len(owners), longest)
        logits: list[Tensor] = []
        at = len(self._batch.length)
        per_pass = max(1, PREFILL_TOKENS // longest)
        for start in range(0, len(texts), per_pass):
            some = texts[start : start + per_pass]
            padded = torch.tensor([text + [0] * (longest - len(text)) for text in some])
            cache = DynamicCache()
            hidden = self.model.base_model(input_ids=padded, past_key_values=cache, use_cache=True).last_hidden_state
            ends = torch.from_numpy(lengths[start : start + per_pass]) - 1
            logits.append(self._logits(hidden[torch.arange(len(some)), ends]))
            rows = np.flatnonzero((text_of >= start) & (text_of < start + per_pass))
            self._cache.write(torch.from_numpy(at + rows), torch.from_numpy(text_of[rows] - start), cache)
        self._batch.join([(request, sample) for request, sample, _ in owners], lengths[text_of])
        return torch.cat(logits)[torch.from_numpy(text_of)]

    def _logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.model.get_output_embeddings()(hidden)
        return logits.float()

    def _sample(self, logits_BV: Tensor) -> tuple[Int, NDArray[np.float64]]:
        """By the inverse of the cumulative distribution, in float64."""
        batch = self._batch
        for stops, rows in batch.early().items():
            logits_BV[torch.tensor(rows)[:, None], torch.tensor(stops, dtype=torch.int64)[None, :]] = -torch.inf
        chosen, logprob = np.empty(batch.count, np.int64), np.empty(batch.count)
        uniform_B = batch.uniform()
        per_pass = max(1, SCORED_AT_ONCE // logits_BV.shape[1])
        for start in range(0, batch.count, per_pass):
            part = slice(start, start + per_pass)
            temperature_B = torch.from_numpy(batch.temperature[part])
            is_drawn_B = temperature_B > 0
            scaled = logits_BV[part].double() / torch.where(is_drawn_B, temperature_B, 1.0)[:, None]
            if batch.is_cut[part].any():
                scaled = _cut(scaled, torch.from_numpy(batch.top_k[part]), torch.from_numpy(batch.top_p[part]))
            logprob_V = torch.log_softmax(scaled, dim=-1)
            cumulative = logprob_V.exp().cumsum(-1)
            threshold = torch.from_numpy(uniform_B[part])[:, None] * cumulative[:, -1:]
            # The last token that has any probability bounds it: rounding must not draw one that cannot be.
            index = torch.searchsorted(cumulative, threshold.contiguous(), right=True)
            last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous())
            index = torch.where(is_drawn_B[:, None], torch.minimum(index, last), scaled.argmax(-1, keepdim=True))
            chosen[part] = index[:, 0].numpy()
            logprob[part] = logprob_V.gather(-1, index)[:, 0].numpy()
        return chosen, logprob

    def _take(self, chosen: Int, logprob: NDArray[np.float64]) -> int:
        batch, version = self._batch, self.version
        assert version is not None
        made = int(batch.alive.sum())
        batch.take(chosen, logprob, (version.branch, version.number))
        is_over = batch.over(chosen)
        ended = np.flatnonzero(batch.alive & (is_over | (batch.made >= batch.most)))
        for row in ended.tolist():
            if (whole := batch.end(row, finished=bool(is_over[row]))) is not None:
                del self._requests[whole.name]
                whole.answer.set_result(whole.made)
        return made


class _Batch:
    """What is known of each row, beside its cache."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.owner: list[_Request] = []
        self.sample: list[int] = []
        self.length: Int = np.zeros(0, np.int64)  # positions in the cache
        self.last: Int = np.zeros(0, np.int64)  # the token that is to be computed next
        self.made: Int = np.zeros(0, np.int64)
        self.most: Int = np.zeros(0, np.int64)
        self.least: Int = np.zeros(0, np.int64)
        self.temperature: NDArray[np.float64] = np.zeros(0)
        self.top_k: Int = np.zeros(0, np.int64)
        self.top_p: NDArray[np.float64] = np.zeros(0)
        self.endings: list[StopSearch | None] = []
        self.alive: NDArray[np.bool_] = np.zeros(0, np.bool_)
        self.ids: Int = np.zeros((0, BLOCK), np.int64)
        self.logprobs: NDArray[np.float64] = np.zeros((0, BLOCK))
        self.uniforms: NDArray[np.float64] = np.zeros((0, 0))
        self.versions: list[list[tuple[int, int]]] = []

    @property
    def count(self) -> int:
        return len(self.owner)

    @property
    def is_cut(self) -> NDArray[np.bool_]:
        """What is drawn from is a part of all tokens."""
        return (self.temperature > 0) & ((self.top_k > 0) | (self.top_p < 1))

    def sampling(self, row: int) -> Sampling:
        return self.owner[row].sampling

    def early(self) -> dict[tuple[int, ...], list[int]]:
        """By stop tokens, the rows that may not draw one yet."""
        found: dict[tuple[int, ...], list[int]] = {}
        for row in np.flatnonzero(self.made < self.least).tolist():
            if stops := self.sampling(row).stops:
                found.setdefault(stops, []).append(row)
        return found

    def over(self, chosen: Int) -> NDArray[np.bool_]:
        """Rows that end with this token, by an id or by a string."""
        found = np.zeros(self.count, np.bool_)
        for row in np.flatnonzero(self.alive).tolist():
            token, ending = int(chosen[row]), self.endings[row]
            found[row] = token in self.sampling(row).stops or (ending is not None and ending.add(token))
        return found

    def _ending(self, request: _Request, sample: int) -> StopSearch | None:
        """The search for stop strings, which has seen what there is of the sample; None: the request has none."""
        sampling = request.sampling
        if not sampling.stop_strings:
            return None
        ending = StopSearch(self._tokenizer, sampling.stop_strings, least=sampling.least)
        for token in request.made.ids[sample]:
            ending.add(token)
        return ending

    @property
    def dead(self) -> int:
        return self.count - int(self.alive.sum())

    def join(self, rows: list[tuple[_Request, int]], length: Int) -> None:
        samplings = [request.sampling for request, _ in rows]
        had = [request.made.ids[sample] for request, sample in rows]
        made = np.array([len(ids) for ids in had], np.int64)
        most = np.array([s.most for s in samplings], np.int64)
        width = max(self.ids.shape[1], int(most.max()))
        ids, logprobs = np.zeros((len(rows), width), np.int64), np.zeros((len(rows), width))
        uniforms = np.zeros((len(rows), width))
        for row, (request, sample) in enumerate(rows):
            ids[row, : made[row]] = had[row]
            logprobs[row, : made[row]] = request.made.logprobs[sample]
            uniforms[row, : most[row]] = request.uniforms_TG[:, sample]
            request.left += 1
        self.owner += [request for request, _ in rows]
        self.sample += [sample for _, sample in rows]
        self.versions += [list(request.made.versions[sample]) for request, sample in rows]
        self.length, self.made = np.concatenate([self.length, length]), np.concatenate([self.made, made])
        self.last = np.concatenate([self.last, np.zeros(len(rows), np.int64)])
        self.most = np.concatenate([self.most, most])
        self.least = np.concatenate([self.least, np.array([s.least for s in samplings], np.int64)])
        self.temperature = np.concatenate([self.temperature, np.array([s.temperature for s in samplings])])
        self.top_k = np.concatenate([self.top_k, np.array([s.top_k for s in samplings], np.int64)])
        self.top_p = np.concatenate([self.top_p, np.array([s.top_p for s in samplings])])
        self.endings += [self._ending(request, sample) for request, sample in rows]
        self.alive = np.concatenate([self.alive, np.ones(len(rows), np.bool_)])
        self.ids = np.concatenate([_widened(self.ids, width), ids])
        self.logprobs = np.concatenate([_widened(self.logprobs, width), logprobs])
        self.uniforms = np.concatenate([_widened(self.uniforms, width), uniforms])

    def uniform(self) -> NDArray[np.float64]:
        at = np.minimum(self.made, self.uniforms.shape[1] - 1)  # a row that has ended may be full
        return np.asarray(self.uniforms[np.arange(self.count), at])

    def take(self, chosen: Int, logprob: NDArray[np.float64], version: tuple[int, int]) -> None:
        rows = np.flatnonzero(self.alive)
        for row in rows.tolist():
            self.versions[row].append(version)
        self.ids[rows, self.made[rows]] = chosen[rows]
        self.logprobs[rows, self.made[rows]] = logprob[rows]
        self.last = np.where(self.alive, chosen, self.last)
        self.made = self.made + self.alive
        # A row that has ended stays where it is: its last place in the cache is written again and again.
        self.length = np.where(self.alive, self.length, np.maximum(self.length - 1, 0))

    def end(self, row: int, *, finished: bool) -> _Request | None:
        """The request, where that was its last sample."""
        request = self.owner[row]
        self._store(row)
        request.made.finished[self.sample[row]] = finished
        self.alive[row] = False
        request.left -= 1
        return request if not request.left else None

    def store(self, request: _Request) -> None:
        for row in np.flatnonzero(self.alive).tolist():
            if self.owner[row] is request:
                self._store(row)

    def _store(self, row: int) -> None:
        made, sample, count = self.owner[row].made, self.sample[row], int(self.made[row])
        made.ids[sample] = self.ids[row, :count].tolist()
        made.logprobs[sample] = self.logprobs[row, :count].tolist()
        made.versions[sample] = list(self.versions[row])

    def leave(self, request: _Request) -> None:
        for row in range(self.count):
            if self.owner[row] is request:
                self.alive[row] = False

    def compact(self) -> Tensor | None:
        """Rows that go on, moved together; None: all do."""
        if not self.dead:
            return None
        keep = np.flatnonzero(self.alive)
        self.owner = [self.owner[row] for row in keep]
        self.sample = [self.sample[row] for row in keep]
        self.versions = [self.versions[row] for row in keep]
        self.endings = [self.endings[row] for row in keep]
        for name in _ARRAYS:
            setattr(self, name, getattr(self, name)[keep])
        return torch.from_numpy(keep)


_ARRAYS: Final = (
    "length", "last", "made", "most", "least", "temperature", "top_k", "top_p", "alive", "ids", "logprobs", "uniforms",
)  # fmt: skip


def _cut(scaled_BV: Tensor, top_k_B: Tensor, top_p_B: Tensor) -> Tensor:
    """Without the tokens that top-k, and then top-p of what is left, leave out."""
    width = scaled_BV.shape[1]
    sorted_BV, order_BV = scaled_BV.sort(dim=-1, descending=True)
    k_B = torch.where((top_k_B > 0) & (top_k_B < width), top_k_B, width)
    least_B = sorted_BV.gather(1, k_B[:, None] - 1)
    sorted_BV = sorted_BV.masked_fill(sorted_BV < least_B, -torch.inf)
    # What the likelier ones have together, without the token itself: the first one always stays.
    before_BV = torch.softmax(sorted_BV, dim=-1)
    before_BV = before_BV.cumsum(-1) - before_BV
    is_out_BV = (before_BV >= top_p_B[:, None]) & (top_p_B[:, None] < 1)
    is_out_BV[:, 0] = False
    sorted_BV = sorted_BV.masked_fill(is_out_BV, -torch.inf)
    return torch.empty_like(scaled_BV).scatter_(-1, order_BV, sorted_BV)


def _widened(array: NDArray[Any], width: int) -> NDArray[Any]:
    return np.pad(array, ((0, 0), (0, width - array.shape[1])))


class _Rows(Cache):
    """Keys and values of all rows: [B, heads, T, width] of each layer. A row has its own length."""

    def __init__(self, model: Any) -> None:
        super().__init__(layers=[])
        self._layers = len(model.base_model.layers)
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._at: Tensor = torch.zeros(0, dtype=torch.int64)

    def tensors(self) -> list[Tensor]:
        return [*self._keys, *self._values]

    def keep(self, rows: Tensor) -> None:
        self._keys = [each.index_select(0, rows) for each in self._keys]
        self._values = [each.index_select(0, rows) for each in self._values]

    def room(self, more: int, positions: int) -> None:
        """Makes room for that many rows more, of that many positions."""
        self._more = more
        self._grow(positions)
        self._keys = [_taller(each, more) for each in self._keys]
        self._values = [_taller(each, more) for each in self._values]

    def _grow(self, positions: int) -> None:
        if self._keys and positions > (have := self._keys[0].shape[2]):
            wide = -(-max(positions, have + BLOCK) // BLOCK) * BLOCK
            self._keys = [_wider(each, wide - have) for each in self._keys]
            self._values = [_wider(each, wide - have) for each in self._values]

    def write(self, rows: Tensor, texts: Tensor, computed: DynamicCache) -> None:
        """Writes the cache of texts that were computed at once to the rows that begin with them."""
        for number in range(self._layers):
            layer = computed.layers[number]
            assert isinstance(layer, DynamicLayer), "a layer of full attention"
            assert layer.keys is not None
            assert layer.values is not None
            positions = layer.keys.shape[2]
            if len(self._keys) <= number:
                wide = -(-positions // BLOCK) * BLOCK + BLOCK
                count, heads = self._more, layer.keys.shape[1]
                self._keys.append(layer.keys.new_zeros(count, heads, wide, layer.keys.shape[3]))
                self._values.append(layer.values.new_zeros(count, heads, wide, layer.values.shape[3]))
            self._keys[number][rows, :, :positions] = layer.keys[texts]
            self._values[number][rows, :, :positions] = layer.values[texts]

    def place(self, length_B: Tensor) -> None:
        """Where the next position of each row goes."""
        self._at = length_B
        self._seen = int(length_B.max()) + 1
        self._grow(self._seen)
        self._every = torch.arange(len(length_B))

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        keys[self._every, :, self._at] = key_states[:, :, 0]
        values[self._every, :, self._at] = value_states[:, :, 0]
        return keys[:, :, : self._seen], values[:, :, : self._seen]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return int(self._at.max()) if len(self._at) else 0


def _taller(tensor: Tensor, more: int) -> Tensor:
    return torch.cat([tensor, tensor.new_zeros(more, *tensor.shape[1:])])


def _wider(tensor: Tensor, more: int) -> Tensor:
    return torch.nn.functional.pad(tensor, (0, 0, 0, more))
