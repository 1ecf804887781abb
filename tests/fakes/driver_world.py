"""A whole job of ppo in memory around the real Driver: agents, workers and links are small models that a test may break
at any point. Workers keep units as the real ones do (queues.given), and run their roles' order of calls.

world = World(make_job(), seed=3)
await world.run(at={40: lambda w: w.kill("env/0")})     # between the 40th message and the next
world.committed                                         # [(branch, step, keys)], as the gang was told

One message is delivered at a time, in an order that the seed draws. Nothing waits for real time.
"""

import asyncio
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from rlinf_api import names, wire
from rlinf_api._pb.rlinf.agents.v1alpha1 import agents_pb2
from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_api.names import WorkerId
from rlinf_worker.agent.instructions import NewestPlan
from rlinf_worker.channels import messages
from rlinf_worker.channels.protocol import Item, PolicyVersion
from rlinf_worker.clock import Clock as StandingClock
from rlinf_worker.driver import status
from rlinf_worker.driver.main import FlowTask
from rlinf_worker.driver.sessions import Refuse
from rlinf_worker.uplink.outbox import Outbox
from tests.builders_driver import JOB_UID, Clock, Job
from tests.fakes.driver_roles import ROLES
from tests.fakes.driver_workers import SimWorker

TICK_S = 0.2
PATIENCE = 2000
FRAME = 4  # messages that a worker says in one go, at most
"""Ticks without a message until a job counts as stuck: twice the longest time-out of the driver."""


class SimAgent:
    """One worker pod: starts and stops models of workers, and tells the driver how they end."""

    def __init__(self, world: "World", key: tuple[str, int], *, attempt: int = 1) -> None:
        self.world, self.key, self.attempt = world, key, attempt
        self.outbox: Outbox[Any] | None = None
        self.frozen = False
        self.plan = NewestPlan()
        self.comes_now = False  # and not at a time when nothing else happens
        self.may_leave = False

    def connect(self) -> None:
        driver, outbox = self.world.driver, Outbox[Any]()
        hello = agents_pb2.Hello(
            job_uid=JOB_UID,
            pod=f"j-{self.key[0]}-{self.key[1]}-a{self.attempt}",
            pool=self.key[0],
            ordinal=self.key[1],
            attempt=self.attempt,
            protocol=names.PROTOCOL,
            highest_driver_attempt=self.world.attempt,
            workers=[agents_pb2.WorkerState(worker=w.id, attempt=w.attempt) for w in self.workers()],
            plan=agents_pb2.PlanState(
                committed_revision=self.plan.committed,
                committed_switch=self.plan.committed_switch,
                committed_plan_json=self.plan.committed_json,
            ),
        )
        try:
            driver.on_agent_hello(hello, outbox)
        except Refuse as refusal:
            if refusal.exit_code != names.EXIT_RETRYABLE:
                raise
            return
        self.outbox = outbox

    def workers(self) -> list[SimWorker]:
        return [w for w in self.world.workers.values() if w.pod == self.key]

    def tell(self, **kind: Any) -> None:
        if self.outbox is not None and self.outbox.closed is None and not self.frozen:
            self.world.driver.on_agent_message(self.key, agents_pb2.AgentMessage(**kind))

    def obey(self, message: agents_pb2.DriverMessage) -> None:
        instruction = message.instruction
        if instruction.HasField("start"):
            start = instruction.start
            role = self.world.roles[start.role]
            last = self.world.attempts.get(start.worker, 0)
            start.attempt = start.attempt if start.attempt > last else last + 1  # as agent.instructions renumbers it
            self.world.attempts[start.worker] = start.attempt
            self.world.workers[WorkerId(start.worker)] = role(self.world, start, pod=self.key)
        elif instruction.HasField("stop"):
            worker = self.world.workers.get(WorkerId(instruction.stop.worker))
            if worker is not None and worker.pod == self.key:
                self.world.kill(worker.id, exit_code=143, asked=True)
        elif instruction.HasField("leave"):
            self.may_leave = True
        elif (kind := instruction.WhichOneof("kind")) in ("prepare", "commit", "abort"):
            self.plan_word(instruction, kind)

    def plan_word(self, instruction: agents_pb2.Instruction, kind: str) -> None:
        revision, word = instruction.plan_revision, getattr(instruction, kind)
        more = {"plan_json": word.plan_json} if kind == "prepare" else {}
        answer = getattr(self.plan, kind)(revision, switch=word.switch_number, **more)
        said = f"{self.key} {kind} {revision} by {word.switch_number}: "
        self.world.log.append(said + (answer if isinstance(answer, str) else "ok"))
        if isinstance(answer, NewestPlan):
            self.plan = answer
        error = answer if isinstance(answer, str) else ""
        self.tell(result=agents_pb2.Result(instruction_id=instruction.id, ok=not error, error=error))


