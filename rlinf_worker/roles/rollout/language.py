"""The rollout role of language models: answers each ticket's prompt with a group of samples, by an engine (engine.py).

    ticket ── row, prompt ──> engine ──(one token of every sample, again and again)──> group ── put ──> reward

The engine computes in a thread, one step at a time. Between two steps, in the event loop, everything else is done:
prompts join, those that nobody needs any more leave, weights are set, what there is goes to the driver, the role leaves
its slots. Off them the engine has neither weights nor cache; back on them it pulls the newest weights, and goes on.

Other tasks wait for room in channels meanwhile, so the role may be found idle wherever it awaits outside of a span. So
what touches the engine's memory is in a span that begins right behind a wait or a safe point.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Final, TypeVar

import numpy as np
import torch

from rlinf_api.errors import UserError
from rlinf_worker.channels.protocol import ChannelClosed, Item, PolicyVersion
from rlinf_worker.roles import models
from rlinf_worker.roles.protocol import FlowSettings, Memory, RoleContext
from rlinf_worker.roles.rollout import endings
from rlinf_worker.roles.rollout.drawing import Drawing, most_samples
from rlinf_worker.roles.rollout.engine import Engine, Made
from rlinf_worker.roles.rollout.generation import Generator
from rlinf_worker.roles.rollout.prompts import Prompts
from rlinf_worker.roles.rollout.schema import LanguageConfig, TransformersConfig
from rlinf_worker.roles.samples import ROWS, SAMPLING

Result = TypeVar("Result")
NO_WEIGHTS: Final = PolicyVersion(-1, 0)
KEEP_S: Final = 1.0
"""Between two times that what there is of groups is left with the driver: what a dead worker costs at most."""


class LanguageRole(ABC):
    """A role that generates with a language model, of whatever kind: a subclass makes the engine. It is offloadable."""

    schema: type[LanguageConfig]
    _engine: Engine | None = None
    _is_bare = False
    """The engine has been off its slots, and has no weights yet."""

    decoder: Any = None
    """The tokenizer of the library tokenizers, where there are stop strings."""

    @abstractmethod
    def engine(self, config: Any, *, path: str, shape: Any, kv_bytes: int) -> tuple[Engine, int]:
        """In a thread, as the role loads; `shape`: the model's config; `kv_bytes`: the plan's, 0 where it says nothing.
        Returns how many samples there may be at once, too."""

    def warm(self, flow: FlowSettings, config: Mapping[str, Any]) -> None:
        """The imports are done by now: this module's own. The first use of the tokenizer's library is not."""
        models.tokenizer(flow.model)

    async def run(self, ctx: RoleContext) -> None:
        self._ctx = ctx
        # The engine's own thread: how many threads an operation takes is a matter of who calls it. One: with more,
        # processes that share cores wait for each other at every operation.
        self._thread = ThreadPoolExecutor(1, "engine", initializer=torch.set_num_threads, initargs=(1,))
        async with ctx.turn():
            with ctx.span("load"):
                await self._in_its_thread(self._load)
            ctx.share(ROWS, self._prompts.fact())
            ctx.share(SAMPLING, self._drawing.fact())
            await ctx.ready()
            try:
                async with asyncio.TaskGroup() as tasks:
                    with contextlib.suppress(ChannelClosed):
                        await self._serve(tasks)
            except ExceptionGroup as group:  # not except*: before Python 3.11.4 it puts what it raises into a group
                first = group.exceptions[0]
                raise first from first.__cause__

    @property
    def _held_engine(self) -> Engine:
        assert self._engine is not None, "it is made as the role loads"
        return self._engine

    async def _in_its_thread(self, call: Callable[..., Result], *arguments: Any) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, *arguments)

    # --- Offloadable: called by the runtime ---------------------------------------------------------------------------
    def memory(self) -> Memory:
        return Memory(now=self._engine.bytes_now() if self._engine is not None else 0)

    async def offload(self) -> None:
        if self._engine is not None:
            self._is_bare = True
            await self._in_its_thread(self._engine.empty)

    async def load(self) -> None:
        if self._engine is not None:
            await self._in_its_thread(self._engine.fill)

    # --- loading ------------------------------------------------------------------------------------------------------
    def _load(self) -> None:
        ctx, config = self._ctx, self.schema.model_validate(dict(self._ctx.config))
        self._config, flow = config, ctx.flow
        if len(ctx.slots) > 1:  # they are there for tensor parallelism, and all but one would be idle
            raise UserError(
                "tensor parallelism is not supported yet in this version",
                got=f"spec.roles[{ctx.role}].slotsPerWorker {len(ctx.slots)}",
                wanted="1: a worker generates on one slot", next="write slotsPerWorker: 1, and more workers",
            )  # fmt: skip
        self._prompts = Prompts(flow, column=config.prompt_column)
        tokenizer = self._prompts.tokenizer
        shape = models.config_of(flow.model)
        context = models.context_of(shape)
        if config.max_prompt_tokens + config.max_response_tokens > context:
            raise UserError(
                "the model's context is too short for prompt and response",
                got=f"maxPromptTokens {config.max_prompt_tokens} + maxResponseTokens {config.max_response_tokens}",
                wanted=f"at most {context} together", next="lower one of them in spec.roles[rollout].config",
            )  # fmt: skip
        if unknown := [token for token in config.stop_token_ids if token >= int(shape.vocab_size)]:
            raise UserError(
                "stopTokenIds has tokens that the model never says", got=", ".join(map(str, unknown)),
                wanted=f"ids below {shape.vocab_size}", next="correct it in spec.roles[rollout].config",
            )  # fmt: skip
        self._samples = most_samples(flow)
        stops = tuple(config.stop_token_ids) or models.stops_of(flow.model, shape, tokenizer)
        self._drawing = Drawing(flow, config, stops=stops)
        if self._drawing.stop_strings:
            self.decoder = endings.library_of(tokenizer, self._drawing.stop_strings, path=flow.model)
        kv_bytes = ctx.allotment.kv_bytes
        self._engine, self._most_rows = self.engine(config, path=flow.model, shape=shape, kv_bytes=kv_bytes)

    def room(self, rows: int, *, field: str) -> int:
        """Samples at once; a group has to fit."""
        if rows < (wanted := most_samples(self._ctx.flow)):
            raise UserError(
                "a group does not fit into the engine", got=f"{field}, so {rows} samples at once",
                wanted=f"{wanted}, spec.flow.config.samplesPerPrompt, or evaluation.samples",
                next="raise maxSequences or the plan's kv, or lower samplesPerPrompt",
            )  # fmt: skip
        return rows

    # --- serving ------------------------------------------------------------------------------------------------------
    async def _serve(self, tasks: asyncio.TaskGroup) -> None:
        ctx, engine = self._ctx, self._engine
        assert engine is not None
        self._tickets, self._out = ctx.channel("prompts"), ctx.channel("samples")
        self._tasks, self._kept_at = tasks, time.monotonic()
        self._working: dict[str, tuple[Item, Future[Made]]] = {}
        self._given_up: set[str] = set()
        self._puts: set[asyncio.Task[None]] = set()
        self._held = NO_WEIGHTS
        self._news: asyncio.Future[PolicyVersion] | None = None
        try:
            while not ctx.stopping.is_set():
                await self._look_for_news()
                self._tickets.room(self._could_begin)
                while self._has_room and (item := self._tickets.take_now()) is not None:
                    await self._begin(item)
                self._hand_over()
                if engine.busy:
                    await self._step()
                elif self._has_room:
                    await self._begin(await self._tickets.take())
                else:
                    await asyncio.wait(self._puts, return_when=asyncio.FIRST_COMPLETED)
            self._keep()
        finally:
            if self._news is not None:
                self._news.cancel()

    async def _step(self) -> None:
        ctx, engine = self._ctx, self._held_engine
        steps = [item.step for item, _ in self._working.values()]
        await ctx.safe_point(oldest=min(steps))
        while self._is_bare:
            await self._set_weights(self._held, keep=False)
            await ctx.safe_point(oldest=min(steps))
        with ctx.span("compute", step=max(steps)) as amount:
            amount.tokens = float(await self._in_its_thread(engine.step))
        ctx.moved()
        self._leave()
        if time.monotonic() - self._kept_at >= KEEP_S:
            self._kept_at = time.monotonic()
            self._keep()

    # --- weights ------------------------------------------------------------------------------------------------------
    async def _look_for_news(self) -> None:
        """Where steps may be open that older weights will do for: the newest make what is begun, and the tokens to come
        of what is under way."""
        if not self._ctx.flow.max_staleness or self._held == NO_WEIGHTS:
            return
        if self._news is None:
            self._news = asyncio.ensure_future(self._ctx.weights.newer(self._held))
        if self._news.done():
            news, self._news = self._news.result(), None
            if news > self._held:  # a ticket that asked for them may have brought them meanwhile
                await self._change_weights(news)

    async def _change_weights(self, at_least: PolicyVersion) -> None:
        on_news = self._config.on_new_weights
        while on_news == "drain" and self._held_engine.busy and not self._ctx.stopping.is_set():
            await self._step()
            self._hand_over()
        await self._set_weights(at_least, keep=on_news == "keep" and not self._is_bare)

    async def _set_weights(self, at_least: PolicyVersion, *, keep: bool) -> None:
        self._held, weights = await self._ctx.weights.pull(at_least)
        with self._ctx.span("weights", step=self._held.number):
            self._is_bare = False
            await self._in_its_thread(partial(self._held_engine.load, self._held, weights, keep=keep))

    @property
    def _could_begin(self) -> int:
        """Groups that could be begun beside what is computed, and what waits for room in the channel."""
        return max(0, (self._most_rows - self._held_engine.rows) // self._samples - len(self._puts))

    @property
    def _has_room(self) -> bool:
        return self._could_begin > 0

    async def _begin(self, item: Item) -> None:
        ctx, config = self._ctx, self._config
        if item.cancelled:
            self._tickets.drop(item, "cancelled")
            return
        prompt = await asyncio.to_thread(self._prompts.tokens, item)
        if len(prompt) > config.max_prompt_tokens:
            ctx.report(step=item.step, metrics={"prompts_too_long_count": 1.0}, key=item.key)
            self._tickets.drop(item, "longer than maxPromptTokens")
            return
        if item.version > self._held:
            await self._change_weights(item.version)
        name = f"{item.branch}/{item.key}"
        left = Made.from_plain(item.partial) if item.partial is not None else None
        if left is not None and _oldest(left) < item.version:
            left = None  # too old for the step that it is of now
        sampling = self._drawing.of(item)
        answer = self._held_engine.begin(name, key=item.key, prompt=prompt, sampling=sampling, made=left)
        self._working[name] = (item, answer)
        item.on_cancel(lambda: self._given_up.add(name))

    def _leave(self) -> None:
        """What nobody needs any more, between two steps."""
        while self._given_up:
            name = self._given_up.pop()
            if name in self._working and not self._working[name][1].done():
                item, _ = self._working.pop(name)
                self._held_engine.abort(name)
                self._tickets.drop(item, "cancelled")

    def _keep(self) -> None:
        """Leaves what there is of groups for whoever goes on with them if it is not us."""
        for name, (item, answer) in self._working.items():
            if not answer.done() and (made := self._held_engine.so_far(name)).has_begun:
                self._tickets.keep(item, made.to_plain())

    def _hand_over(self) -> None:
        """In tasks of their own: room in the channel may have to wait for other groups."""
        for name in [name for name, (_, answer) in self._working.items() if answer.done()]:
            item, answer = self._working.pop(name)
            put = self._tasks.create_task(self._put(item, answer.result()))
            self._puts.add(put)
            put.add_done_callback(self._puts.discard)

    async def _put(self, item: Item, made: Made) -> None:
        if item.cancelled:
            self._tickets.drop(item, "cancelled")
            return
        payload = await asyncio.to_thread(self._payload, item, made)
        await self._out.put(
            payload, key=item.key, version=_oldest(made), weight=float(len(payload["tokens"])),
            parents=[item],
        )  # fmt: skip
        self._tickets.ack(item)

    def _payload(self, item: Item, made: Made) -> dict[str, Any]:
        lengths = [len(ids) for ids in made.ids]
        return {
            "prompt": np.array(self._prompts.tokens(item), np.int32),
            "tokens": np.array([token for ids in made.ids for token in ids], np.int32),
            "logprobs": np.array([value for each in made.logprobs for value in each], np.float32),
            "versions": np.array([version for each in made.versions for version in each], np.int32),
            "lengths": np.array(lengths, np.int32),
            "finished": np.array(made.finished, np.bool_),
            "texts": self._texts(made),
            "row": self._prompts.row(item),
        }

    def _texts(self, made: Made) -> list[str]:
        """Without the stop string that a sample has ended with, and what its last token says behind it."""
        texts: list[str] = self._prompts.tokenizer.batch_decode(made.ids, skip_special_tokens=True)
        strings = self._drawing.stop_strings
        if not strings or self._config.keep_stop_string:
            return texts
        least = self._config.min_response_tokens
        cut = [endings.text_before(self.decoder, strings, ids, least=least) for ids in made.ids]
        return [text if part is None else part for text, part in zip(texts, cut, strict=True)]


class TransformersRole(LanguageRole):
    schema = TransformersConfig

    def engine(self, config: Any, *, path: str, shape: Any, kv_bytes: int) -> tuple[Engine, int]:
        model = models.language_model(path, dtype=getattr(torch, config.dtype))
        rows, field = config.max_sequences, f"maxSequences {config.max_sequences}"
        if kv_bytes:
            positions = config.max_prompt_tokens + config.max_response_tokens
            each = models.kv_bytes_of(shape, itemsize=model.dtype.itemsize) * positions
            if kv_bytes // each < rows:
                rows, field = kv_bytes // each, f"kv {kv_bytes} bytes of the plan, {each} for each sample"
        rows = self.room(rows, field=field)
        return Generator(model, seed=self._ctx.flow.seed, rows=rows, tokenizer=self.decoder), rows


def _oldest(made: Made) -> PolicyVersion:
    """The unit's version: the oldest weights that any of it is of."""
    return PolicyVersion(*min(version for each in made.versions for version in each))
