"""What a flow function gets, without a driver: it remembers what is declared, and the tickets of each step."""

from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.flows.protocol import Step, Ticket


class FakeFlow:
    """`declared` holds a tuple per channel, its kind first; `payloads` what each is said to carry."""

    name, seed, max_steps, max_staleness = "fake", 0, 2, 0

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        workers: Callable[[str], int],
        steps: int = 2,
        first: int = 1,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        """`first` and `state`: of a job that goes on."""
        self.config, self._workers, self._steps, self._first = config, workers, steps, first
        self.declared: list[tuple[Any, ...]] = []
        self.payloads: dict[str, Any] = {}
        self.put_at: dict[int, list[Ticket]] = {}
        self.state: dict[str, Any] = dict(state or {})
        self.facts: dict[str, Any] = {}
        self.watches: dict[str, tuple[float, str]] = {}

    def workers(self, role: str) -> int:
        return self._workers(role)

    def source(self, name: str, *, to: str, payload: Any = None) -> "FakeFlow":
        self._declare("source", name, to, payload=payload)
        return self

    def cycle(
        self, name: str, *, ask: str, answer: str, question: Any = None, reply: Any = None, anybody: bool = False
    ) -> None:
        self._declare("cycle", name, ask, answer, payload=(question, reply))

    def results(self, name: str, *, producer: str, payload: Any = None) -> "FakeFlow":
        self._declare("results", name, producer, payload=payload)
        return self

    async def of(self, step: Step, tickets: Any = None) -> Any:
        return []

    def queue(self, name: str, producer: str, consumer: str, *, payload: Any = None, **how: Any) -> None:
        self._declare("queue", name, producer, consumer, how, payload=payload)

    def weights(self, producer: str, consumer: str) -> None:
        self.declared.append(("weights", producer, consumer))

    def watch(self, metric: str, *, at_most: float, reason: str, words: str) -> None:
        self.watches[metric] = (at_most, reason)

    def _declare(self, kind: str, name: str, *rest: Any, payload: Any) -> None:
        self.declared.append((kind, name, *rest))
        self.payloads[name] = payload

    async def put(self, tickets: Any, *, step: Step) -> None:
        self.put_at[step.number] = list(tickets)

    def withdraw(self, tickets: Any, *, step: Step) -> None:
        raise AssertionError("Must not be called!")

    async def shared(self, name: str) -> Any:
        return self.facts[name]

    async def steps(self) -> AsyncIterator[Step]:
        for number in range(self._first, self._steps + 1):
            yield Step(number=number, version=PolicyVersion(0, number - 1))