class World:
    roles: Mapping[str, type[SimWorker]] = ROLES

    def __init__(self, job: Job, *, seed: int = 0, checkpoints: bool = True, stands_still: bool = False) -> None:
        """`stands_still`: a jump of the clock by more than a second is a driver that did not run."""
        self.job, self.chance = job, random.Random(seed)
        self.clock = Clock()
        self._time = StandingClock(notice_s=1.0, raw=self.clock) if stands_still else self.clock
        self.attempt = 0
        self.uri = "file:///ckpt" if checkpoints else ""
        self.agents = {key: SimAgent(self, key) for key in sorted(job.placement.places())}
        self.workers: dict[WorkerId, SimWorker] = {}
        self.committed: list[tuple[int, int, tuple[str, ...]]] = []  # as rank 0 of the actor was told
        self.committed_by: dict[str, list[tuple[int, int, tuple[str, ...]]]] = {"actor": self.committed}
        self.checkpoints: list[PolicyVersion] = []
        self.parts: dict[PolicyVersion, set[str]] = {}  # of them, by the gangs that have written theirs
        self.states: dict[PolicyVersion, str] = {}  # their driver.json
        self.traces = 0  # the highest branch of which the place of checkpoints has a trace
        self.plan, self.pinned = job.plan, job.plan  # as the operator has it: in force, wanted
        self.switches = 0
        self.attempts: dict[str, int] = {}  # the last one of each worker
        self.heard: dict[Any, list[int]] = {}  # by (a rollout, an env, the number of their conversation)
        self.asked_first_in: dict[Any, int] = {}  # (an env, what it asked) -> the number of that conversation
        self.assigned: set[tuple[str, str]] = set()  # (key of a ticket, worker)
        self.held_back: set[tuple[tuple[str, int], str]] = set()  # an env and a key: its `put` has waited for room
        self.is_busy = False  # workers come back also while others have things to do
        self.operator_is_up = True
        self.disk_is_full = False  # where checkpoints go
        self.filtered: dict[str, str] = {}  # a slice's name -> the channel whose consumer drops its units
        self.coming: list[SimAgent] = []  # in the place of others that have not gone yet
        self.delivered = 0
        self.log: deque[str] = deque(maxlen=60)
        self.start_driver()

    # --- the driver -------------------------------------------------------------------------------------------------
    def start_driver(self) -> None:
        self.attempt += 1
        self.driver = self.job.driver(self._time, attempt=self.attempt, checkpoint_uri=self.uri)
        self._flow = FlowTask(self.driver)
        self.driver.on_rerun = self._flow.start
        self.driver.switch.first(self.plan, switches=self.switches)
        self.driver.settle()
        self._flow.start()

    # --- the operator -----------------------------------------------------------------------------------------------
    def pin(self, job: Job) -> None:
        """A person pins the plan of this job (of the same spec)."""
        self.pinned = job.plan

    def operate(self) -> None:
        """One pass over the driver's report: pods of both plans, then Prepare or Commit."""
        if not self.operator_is_up:
            return
        report = status.report(self.driver)
        if report.plan_revision == self.pinned.revision:
            self.plan = self.pinned
        self.switches = max(self.switches, report.plan_switches)
        pools = [pool for plan in (self.plan, self.pinned) for pool in plan.pools]
        wanted = {(pool.name, ordinal) for pool in pools for ordinal in range(pool.pods)}
        for key in sorted(wanted - self.agents.keys()):
            self.agents[key] = SimAgent(self, key)
            self.agents[key].comes_now = True
        for key in sorted(self.agents.keys() - wanted):
            agent = self.agents.pop(key)
            if agent.outbox is not None:
                self.driver.on_agent_gone(key, agent.outbox)
            for worker in [w for w in self.workers.values() if w.pod == key]:
                del self.workers[worker.id]
        revision = self.pinned.revision
        if report.plan_revision == revision or report.plan_failed == revision:
            return
        if report.plan_prepared == revision:
            self.driver.settled(self.driver.switch.commit(revision))
        elif report.plan_preparing != revision:
            self.driver.settled(self.driver.switch.prepare(self.pinned))

    def replace_driver(self, *, at_once: bool = False) -> None:
        """The old one is gone with all that was on its way to it and from it. `at_once`: the new one is there while
        payloads are still under way between workers."""
        if self._flow._task is not None:
            self._flow._task.cancel()
        for agent in self.agents.values():
            agent.outbox = None
        for worker in self.workers.values():
            worker.disconnect()
            worker.comes_now = worker.comes_now or (at_once and worker.driver_attempt > 0)
        self.start_driver()

    def stand_in(self, *away: str) -> None:
        """Others of their role have the routes of these; of nobody: each its own again."""
        self.log.append(f"-- away: {away}")
        self.driver.exchange.stand_in(frozenset(map(WorkerId, away)))

    # --- faults -----------------------------------------------------------------------------------------------------
    def kill(self, wid: str, *, exit_code: int = 137, asked: bool = False, said: str = "") -> None:
        """What it had written is lost or not, as it happens; its agent reports the end, if it is there."""
        worker = self.workers.pop(WorkerId(wid), None)
        if worker is None:
            return
        self.log.append(f"-- kill {wid} attempt {worker.attempt}")
        for other in self.workers.values():
            other.links.lost(worker.life)
        if worker.outbox is not None:
            while worker.to_driver and self.chance.random() < 0.5:
                self._to_driver(worker)
            self.driver.on_worker_gone(worker.id, worker.outbox)
        role, _, number = wid.partition("/")
        failure = agents_pb2.Failure(role=role, worker=int(number), exit_code=exit_code, reason="Exited", message=said)
        exited = agents_pb2.WorkerExited(
            worker=wid, attempt=worker.attempt, exit_code=exit_code, asked=asked, failure=failure
        )
        self.agents[worker.pod].tell(exited=exited)

    def break_stream(self, wid: str) -> None:
        """Both directions lose what was on its way; the worker connects anew."""
        worker = self.workers.get(WorkerId(wid))
        if worker is not None and worker.outbox is not None:
            self.log.append(f"-- stream of {wid} breaks")
            outbox = worker.outbox
            worker.disconnect()
            self.driver.on_worker_gone(worker.id, outbox)

    def kill_pod(self, pool: str, ordinal: int = 0) -> None:
        """Agent and all; a new pod takes its place under the next attempt."""
        old = self.agents[(pool, ordinal)]
        if old.outbox is not None:
            self.driver.on_agent_gone(old.key, old.outbox)
        old.outbox = None
        for worker in old.workers():
            self.kill(worker.id)
        self.agents[(pool, ordinal)] = SimAgent(self, old.key, attempt=old.attempt + 1)  # knows of no plan

    def evict(self, pool: str, ordinal: int = 0, *, within_s: float = 17.0) -> None:
        """Its agent is told to end; another attempt of the pod is made beside it (`successor`)."""
        self.agents[(pool, ordinal)].tell(leaving=agents_pb2.Leaving(within_s=within_s))

    def successor(self, pool: str, ordinal: int = 0, *, attempt: int = 0) -> None:
        """`attempt`: the next one, where it is not said."""
        old = self.agents[(pool, ordinal)]
        self.coming.append(SimAgent(self, old.key, attempt=attempt or old.attempt + 1))

    def _come(self) -> None:
        """Those that are welcomed take their places; who was there before has ended by then."""
        for new in list(self.coming):
            new.connect()
            if new.outbox is not None:
                self.coming.remove(new)
                for worker in self.agents[new.key].workers():
                    self.kill(worker.id, exit_code=143, asked=True)
                self.agents[new.key] = new

    # --- time -------------------------------------------------------------------------------------------------------
    async def run(self, *, at: Mapping[int, Callable[["World"], object]] | None = None) -> None:
        """To the end of the job."""
        idle = 0
        while not self.driver.job.ended.is_set():
            if at and self.delivered in at and not getattr(self, "_hit", False):
                self._hit = True
                at[self.delivered](self)
            if await self.step():
                idle = 0
                continue
            idle += 1
            assert idle < PATIENCE, self.story()
            await self.pass_time(TICK_S)
        await self._settle()
        if self._flow._task is not None and not self._flow._task.done():
            self._flow._task.cancel()

    async def run_dry(self) -> None:
        """What workers have sent each other arrives, and what they were told of routes; nothing else happens."""
        is_moving = True
        while is_moving:
            for worker in self.workers.values():
                told = worker.outbox._messages if worker.outbox is not None else deque()
                while told:
                    if (message := told.popleft()).WhichOneof("kind") in ("route", "unroute"):
                        worker.hear(message)
            for worker in self.workers.values():
                for peer in worker.links.with_frames:
                    peer.deliver()
            is_moving = any(worker.links.with_frames for worker in self.workers.values())

    def looks(self, *, for_s: float = 3600.0) -> None:
        """For what stands still; the driver has done so for this long."""
        stalls = self.driver.stalls
        stalls.tick()
        stalls.watched = (stalls.watched[0], self.clock() - for_s)
        stalls.tick()

    async def run_until(self, condition: Callable[[], bool]) -> None:
        for _ in range(100_000):
            if condition():
                return
            if not await self.step():
                await self.pass_time(TICK_S)
        raise AssertionError(self.story())

    async def pass_time(self, seconds: float) -> None:
        """No message is under way."""
        self.clock.now += seconds
        self.operate()
        self._come()
        for agent in self.agents.values():
            if agent.outbox is None:
                agent.connect()
            agent.tell(heartbeat=agents_pb2.Heartbeat())
        for worker in list(self.workers.values()):
            worker.on_time()
        self.driver.tick()
        await self._settle()

    async def _settle(self) -> None:
        """Four rounds of the loop, or as many as have something to run: nothing waits for time, or for a socket."""
        ready = asyncio.get_running_loop()._ready  # type: ignore[attr-defined]
        for _ in range(4):
            if not ready:
                return
            await asyncio.sleep(0)

    async def step(self) -> bool:
        """One message, somewhere. False where none is under way."""
        choices: list[Callable[[], None]] = []
        for agent in self.agents.values():
            if agent.outbox is None and agent.comes_now:
                choices.append(agent.connect)
            if agent.outbox is not None and agent.outbox._messages:
                choices.append(lambda a=agent: a.obey(a.outbox._messages.popleft()))  # type: ignore[misc]
        for worker in self.workers.values():
            if worker.comes_now and worker.outbox is None:
                choices.append(worker.connect)
            if worker.outbox is not None and worker.outbox._messages:
                choices.append(lambda w=worker: self._to_worker(w))  # type: ignore[misc]
            if worker.to_driver and worker.outbox is not None:
                choices.append(lambda w=worker: self._to_driver(w))  # type: ignore[misc]
            for peer in worker.links.with_frames:
                choices.append(peer.deliver)
            if worker.doing:
                choices.append(lambda w=worker: w.doing.popleft()())  # type: ignore[misc]
        if not choices:
            return False
        self.delivered += 1
        if self.chance.random() < 0.1:
            choices = [self.operate]
        self.chance.choice(choices)()
        for worker in list(self.workers.values()):
            worker.go_on()
            worker.drain()
        await self._settle()
        self._check_routes()
        return True

    def _check_routes(self) -> None:
        """What is looked at of one worker alone comes to what looking at all would."""
        if self.driver.job.declared and not self.driver.job.marks:
            exchange = self.driver.exchange
            assert exchange.routes._numbers.keys() == exchange.routes._wanted()

    def _to_worker(self, worker: SimWorker) -> None:
        assert worker.outbox is not None
        message = worker.outbox._messages.popleft()
        self.log.append(f"{worker.id} <- {str(message)[:150]!r}")
        worker.hear(message)
        while worker.first_batch > 1 and worker.outbox is not None:  # the driver's first words are one message of gRPC
            worker.first_batch -= 1
            worker.hear(worker.outbox._messages.popleft())
        worker.first_batch = 0
        if worker.outbox is not None and worker.outbox.closed is not None and not worker.outbox._messages:
            self.break_stream(worker.id)

    def _to_driver(self, worker: SimWorker) -> None:
        """As many as a frame may have."""
        left = self.chance.randint(1, min(len(worker.to_driver), FRAME))
        while left:
            left -= 1
            message = worker.to_driver.popleft()
            self.log.append(f"{worker.id} -> {str(message)[:150]!r}")
            if worker.outbox is not None and worker.outbox.closed is None and not worker.outbox.deaf:
                self.driver.on_worker_message(worker.id, message, more=left > 0)

    def welcome(self, worker: SimWorker, hello: pb.Hello) -> None:
        self.log.append(f"{worker.id} -> hello {str(hello)[:300]!r}")
        outbox = Outbox[Any]()
        try:
            self.driver.on_worker_hello(hello, outbox)
        except Refuse as refusal:
            if refusal.exit_code == names.EXIT_RETRYABLE:
                worker.away, worker.comes_now = 3, False
                return
            self.kill(worker.id, exit_code=refusal.exit_code)
            return
        worker.outbox, worker.first_batch = outbox, len(outbox._messages)

    # --- gangs ------------------------------------------------------------------------------------------------------
    def has_committed(self, role: str, version: PolicyVersion, keys: Sequence[str]) -> None:
        entered = (version.branch, version.number, tuple(sorted(keys)))
        self.committed_by.setdefault(role, []).append(entered)

    def save(self, worker: SimWorker, commit: pb.StepCommit) -> None:
        """Whoever writes the last part of a checkpoint makes it count."""
        version = messages.version_from_pb(commit.version)
        if self.disk_is_full:
            worker.checkpoints.not_saved(version, "No space left on device")
            return
        parts = self.parts.setdefault(version, set())
        parts.add(worker.role)
        if parts == set(self.driver.job.topology.gang_roles):
            self.checkpoints.append(version)
            self.states[version] = commit.state_json
            worker.checkpoints.saved(version, f"{self.uri}/{version}")

    # --- between workers --------------------------------------------------------------------------------------------
    def life(self, life: tuple[str, int]) -> SimWorker | None:
        worker = self.workers.get(WorkerId(life[0]))
        return worker if worker is not None and worker.attempt == life[1] else None

    def break_link(self, one: str, other: str, *, given_up: bool = False) -> None:
        """What is under way between two workers is lost; both make the link anew. `given_up`: only after so many dials
        that `other` has taken `one` for unreachable."""
        ends = [self.workers.get(WorkerId(name)) for name in (one, other)]
        if ends[0] is None or ends[1] is None:
            return
        self.log.append(f"-- link of {one} and {other} breaks")
        for end, far in (ends, ends[::-1]):
            end.links.broken(far.life)  # type: ignore[union-attr]
        if given_up:
            ends[1].on_unreachable(ends[1].links.peer(ends[0].life))
        for end, far in (ends, ends[::-1]):
            end.links.up(far.life)  # type: ignore[union-attr]

    def rollout_version(self) -> PolicyVersion | None:
        actor, rollout = self.workers.get(WorkerId("actor/0")), self.workers.get(WorkerId("rollout/0"))
        if rollout is None or rollout.begun is None:
            return None
        if actor is not None and actor.published is not None:
            rollout.published = max(rollout.published or actor.published, actor.published)
        return rollout.published

    # --- looking in -------------------------------------------------------------------------------------------------
    def story(self) -> str:
        """What the driver reports, its open steps and its queues; then what happened until here."""
        job, queues = self.driver.job, self.driver.exchange.queues
        seen = [str(wire.report_to_pb(status.report(self.driver)))]
        for step in job.ledger.open_steps:
            done = {gang: sorted(part.done) for gang, part in step.gangs.items()}
            seen.append(f"step {step.number}: {len(step.tickets)} tickets, done by {done}")
        seen += [f"{name}: {len(q.core.book.entries)} units, {dict(q.core.counts)}" for name, q in queues.items()]
        return "\n".join([*seen, *self.log])

    def expected(self, step: int) -> tuple[str, ...]:
        slices = int(self.driver.job.flow_settings.config["slices"])
        made = (f"env:{n}" for n in range(slices))
        return tuple(sorted(f"{name}@{step}" for name in made if name not in self.filtered))

    def together(self, item: Item, here: Sequence[Item]) -> list[Item]:
        """What a role makes units of, now that it has this; nothing: it waits for more."""
        return [item]

    def made_of(self, worker: SimWorker, items: Sequence[Item]) -> Sequence[str]:
        """The keys of what it makes of these."""
        return [items[0].key]

    def told_of(self, worker: SimWorker, items: Sequence[Item], keys: Sequence[str]) -> Any:
        """What the flow is told of these, of which units with these keys were made; None: nothing."""
        return None

    def is_dropped(self, worker: SimWorker, item: Item) -> bool:
        """Once the flow was told of it."""
        return False

    def filters(self, key: str, *, channel: str) -> bool:
        return self.filtered.get(key.partition("@")[0]) == channel


W = TypeVar("W", bound=World)


def version(message: pb.PolicyVersion) -> PolicyVersion:
    return messages.version_from_pb(message)


async def strike_at_points(
    make: Callable[[int], W], strike: Callable[[World], object], *, check: Callable[[W], None], points: int
) -> None:
    """Whole jobs of seeds 0, 1, ...: one without a fault for their length, and one struck at each of so many points."""
    whole = make(0)
    await whole.run()
    for seed, point in enumerate(range(1, whole.delivered, max(1, whole.delivered // points))):
        world = make(seed)
        try:
            await world.run(at={point: strike})
            check(world)
        except BaseException:
            print(f"seed {seed}, point {point} of {whole.delivered}")
            raise
