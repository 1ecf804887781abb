"""Weights nodes as processes, for the weights benchmark and tests: started, routed, asked and ended from one place.

with Field(folder) as field:
    field.start("actor/0"), field.start("rollout/0", pod="b")
    field.route("actor/0", "rollout/0")
    field.ask("actor/0", do="publish", number=1, mb=200, tensors=100)
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from rlinf_worker.weights import copying
from tools.bench.harness import ROOT, BenchError

ANSWER_S: Final = 60.0


class Field:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}
        self.endpoints: dict[str, dict[str, Any]] = {}
        self._unread: dict[str, bytes] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for node in self.nodes.values():
            node.kill()
        for node in self.nodes.values():
            node.communicate()

    def start(self, name: str, *, pod: str = "a", attempt: int = 1) -> None:
        module = "tools.bench.runtime_parts.weights_node"
        self.nodes[name] = subprocess.Popen(
            [sys.executable, "-m", module, name, str(attempt), pod, str(self._folder)],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLIBC_TUNABLES": copying.TUNABLES},  # as an agent does
        )  # fmt: skip
        self._unread[name] = b""
        self.endpoints[name] = self.answer(name)["endpoint"]

    def kill(self, name: str) -> None:
        node = self.nodes.pop(name)
        node.kill()
        node.communicate()

    def tell(self, name: str, **command: Any) -> None:
        stdin = self.nodes[name].stdin
        assert stdin is not None
        stdin.write(json.dumps(command).encode() + b"\n")
        stdin.flush()

    def answer(self, name: str, *, timeout_s: float = ANSWER_S) -> Any:
        stdout = self.nodes[name].stdout
        assert stdout is not None
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            while b"\n" not in self._unread[name]:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError(f"node {name} did not answer within {timeout_s:g} s")
                got = os.read(stdout.fileno(), 1 << 16)
                if not got:
                    raise EOFError(f"node {name} has ended")
                self._unread[name] += got
        line, _, self._unread[name] = self._unread[name].partition(b"\n")
        said = json.loads(line)
        if "fatal" in said:
            raise BenchError(f"node {name} has ended: {said['fatal']}")
        return said

    def ask(self, name: str, **command: Any) -> Any:
        self.tell(name, **command)
        return self.answer(name)

    def route(self, producer: str, consumer: str) -> None:
        for me, peer, outgoing in ((producer, consumer, True), (consumer, producer, False)):
            self.ask(me, do="route", endpoint=self.endpoints[peer], outgoing=outgoing)
