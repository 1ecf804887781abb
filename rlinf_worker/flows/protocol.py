"""What a flow is, and what it is given. A flow is an `async def flow(ctx: Flow) -> None` that runs in the driver: it
declares the channels between the job's roles and says, step by step, what there is to do. It carries no payload.

    async def ppo(flow: Flow) -> None:
        segments = flow.source("segments", to="env")
        flow.cycle("actions", ask="env", answer="rollout", question={"obs": "float32[n, ...]", "t": "int"})
        ...
        async for step in flow.steps():
            await segments.put([Ticket(...), ...], step=step)

The runtime of flows is `rlinf_worker.driver`; local names resolve in `flows/registry.py`, the user's own as
module:function.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlinf_api.conditions import Reason
from rlinf_worker.channels.payload_type import Declared
from rlinf_worker.channels.protocol import LineageKey, PolicyVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """A unit that the driver itself makes: small, plain values only. `affinity`, a number from 0 up, pins it to
    one consumer, the same in every step while their number stays (environments live where they were made); another
    number of consumers moves as few as it can, and another has it while that one does not come back (settings
    rehome_after_s): so every consumer can work on every unit. None: whoever has credit.

    `units`: how many units come of it where the flow's queues end, whatever they pass on the way: 8 samples of a
    prompt. One unit that is made of several tickets (put with all of them as parents) counts for each. None: nobody
    knows before; the step has all of it once whoever works on it has acknowledged what it took.

    `rare`: it is of few steps, as an evaluation's are. What such a step takes is no measure of the others, so no plan
    is made or judged by it.

    Ticket(key="train:0/512/0", payload={"index": 512}, units=8)"""

    key: LineageKey
    payload: Mapping[str, Any] = field(default_factory=dict)
    weight: float = 1.0
    affinity: int | None = None
    units: int | None = 1
    rare: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One iteration of the flow, one policy update. `version` is the oldest policy that may work for it."""

    number: int  # first is 1
    version: PolicyVersion


class Source(Protocol):
    async def put(self, tickets: Sequence[Ticket], *, step: Step) -> None:
        """Makes the units of a step known; idempotent by key, so that a new driver may put them again. More of a step
        may be put until the next one is asked for, as results come in."""
        ...

    def withdraw(self, tickets: Sequence[LineageKey], *, step: Step) -> None:
        """Nothing more is wanted of these: the step goes on without those of which no unit has been put by now, and
        whoever works on one is told (`Item.on_cancel`). Of the others all comes, as said. For who puts more tickets
        than it needs and gives up the slowest, which another life of the driver may choose otherwise."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a role told the flow of a unit, and the tickets that this came of.

    Result(key="train:0/512/0", tickets=("train:0/512/0",), value={"reward": 0.5}, version=PolicyVersion(0, 16))
    """

    key: LineageKey
    tickets: tuple[LineageKey, ...]
    value: Any
    version: PolicyVersion


class Results(Protocol):
    async def of(self, step: Step, tickets: Sequence[LineageKey] | None = None) -> Sequence[Result]:
        """What came of these tickets (None: of all that the step has by now), in the order of their keys: once whoever
        works on them has acknowledged or dropped all of it. Of a ticket that was dropped nothing may have come.

        A new driver runs the flow again and gets the same results; so a flow that decides by their values, and not by
        when they came, puts the same tickets again."""
        ...


class Flow(Protocol):
    """Declarations come first, in the order of the data; `steps()` begins the job."""

    name: str
    seed: int

    @property
    def max_steps(self) -> int:
        """The last step, as of now: an edit of the running job moves it."""
        ...

    max_staleness: int
    config: Mapping[str, Any]
    state: dict[str, Any]
    """The flow's own, to be changed in place: plain values, at most 64 KiB as JSON. What it is as the next step is
    asked for is kept with the commit of this one, and in its checkpoint; where a flow is run again, what was kept of
    the step that it goes on behind is here with its first step. Empty in a new job."""

    def workers(self, role: str) -> int:
        """How many workers the plan in force gives a role."""
        ...

    def source(self, name: str, *, to: str, payload: Declared | None = None) -> Source:
        """A queue that the driver fills; each of its units is retained until the step that needs it commits."""
        ...

    def results(self, name: str, *, producer: str, payload: Declared | None = None) -> Results:
        """What role `producer` puts goes to the flow itself: plain values, at most 64 KiB as JSON."""
        ...

    def cycle(
        self,
        name: str,
        *,
        ask: str,
        answer: str,
        question: Declared | None = None,
        reply: Declared | None = None,
        anybody: bool = False,
    ) -> None:
        """Role `ask` asks, role `answer` answers, and the answer is the acknowledgement. Workers are pinned to each
        other by rank, as simulators and their policy are; `anybody`: each asks whoever has least to do, and keeps to
        one where it says so (Asking.ask, affinity), as agents and a pool of engines do.

        `question`, `reply`: what each of them must be, as {"obs": "float32[n, ...]", "t": "int"}
        (channels/payload_type.py says how); what is not this is refused at the call. None: anything that can be
        sent."""
        ...

    def queue(
        self,
        name: str,
        producer: str,
        consumer: str,
        *,
        rounds: bool = False,
        joins: str = "",
        together: bool = False,
        payload: Declared | None = None,
    ) -> None:
        """`rounds`: the consumer is a gang that takes micro-batches together. It ends the steps; where several do, such
        as an actor and its critic, a step commits when all of them have done their part. `joins`: another queue of the
        same consumer, whose units are handed out once this one has a unit of the same key, which then goes to the same
        worker: a unit with several inputs. `together`: units of one ticket (of several, the first that each names) go
        to one worker of the consumer while it lives, from all its queues that say so: a reward that compares the
        samples of a prompt. `payload`: as in `cycle`, of every unit."""
        ...

    def weights(self, producer: str, consumer: str) -> None:
        """The channel `weights`, from the ranks of a gang that ends steps to every worker of `consumer`."""
        ...

    def watch(self, metric: str, *, at_most: float, reason: Reason, words: str) -> None:
        """While a number of the newest step that has it is above `at_most`, or is no number, the job is Degraded for
        `reason`, which says `words` and both numbers. Steps go on."""
        ...

    async def shared(self, name: str) -> Any:
        """A fact that a role shares (`RoleContext.share`) before it is ready. To be asked for within `steps()`: before
        it no role has been started."""
        ...

    def steps(self) -> AsyncIterator[Step]:
        """Yields step n once step n - 1 - max_staleness has committed; after a restore it goes on behind the restored
        step, and ends when the last step has committed."""
        ...


FlowFunction = Callable[[Flow], Awaitable[None]]
