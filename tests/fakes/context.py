"""A RoleContext in memory: two roles run against each other in one event loop, without a runtime.

stage = Stage(config, steps=2)
env, rollout = stage.context("env"), stage.context("rollout")
stage.channel("segments").give("env:0@1", {"slice": 0}); stage.cycle("actions").questions.all
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from time import monotonic
from typing import Any

from rlinf_api.names import WorkerId
from rlinf_api.slots import Allotment
from rlinf_worker.channels.payload_type import Declared, PayloadType
from rlinf_worker.channels.protocol import ChannelClosed, Item, LineageKey, PolicyVersion, Round
from rlinf_worker.flows import ppo
from rlinf_worker.flows.ppo import check_config
from rlinf_worker.gang.steps import StepLoop
from rlinf_worker.roles.protocol import FlowSettings, Place, StepCommit, Trainer
from rlinf_worker.sums import Amount
from rlinf_worker.weights.planning import LentWeights, View

DECLARED: Mapping[str, Declared] = {
    "questions": ppo.OBSERVATION,
    "answers": ppo.ACTION,
    "trajectories": ppo.TRAJECTORY,
}


class FakeChannel:
    """Both ends of one channel; every put is an item of the other end. Remembers what became of each. What a role puts
    into a channel of flow ppo must be what that flow declares."""

    def __init__(self, name: str) -> None:
        self.name, self.micro_batch = name, 1
        self._type = PayloadType(DECLARED[name]) if name in DECLARED else None
        self.items: asyncio.Queue[Item | None] = asyncio.Queue()
        self.all: list[Item] = []
        self.acked: list[Item] = []
        self.dropped: list[tuple[Item, str]] = []
        self.kept: dict[str, Any] = {}
        self.rooms: list[int] = []
        self.parents: dict[str, list[Item]] = {}

    def give(self, key: str, payload: Any, **fields: Any) -> Item:
        known: dict[str, Any] = {"step": 1, "branch": 0, "source": WorkerId("test/0"), "version": PolicyVersion(0, 0)}
        item = Item(channel=self.name, key=LineageKey(key), payload=payload, **{**known, **fields})
        self.all.append(item)
        self.items.put_nowait(item)
        return item

    def end(self) -> None:
        self.items.put_nowait(None)

    async def put(
        self,
        payload: Any,
        *,
        key: LineageKey | str,
        step: int | None = None,
        branch: int | None = None,
        version: PolicyVersion | None = None,
        weight: float = 1.0,
        parents: Sequence[Item] = (),
    ) -> None:
        await asyncio.sleep(0)
        if parents:
            newest = max(parents, key=lambda parent: (parent.branch, parent.step))
            step = newest.step if step is None else step
            branch = newest.branch if branch is None else branch
        self.check(payload, key)
        self.parents[key] = list(parents)
        self.give(
            key, payload, step=step or 0, branch=branch or 0, version=version or PolicyVersion(0, 0), weight=weight
        )

    def check(self, payload: Any, key: str) -> None:
        if self._type is not None:
            self._type.check(payload, self.name, key)

    async def take(self) -> Item:
        item = await self.items.get()
        if item is None:
            raise ChannelClosed(self.name)
        return item

    def take_now(self) -> Item | None:
        is_end = not self.items.empty() and self.items._queue[0] is None  # type: ignore[attr-defined]
        return None if self.items.empty() or is_end else self.items.get_nowait()

    async def __aiter__(self) -> AsyncIterator[Item]:
        with contextlib.suppress(ChannelClosed):
            while True:
                yield await self.take()

    def room(self, units: int) -> None:
        self.rooms.append(units)

    async def take_batch(self, *, at_least: int = 1) -> list[Item]:
        raise AssertionError("Must not be called!")

    async def take_round(self) -> Round:
        raise AssertionError("Must not be called!")

    def ack(self, item: Item) -> None:
        self.acked.append(item)

    def keep(self, item: Item, partial: Any) -> bool:
        self.kept[item.key] = partial
        return True

    def drop(self, item: Item, reason: str) -> None:
        self.dropped.append((item, reason))


class FakeEnd:
    """One end of a cycle: it takes from one of its two channels and gives to the other."""

    def __init__(self, name: str, *, takes: FakeChannel, gives: FakeChannel) -> None:
        self.name, self._takes, self._gives = name, takes, gives

    async def ask(
        self,
        payload: Any,
        *,
        key: LineageKey | str,
        step: int,
        branch: int = 0,
        version: PolicyVersion | None = None,
        affinity: str = "",
    ) -> None:
        await asyncio.sleep(0)
        self._gives.check(payload, key)
        self._gives.give(key, payload, step=step, branch=branch, version=version or PolicyVersion(0, 0))

    def answer(self, question: Item, payload: Any, *, version: PolicyVersion | None = None) -> None:
        self._gives.check(payload, question.key)
        known = {"step": question.step, "branch": question.branch, "version": version or PolicyVersion(0, 0)}
        self._gives.give(question.key, payload, **known)

    def drop(self, question: Item, reason: str) -> None:
        self._takes.drop(question, reason)
        self._gives.give(question.key, None, step=question.step, branch=question.branch, cancelled=True)

    async def take(self) -> Item:
        return await self._takes.take()

    def take_now(self) -> Item | None:
        return self._takes.take_now()

    def __aiter__(self) -> AsyncIterator[Item]:
        return self._takes.__aiter__()


class FakeCycle:
    def __init__(self, name: str) -> None:
        at = "" if name == "actions" else f"{name}/"  # what flow ppo declares is of its own cycle
        self.questions, self.answers = FakeChannel(f"{at}questions"), FakeChannel(f"{at}answers")
        self.asking = FakeEnd(name, takes=self.answers, gives=self.questions)
        self.answering = FakeEnd(name, takes=self.questions, gives=self.answers)


class FakeWeights:
    """`show` makes a version visible to those who pull."""

    def __init__(self) -> None:
        self.version: PolicyVersion | None = None
        self._tensors: Mapping[str, Any] = {}
        self._news = asyncio.Event()
        self.pulls = 0
        self.published: list[tuple[PolicyVersion, bool]] = []
        """Each with whether it was to go as a delta."""

    def show(self, version: PolicyVersion, tensors: Mapping[str, Any]) -> None:
        self.version, self._tensors = version, tensors
        self._news.set()

    async def publish(self, version: PolicyVersion, tensors: Mapping[str, Any], *, delta: bool = False) -> None:
        self.published.append((version, delta))
        self.show(version, tensors)

    async def newer(self, than: PolicyVersion) -> PolicyVersion:
        while self.version is None or self.version <= than:
            self._news.clear()
            await self._news.wait()
        return self.version

    def select(self, view: View) -> None: ...

    async def pull(
        self, at_least: PolicyVersion, *, into: Mapping[str, Any] | None = None
    ) -> tuple[PolicyVersion, Mapping[str, Any]]:
        self.pulls += 1
        while self.version is None or self.version < at_least:
            self._news.clear()
            await self._news.wait()
        for name, target in (into or {}).items():
            target[:] = self._tensors[name]
        return self.version, self._tensors

    def lent(self, at_least: PolicyVersion) -> AbstractAsyncContextManager[LentWeights]:
        raise AssertionError(f"a role with child processes needs real memory for weights {at_least}: see weights_net")


class Stage:
    def __init__(self, *, steps: int = 2, seed: int = 3, **config: Any) -> None:
        checked = check_config({"env": "CartPole-v1", **config})
        self.flow = FlowSettings(name="ppo", steps=steps, seed=seed, max_staleness=0, order="arrival", config=checked)
        self.channels: dict[str, FakeChannel] = {}
        self.cycles: dict[str, FakeCycle] = {}
        self.weights = FakeWeights()
        self.facts: dict[str, Any] = {}

    def channel(self, name: str) -> FakeChannel:
        return self.channels.setdefault(name, FakeChannel(name))

    def cycle(self, name: str) -> FakeCycle:
        return self.cycles.setdefault(name, FakeCycle(name))

    def context(self, role: str, **config: Any) -> "FakeContext":
        return FakeContext(self, role, config)


class FakeGang:
    """Of one rank. `places`: where it has been."""

    rank, world = 0, 1

    def __init__(self) -> None:
        self.places: list[Place | None] = []

    async def form(self) -> None:
        self.places.append(None)

    async def meet(self, place: Place, value: Any = None) -> list[Any]:
        self.places.append(place)
        return [value]

    def keep(self, key: str, value: bytes) -> None:
        raise AssertionError("Must not be called!")

    async def kept(self, key: str) -> bytes:
        raise AssertionError("Must not be called!")


class FakeContext:
    rank, world, attempt = 0, 1, 1
    pool = "cpu"
    slots: tuple[int, ...] = (0,)
    devices: tuple[str, ...] = ()
    in_flight = 0

    allotment = Allotment()

    async def other_allotment(self, than: Allotment) -> Allotment:
        await asyncio.Event().wait()  # its plan never changes
        raise AssertionError("Must not be called!")

    def stages(self, cycle: str) -> int:
        return self.in_flight

    def __init__(self, stage: Stage, role: str, config: Mapping[str, Any]) -> None:
        self._stage, self.role, self.config, self.flow = stage, role, config, stage.flow
        self.worker = WorkerId(f"{role}/0")
        self.stopping, self.yield_wanted = asyncio.Event(), asyncio.Event()
        self.phases = ["load"]  # as the runtime begins
        self.worked: list[tuple[str, Amount]] = []  # of each span, what it said in its end
        self.steps: list[tuple[str, int]] = []  # of each span, the step that it is of
        self.deadlines: list[float] = []  # of spans that have one of their own
        self.gang = FakeGang()

    def channel(self, name: str) -> FakeChannel:
        return self._stage.channel(name)

    def asking(self, name: str) -> FakeEnd:
        return self._stage.cycle(name).asking

    def answering(self, name: str) -> FakeEnd:
        return self._stage.cycle(name).answering

    @property
    def weights(self) -> FakeWeights:
        return self._stage.weights

    @property
    def checkpoints(self) -> Any:
        raise AssertionError("Must not be called!")

    def share(self, name: str, value: Any) -> None:
        assert self._stage.facts.setdefault(name, value) == value

    async def shared(self, name: str) -> Any:
        async with asyncio.timeout(10):
            while name not in self._stage.facts:
                await asyncio.sleep(0)
        return self._stage.facts[name]

    async def ready(self, *, version: PolicyVersion | None = None) -> PolicyVersion:
        self.phases.append("step")
        return version or PolicyVersion(0, 0)

    async def step_done(
        self, step: int, *, branch: int, keys: tuple[str, ...], metrics: Mapping[str, float]
    ) -> StepCommit:
        raise AssertionError("Must not be called!")

    async def train(self, trainer: Trainer) -> None:
        await StepLoop(trainer, self, clock=monotonic).run()

    def phase(self, phase: str, *, deadline_s: float | None = None) -> None:
        self.phases.append(phase)

    @contextlib.contextmanager
    def span(
        self,
        kind: str,
        *,
        step: int = -1,
        phase: str | None = None,
        deadline_s: float | None = None,
        units: float = 0.0,
        tokens: float = 0.0,
    ) -> Iterator[Amount]:
        before = self.phases[-1]
        self.phases.append(phase or before)
        self.deadlines += [deadline_s] if deadline_s is not None else []
        self.steps.append((kind, step))
        amount = Amount(units, tokens)
        yield amount
        self.worked.append((kind, amount))
        self.phases.append(before)

    def moved(self) -> None: ...

    def report(self, *, step: int, metrics: Mapping[str, float], key: str = "") -> None: ...

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        yield

    async def safe_point(self, *, oldest: int | None = None) -> None: ...
