"""A child process of a worker, as one rank of an engine: reads what it is lent, by a line of base64 each way."""

import base64
import pickle
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, Self

import numpy as np

from rlinf_api.errors import RLinfError
from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.weights.lending import BorrowedWeights
from rlinf_worker.weights.planning import WHOLE, LentWeights, View


class Child:
    """At the worker. `child.read(lent)` -> {name: array}; `child.copy(lent, into=...)` -> what the targets are then."""

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", __name__]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.communicate()

    def _ask(self, *question: Any) -> Any:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(base64.b64encode(pickle.dumps(question)) + b"\n")
        stdin.flush()
        is_answer, said = pickle.loads(base64.b64decode(stdout.readline()))
        if not is_answer:
            raise RuntimeError(said)
        return said

    def read(self, lent: LentWeights, *, view: View = WHOLE) -> dict[str, Any]:
        self.keep(lent, view=view)
        return self.kept()

    def keep(self, lent: LentWeights, *, view: View = WHOLE) -> None:
        """Maps it, and looks at nothing."""
        self._ask("keep", lent, view)

    def kept(self) -> dict[str, Any]:
        """What is there by now; it is kept no longer."""
        found: dict[str, Any] = self._ask("kept")
        return found

    def copy(
        self, lent: LentWeights, *, into: Mapping[str, Any], view: View = WHOLE
    ) -> tuple[PolicyVersion, Mapping[str, Any]]:
        found: tuple[PolicyVersion, Mapping[str, Any]] = self._ask("copy", lent, into, view)
        return found


class _Rank:
    def __init__(self) -> None:
        self._borrowed = BorrowedWeights()
        self._kept = dict[str, Any]()

    def keep(self, lent: LentWeights, view: View) -> None:
        self._kept = self._borrowed.arrays(lent, view=view)

    def kept(self) -> dict[str, Any]:
        kept, self._kept = self._kept, {}
        return {name: _value(value) for name, value in kept.items()}

    def copy(self, lent: LentWeights, into: Mapping[str, Any], view: View) -> tuple[PolicyVersion, Mapping[str, Any]]:
        return self._borrowed.copy(lent, into=into, view=view), into


def _value(found: Any) -> Any:
    if isinstance(found, memoryview):
        return bytes(found)
    return np.array(found) if hasattr(found, "shape") else found


def main() -> None:
    rank = _Rank()
    for line in sys.stdin.buffer:
        do, *question = pickle.loads(base64.b64decode(line))
        answer: tuple[bool, Any]
        try:
            answer = True, getattr(rank, do)(*question)
        except RLinfError as error:
            answer = False, f"{type(error).__name__}: {error}"
        print(base64.b64encode(pickle.dumps(answer)).decode(), flush=True)


if __name__ == "__main__":
    main()
