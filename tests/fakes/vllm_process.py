"""vLLM's engine in a process of its own, for the suite of engines: whoever imports vLLM warns, and our tests make
warnings errors. It is started once for a file, and each test is given it empty.

    with VllmProcess(folder) as process:
        engine = process.engine(seed=7, weights=dict(model.named_parameters()), version=FIRST)
        answer = engine.begin(...); engine.step()
"""

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from rlinf_worker import memory
from rlinf_worker.roles.rollout.engine import Made

START_S = 240.0
"""Import and load, beside other work: 14 s where nothing else is at work."""
CALL_S = 60.0
BLOCKS = 40
"""Of the cache, of 32 positions each: a third of what the suite's requests would fill at once."""
ROWS = 64
POSITIONS = 128


class VllmProcess:
    def __init__(self, folder: Path, *, block_bytes: int, blocks: int = BLOCKS) -> None:
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, str(folder), blocks * block_bytes), daemon=True)
        self._process.start()
        theirs.close()
        self._starts = True

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._ours.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(10)

    def call(self, what, *arguments, **options):
        timeout_s, self._starts = START_S if self._starts else CALL_S, False
        self._ours.send((what, arguments, options))
        assert self._ours.poll(timeout_s), f"vLLM's process has not answered {what} within {timeout_s:g} s"
        good, value = self._ours.recv()
        if not good:
            raise RuntimeError(value)
        return value

    def engine_as_read(self, *, seed, version):
        """With the weights that vLLM has read from the folder itself."""
        self.call("empty", seed=seed, version=version)
        return _Engine(self)

    def engine(self, *, seed, version, weights):
        self.call("empty", seed=seed)
        engine = _Engine(self)
        engine.load(version, weights)
        return engine


class _Engine:
    """engine.py's protocol, over the pipe."""

    def __init__(self, process) -> None:
        self._process = process
        self._answers: dict[str, Future[Made]] = {}

    @property
    def busy(self):
        return self._process.call("busy")

    @property
    def rows(self):
        return self._process.call("rows")

    def begin(self, name, *, key, prompt, sampling, made=None):
        self._answers[name] = Future()
        self._process.call("begin", name, key=key, prompt=prompt, sampling=sampling, made=made)
        return self._answers[name]

    def step(self):
        made, answered = self._process.call("step")
        for name, answer in answered.items():
            self._answers.pop(name).set_result(answer)
        return made

    def load(self, version, weights, **options):
        arrays = {name: tensor.detach().numpy() for name, tensor in weights.items()}
        self._process.call("load", version, arrays, **options)

    def so_far(self, name):
        return self._process.call("so_far", name)

    def empty(self):
        self._process.call("off_the_slots")

    def fill(self):
        self._process.call("fill")

    def bytes_now(self):
        return self._process.call("bytes_now")

    def resident(self):
        """Bytes of the engine's process, without files that are mapped."""
        return self._process.call("resident")

    def abort(self, name):
        self._answers.pop(name).cancel()
        return self._process.call("abort", name)


# --- the other side ---------------------------------------------------------------------------------------------------
def _serve(pipe, folder, kv_bytes):
    import torch
    from tokenizers import Tokenizer

    torch.set_num_threads(1)
    from rlinf_worker.roles.rollout import vllm_engine

    engine = vllm_engine.VllmEngine(
        folder, dtype="float32", seed=0, rows=ROWS, positions=POSITIONS, block=32, kv_bytes=kv_bytes,
        tokenizer=Tokenizer.from_file(str(path)) if (path := Path(folder, "tokenizer.json")).exists() else None,
    )  # fmt: skip
    answers: dict[str, Future[Made]] = {}

    def empty(*, seed, version=None):
        for name in list(answers):
            engine.abort(name)
            del answers[name]
        engine.seed, engine.version = seed, version

    def begin(name, **options):
        answers[name] = engine.begin(name, **options)

    def step():
        made = engine.step()
        done = {name: answer.result() for name, answer in answers.items() if answer.done()}
        for name in done:
            del answers[name]
        return made, done

    def abort(name):
        answer = answers.pop(name)
        made = engine.abort(name)
        assert answer.cancelled()
        return made

    def load(version, arrays, **options):
        engine.load(version, {name: torch.from_numpy(array) for name, array in arrays.items()}, **options)

    calls: dict[str, Callable[..., Any]] = {
        "empty": empty, "begin": begin, "step": step, "abort": abort, "load": load, "so_far": engine.so_far,
        "off_the_slots": engine.empty, "fill": engine.fill, "bytes_now": engine.bytes_now,
        "resident": lambda: memory.of_tree(os.getpid()),
        "busy": lambda: engine.busy,
        "rows": lambda: engine.rows, "check_model": vllm_engine.check_model,
    }  # fmt: skip
    while True:
        try:
            what, arguments, options = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, calls[what](*arguments, **options)))
        except Exception as error:  # noqa: BLE001  the other side raises it
            pipe.send((False, f"{type(error).__name__}: {error}"))
