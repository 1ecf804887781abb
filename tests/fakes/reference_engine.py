"""An engine as small as one can be that has everything a large one has: batches that requests join and leave while it
runs, one child process per slot that holds its part of the weights, weights that change between two steps, sleep, abort
with what there is so far. No model: a token is a number that follows from weights, prompt and position, so that a test
can say of every token which weights made it.

    engine = await Engine.start(parts=2, kv_bytes=8 << 20)
    engine.weights["w"][:] = weights_of(PolicyVersion(0, 3))
    await engine.load(PolicyVersion(0, 3))
    answer = engine.begin("p:0/1/0", prompt=7, length=40)
    await answer                                       # Tokens(ids=[...], versions=[(0, 3), ...])
    engine.abort("p:0/1/0")                            # the answer so far, whoever awaits it is cancelled
    await engine.sleep(); await engine.wake()
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import mmap
import os
import sys
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlinf_api.errors import RetryableError
from rlinf_worker.channels.protocol import PolicyVersion

VOCABULARY = 50_000
WIDTH = 1 << 18  # numbers of one part's weights: 1 MiB
STEP_S = 0.002
LINE_BYTES = 1 << 20  # of what a child may say at once


def weights_of(version: PolicyVersion, *, parts: int = 2) -> np.ndarray:
    """What a trainer publishes as that version."""
    return np.full((parts, WIDTH), version.branch * 10_000 + version.number, np.float32)


def part_of_token(weights: np.ndarray, prompt: int, position: int) -> int:
    """Of one child. The first and the last number: half a version is none."""
    return zlib.crc32(f"{weights[0]:.0f} {weights[-1]:.0f} {prompt} {position}".encode()) % VOCABULARY


def token(version: tuple[int, int], prompt: int, position: int, *, parts: int = 2) -> int:
    value = np.array([version[0] * 10_000 + version[1]], np.float32)
    return parts * part_of_token(value, prompt, position) % VOCABULARY


@dataclass(slots=True, kw_only=True)
class Tokens:
    """With the version that made each of them."""

    ids: list[int] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)

    def are_right(self, prompt: int, *, parts: int = 2) -> bool:
        made = [token(version, prompt, n, parts=parts) for n, version in enumerate(self.versions)]
        return made == self.ids and self.versions == sorted(self.versions)


class Died(RetryableError):
    """A child is gone."""


class _Child:
    """One part: its own process, spoken with in lines of JSON, one question at a time."""

    def __init__(self, part: int, process: asyncio.subprocess.Process) -> None:
        self.part, self.process = part, process
        self._turn = asyncio.Lock()

    async def ask(self, **question: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        async with self._turn:
            try:
                self.process.stdin.write(json.dumps(question).encode() + b"\n")
                line = await self.process.stdout.readline()
            except OSError:
                line = b""
            if not line:
                code = await self.process.wait()
                raise Died(f"part {self.part} of the engine exited with {code}")
        return json.loads(line)


@dataclass(slots=True, kw_only=True)
class _Request:
    prompt: int
    length: int
    made: Tokens
    answer: asyncio.Future[Tokens]


class Engine:
    """`await Engine.start(...)`; `close` it."""

    def __init__(self, children: Sequence[_Child], memory: mmap.mmap, *, kv_bytes: int, stepped: Callable[[], None]):
        self._children, self._stepped = children, stepped
        self.weights = {"w": np.frombuffer(memory, np.float32).reshape(len(children), WIDTH)}
        self.version: PolicyVersion | None = None
        self.kv_bytes = kv_bytes
        self.error: Exception | None = None
        self.is_awake = False
        self._requests: dict[str, _Request] = {}
        self._between = asyncio.Lock()  # held for a step, and for what is done between two
        self._news = asyncio.Event()
        self._may_run = asyncio.Event()
        self._may_run.set()
        self._loop = asyncio.ensure_future(self._run())

    @classmethod
    async def start(cls, *, parts: int, kv_bytes: int, stepped: Callable[[], None] = lambda: None) -> Engine:
        fd = os.memfd_create("weights")
        try:
            os.truncate(fd, parts * WIDTH * 4)
            children = []
            for part in range(parts):
                command = (sys.executable, "-m", __name__, str(part), str(parts), str(fd))
                process = await asyncio.create_subprocess_exec(
                    *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, pass_fds=[fd],
                    limit=LINE_BYTES,
                )  # fmt: skip
                children.append(_Child(part, process))
            engine = cls(children, mmap.mmap(fd, parts * WIDTH * 4), kv_bytes=kv_bytes, stepped=stepped)
        finally:
            os.close(fd)
        await engine.wake()
        return engine

    @property
    def pids(self) -> list[int]:
        return [child.process.pid for child in self._children]

    async def _all(self, **question: Any) -> list[Any]:
        return await asyncio.gather(*(child.ask(**question) for child in self._children))

    # --- requests -----------------------------------------------------------------------------------------------------
    def begin(self, name: str, *, prompt: int, length: int, made: Tokens | None = None) -> asyncio.Future[Tokens]:
        """`made`: what another has made of it, to go on from."""
        answer = asyncio.get_running_loop().create_future()
        self._requests[name] = _Request(prompt=prompt, length=length, made=made or Tokens(), answer=answer)
        self._news.set()
        return answer

    def so_far(self, name: str) -> Tokens:
        return self._requests[name].made

    def abort(self, name: str) -> Tokens:
        request = self._requests.pop(name)
        request.answer.cancel()
        return request.made

    async def _run(self) -> None:
        try:
            while True:
                await self._news.wait()
                await self._may_run.wait()
                async with self._between:
                    if self._may_run.is_set():
                        await self._step()
                if not self._requests:
                    self._news.clear()
                await asyncio.sleep(STEP_S)
        except Died as error:
            self.error = error
            for request in self._requests.values():
                request.answer.set_exception(error)

    async def _step(self) -> None:
        """One token more of each request that is there now."""
        batch, version = list(self._requests.items()), self.version
        assert version is not None, "weights come before requests"
        wanted = [(request.prompt, len(request.made.ids)) for _, request in batch]
        parts = await self._all(op="step", wanted=wanted)
        for (name, request), column in zip(batch, zip(*parts, strict=True), strict=True):
            if name not in self._requests:
                continue  # aborted meanwhile
            request.made.ids.append(sum(column) % VOCABULARY)
            request.made.versions.append((version.branch, version.number))
            if len(request.made.ids) >= request.length:
                del self._requests[name]
                request.answer.set_result(request.made)
        self._stepped()

    # --- between two steps --------------------------------------------------------------------------------------------
    async def pause(self) -> None:
        """Returns when no step is under way."""
        self._may_run.clear()
        async with self._between:
            pass

    def resume(self) -> None:
        self._may_run.set()

    async def load(self, version: PolicyVersion) -> None:
        """What is in `weights` now; requests go on with it."""
        async with self._between:
            await self._all(op="load")
            self.version = version

    async def sleep(self) -> None:
        """Weights and cache are given back; requests stay as they are, and their cache is made anew."""
        await self.pause()
        async with self._between:
            self.is_awake = False
            await self._all(op="sleep")

    async def wake(self) -> None:
        async with self._between:
            await self._all(op="wake", kv=self.kv_bytes // len(self._children))
            self.is_awake = True
        self.resume()

    async def resize(self, kv_bytes: int) -> None:
        async with self._between:
            self.kv_bytes = kv_bytes
            await self._all(op="wake", kv=kv_bytes // len(self._children))

    async def check(self) -> None:
        """Every part answers."""
        if self.error is not None:
            raise self.error
        await self._all(op="ping")

    async def close(self) -> None:
        self._loop.cancel()
        await asyncio.gather(self._loop, return_exceptions=True)
        for child in self._children:
            with contextlib.suppress(ProcessLookupError):
                child.process.kill()
            await child.process.wait()


# --- the child --------------------------------------------------------------------------------------------------------
def _child(part: int, parts: int, fd: int) -> None:
    shared = np.frombuffer(mmap.mmap(fd, parts * WIDTH * 4, prot=mmap.PROT_READ), np.float32).reshape(parts, WIDTH)
    weights, cache = shared[part][:0].copy(), np.zeros(0, np.uint8)
    for line in sys.stdin:
        question, answer = json.loads(line), list[int]()
        match question["op"]:
            case "load":
                weights = shared[part].copy()
            case "step":
                answer = [part_of_token(weights, prompt, position) for prompt, position in question["wanted"]]
            case "sleep":
                weights, cache = shared[part][:0].copy(), np.zeros(0, np.uint8)
                ctypes.CDLL(None).malloc_trim(0)
            case "wake":
                weights, cache = shared[part].copy(), np.ones(question["kv"], np.uint8)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    assert cache.size >= 0  # held until the end


if __name__ == "__main__":
    _child(*map(int, sys.argv[1:]))
