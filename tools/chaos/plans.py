"""Plans changed by hand while faults are done: what is asked for, in the background, and what came of it.

A change asks for another plan as a person would, by the run's control socket, and after a while for the first one back.
Neither waits: the next fault comes while the plan is prepared, committed or taken back. A question is over when it is
answered, or when a later one has overtaken it. A plan may *fail* under faults, with the reason, for good, as a worker
that only it has dies; what must not be is no answer.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import yaml

from rlinf_api.errors import UserError
from rljob import plan as command

ANSWER_S: Final = 120.0  # a preparation begins anew with every driver; several may be killed meanwhile
LATE: Final = ("did not happen within", "nothing within")  # of the run itself, and of its socket
Change = Literal["micro-batch", "workers"]
JOB: Final = "cartpole"  # metadata.name of the example
CHANGES: Final[tuple[Change, ...]] = ("micro-batch", "workers")


@dataclass(slots=True)
class Ask:
    """One question; `thread` has the answer when it ends."""

    what: str
    put: Callable[[], tuple[bool, str]]
    in_force: bool = False
    says: str = ""
    overtaken: bool = False
    thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._run, name=f"plan: {self.what}", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.in_force, self.says = self.put()
        except UserError as error:
            self.says = str(error)

    @property
    def is_over(self) -> bool:
        return self.overtaken or not self.thread.is_alive()

    def as_json(self) -> dict[str, Any]:
        outcome = "in force" if self.in_force else ("overtaken" if self.overtaken else "not in force")
        return {"plan": self.what, "outcome": outcome, "says": self.says}


class Plans:
    """The changes of one job's plan. `read()` once it runs and before anything is done to it."""

    def __init__(self, work_dir: Path) -> None:
        self._work_dir = work_dir
        self.first: dict[str, Any] = {}
        self.asked: list[Ask] = []

    def read(self) -> None:
        self.first = yaml.safe_load(command.show(self._work_dir, as_yaml=True))["spec"]

    def change(self, change: Change) -> Ask:
        file = f"plan-{len(self.asked)}.yaml"
        return self._ask(change, lambda: self._set(another(self.first, change), file))

    def back(self) -> Ask:
        return self._ask("back", self._back)

    def _ask(self, what: str, put: Callable[[], tuple[bool, str]]) -> Ask:
        for ask in self.asked:
            ask.overtaken = ask.overtaken or not ask.is_over
        self.asked.append(Ask(what, put))
        return self.asked[-1]

    def _set(self, spec: Mapping[str, Any], name: str) -> tuple[bool, str]:
        file = self._work_dir.parent / name
        file.write_text(json.dumps({"spec": spec}), encoding="utf-8")
        return command.put(self._work_dir, file, timeout_s=ANSWER_S)

    def _back(self) -> tuple[bool, str]:
        """The older plan pinned again; where that has failed for good, its content as another revision."""
        in_force, says = command.pin(self._work_dir, f"{JOB}-p1", timeout_s=ANSWER_S)
        return (in_force, says) if in_force or _is_late(says) else self._set(self.first, "plan-first.yaml")

    def problems(self) -> list[str]:
        """What is wrong with the changes of a job that has ended."""
        late = [ask for ask in self.asked if not ask.overtaken and _is_late(ask.says)]
        return [f"a change of plan ({ask.what}) was neither in force nor refused: {ask.says}" for ask in late]

    def close(self, *, timeout_s: float = 5.0) -> None:
        for ask in self.asked:
            ask.thread.join(timeout_s)


def _is_late(says: str) -> bool:
    return any(words in says for words in LATE)


def another(first: Mapping[str, Any], change: Change) -> dict[str, Any]:
    """What `first` is changed to: trajectories two at a time, or one worker of environments fewer."""
    plan = deepcopy(dict(first))
    if change == "micro-batch":
        plan["channels"] = [{"name": "trajectories", "microBatch": 2, "depth": 2}]
    else:
        [entry] = [entry for entry in plan["workers"] if entry["role"] == "env"]
        entry |= {"count": 1, "slots": "sim/0/0"}
    return plan


def counts(asked: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """By outcome, of `as_json` of each."""
    outcomes = [ask["outcome"] for ask in asked]
    return {outcome: outcomes.count(outcome) for outcome in ("in force", "overtaken", "not in force")}
