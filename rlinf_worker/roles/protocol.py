"""What a role is, and what it is given: the seam between a role's loop and the runtime of its worker.

A role is a class without constructor arguments; the runtime makes one per worker process and calls `run` once, in the
worker's event loop. The role opens its channels by the names that the flow gave them and works until `run` returns (its
inputs ended or `ctx.stopping` was set) or raises: UserError ends the job with its sentence (but not before `ready` in a
job that has begun: there it worked before), anything else is the worker's death, after which the driver starts the next
attempt.

    class Echo:
        async def run(self, ctx: RoleContext) -> None:
            await ctx.ready()
            questions, answers = ctx.channel("questions"), ctx.channel("answers")
            async for item in questions:
                with ctx.span("compute", step=item.step):
                    reply = item.payload
                await answers.put(reply, key=item.key, step=item.step, to=item.source)
                questions.ack(item)
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from rlinf_api.names import WorkerId
from rlinf_api.slots import Allotment
from rlinf_worker.channels.protocol import Channel, Item, LineageKey, PolicyVersion, Round
from rlinf_worker.checkpoints.store import Checkpoint, Checkpoints
from rlinf_worker.cycles.protocol import Answering, Asking
from rlinf_worker.sums import Amount
from rlinf_worker.weights.planning import LentWeights, View

Phase = Literal["start", "load", "compile", "ready", "step", "idle", "stop"]
Place = tuple[int, int, int]
"""Where ranks meet: branch, step, and what in it: greater than the place before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowSettings:
    """The flow's part of the job, the same in every worker. `config` has been checked by the flow, with defaults."""

    name: str
    steps: int
    seed: int
    max_staleness: int
    order: Literal["arrival", "lineage"]
    config: Mapping[str, Any]
    model: str = ""  # spec.model.path
    train_data: str = ""  # spec.data.train
    eval_data: str = ""  # spec.data.eval

    def to_json(self) -> str:
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return json.dumps({**fields, "config": dict(self.config)})

    @classmethod
    def from_json(cls, text: str) -> FlowSettings:
        return cls(**json.loads(text))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCommit:
    """The driver's word that a step counts: what the weights are called now, and whether to write a checkpoint."""

    step: int
    version: PolicyVersion
    checkpoint: bool
    state_json: str  # driver.json, to be stored with the checkpoint
    last: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerStep:
    """This rank's part of one step's data. A unit is one item of each of the trainer's inputs, in their order; units
    are in the order of lineage, however they came."""

    number: int
    branch: int
    units: tuple[tuple[Item, ...], ...]

    @property
    def payloads(self) -> list[Any]:
        """What the units of the first input carry."""
        return [unit[0].payload for unit in self.units]


class Trainer(Protocol):
    """What one rank of a gang that ends steps computes. `await ctx.train(trainer)` runs it through the step loop
    (gang/steps.py), which owns all the rest: rounds, commits, publishing, acknowledging, checkpoints. The loop calls,
    in the role's own task and on every rank in the same order unless said:

        build ── read, restore ───────────┬─ weights ── take, take, ... train ── weights, committed ── state, write ──┐
              where there is a checkpoint └────────────────────── step after step ───────────────────────────────────┘

    A class that inherits from it gets what is given here; `build` and `train` it has to have."""

    inputs: Sequence[str] = ()
    """Channels of the flow: rounds come by the first one, of the others what belongs to each unit. Set in `build` at
    the latest."""
    holds_collectives: bool = True
    """`restore`, `train` and `state` wait for the other ranks with the event loop blocked, as torch's collectives do:
    all ranks meet before each of them."""
    sharded: bool = False
    """Each rank keeps a shard, and no rank has the whole: `state` is this rank's, as a copy; `write` is called on every
    rank, beside the steps that follow; `read_shards` takes the place of `read` and `restore`."""
    delta: bool = False
    """As `Weights.publish` has it."""
    failures: tuple[type[Exception], ...] = ()
    """What `write` raises, besides OSError, where the place takes no file."""

    async def build(self, ctx: RoleContext) -> None:
        """Makes what is trained. The gang is formed, the role has its turn."""
        ...

    def read(self, folder: Path) -> Any:
        """The state that `write` put there. On rank 0; on every rank where there are no collectives to spread it by.
        Called in a thread, with time by the size of the files. Raises UserError where it does not fit."""
        return None

    def restore(self, state: Any) -> None:
        """`state`: what `read` returned; None on ranks that have not read."""
        return

    def read_shards(self, saved: Checkpoint) -> None:
        """Where it is sharded, on every rank: what this rank keeps, of the files of all that wrote, who may have been
        more or fewer. Called in a thread; what `saved.open` gives counts as work that moves. Raises UserError where it
        does not fit."""
        return

    async def take(self, part: Round) -> None:
        """Some units of the step have come. For who need not wait for all of them; they come again in `train`."""
        return

    async def train(self, step: TrainerStep) -> Mapping[str, float]:
        """The update, in a span of its own. Returns the step's numbers. What it changes is shown to nobody before all
        ranks are through."""
        ...

    def weights(self, version: PolicyVersion) -> Mapping[str, Any] | None:
        """What this rank publishes as `version`; views, which are copied. Empty: another rank has it whole. None: there
        are none."""
        return None

    async def committed(self, version: PolicyVersion, *, publish_s: float) -> None:
        """A step counts, and its weights are published: what is done here is counted as a part of that."""
        return

    def state(self) -> Any:
        """All that a checkpoint keeps, on rank 0; or this rank's own."""
        return None

    def write(self, folder: Path, state: Any) -> None:
        """Rank 0, or every rank: into an empty folder of its own; called again, with another, where the first was full.
        In a thread beside the event loop. All ranks' files come into one folder: two have two names. Where ranks wait
        for each other in it, by a process group that `train` does not use."""
        return


class Weights(Protocol):
    """Publish and pull of policy weights over the channel `weights`."""

    @property
    def version(self) -> PolicyVersion | None:
        """The version of the weights last pulled or published here."""
        ...

    async def publish(self, version: PolicyVersion, tensors: Mapping[str, Any], *, delta: bool = False) -> None:
        """The producing gang, after Begin and after every commit: rank 0 with whole tensors, or every rank with its
        own shards (a torch DTensor, or weights.tensors.Shard). Copies, and returns when every receiver that has
        subscribed has confirmed it; one that comes later is served from the copy. `delta`: receivers are sent only
        the blocks that differ from the version that they have. Never twice with different bytes (InvariantBroken),
        nor with other names, shapes or dtypes than before (SchemaChanged, also where a receiver says so)."""
        ...

    async def newer(self, than: PolicyVersion) -> PolicyVersion:
        """Receiver, in a task that races it against its work: returns once `pull` has a version above `than` at once,
        whatever turn it is. Raises SchemaChanged; ChannelClosed as the worker stops. Cancel it at will."""
        ...

    def select(self, view: View) -> None:
        """Receiver, before the first pull: only its shards are wanted. Without it, all tensors whole."""
        ...

    async def pull(
        self, at_least: PolicyVersion, *, into: Mapping[str, Any] | None = None
    ) -> tuple[PolicyVersion, Mapping[str, Any]]:
        """Receiver: the newest complete, checksum-verified version that is >= at_least; waits for it. The arrays are
        the memory that was received into; they stay as they are for as long as they live. `into`: tensors, on any
        device, that are set to it, all or none (SchemaChanged names the first ten differences)."""
        ...

    def lent(self, at_least: PolicyVersion) -> AbstractAsyncContextManager[LentWeights]:
        """Receiver, as pull: for child processes of this worker, which set their own tensors from where the version
        lies (weights.lending.BorrowedWeights). It lies there until the block is left, which waits for no child."""
        ...


class Gang(Protocol):
    """The ranks of this worker's role, where the flow makes it a gang; with one rank, all of it returns at once. Every
    rank comes to the same places in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def world(self) -> int: ...

    async def form(self) -> None:
        """As the role loads, before anything else of it: waits until all ranks are there, under the next roster."""
        ...

    async def meet(self, place: Place, value: Any = None) -> list[Any]:
        """Returns when every rank has come to `place`, beside the event loop meanwhile: before anything that holds
        collectives. Returns what all ranks have brought, in their order; a value is plain (JSON, or bytes) and small.
        Raises WorkerUnreachable, DeadlineExceeded."""
        ...

    def keep(self, key: str, value: bytes) -> None:
        """For all ranks, under this roster; of a key that no other rank keeps."""
        ...

    async def kept(self, key: str) -> bytes:
        """What some rank keeps; waits for it. Raises WorkerUnreachable, DeadlineExceeded."""
        ...


class RoleContext(Protocol):
    """Everything a role may touch. One per worker process; methods are called from the role's own task unless said.

    An engine that computes beside the loop races its work against what may come meanwhile, each in a task of its own:

        news = {asyncio.ensure_future(event) for event in (
            engine.finished(), ctx.weights.newer(held), ctx.yield_wanted.wait(), ctx.stopping.wait())}
        await asyncio.wait(news, return_when=asyncio.FIRST_COMPLETED)

    None of these is a wait in the runtime's sense: they are no safe points, and a role that does nothing else, outside
    a span, is stuck. What has been served is no event any more; looked at again too often, nothing happens."""

    worker: WorkerId
    role: str
    rank: int
    attempt: int
    pool: str
    slots: tuple[int, ...]  # its pod's
    devices: tuple[str, ...]  # UUIDs of the GPUs of its slots, in their order, which CUDA calls 0, 1, ... here
    config: Mapping[str, Any]  # the role's config
    flow: FlowSettings
    stopping: asyncio.Event  # set once; finish at the next safe point

    @property
    def yield_wanted(self) -> asyncio.Event:
        """Set while the next safe point ends the turn, as somebody waits for the slots."""
        ...

    @property
    def allotment(self) -> Allotment:
        """What the plan gives this worker besides `slots`, whose number is an engine's tensor-parallel size: memory, KV
        bytes, a way of working. Another plan may change it, at a step boundary: before anything of the next step."""
        ...

    async def other_allotment(self, than: Allotment) -> Allotment:
        """In a task that races it, as `Weights.newer`: returns what the plan gives once it is not `than`. A role that
        cannot change to it in place raises RetryableError with the reason, and its next life begins with it."""
        ...

    @property
    def world(self) -> int:
        """Workers of this role. Of a gang it never changes while a worker lives; else another plan may change it,
        at a step boundary."""
        ...

    def stages(self, cycle: str) -> int:
        """Sub-batches that this worker may have in flight in a cycle; 0: as many as it has. Another plan may change it,
        at a step boundary."""
        ...

    def channel(self, name: str) -> Channel:
        """The end that this role has of a queue of the flow. Unknown name: UserError that lists the known ones."""
        ...

    def asking(self, name: str) -> Asking:
        """The end of a cycle in which this role asks."""
        ...

    def answering(self, name: str) -> Answering:
        """The end of a cycle in which this role answers."""
        ...

    @property
    def weights(self) -> Weights: ...

    @property
    def checkpoints(self) -> Checkpoints: ...

    @property
    def gang(self) -> Gang: ...

    def share(self, name: str, value: Any) -> None:
        """Tells every role a small plain (JSON) value that only this one knows, e.g. the shape of its observations.
        Sharing the same name with another value is a UserError: the job would train on a mixture. So is more than 1 MiB
        of all roles together: each worker that comes is told all of it."""
        ...

    async def shared(self, name: str) -> Any:
        """Waits for a value that another role shares; for use before `ready`."""
        ...

    async def ready(self, *, version: PolicyVersion | None = None) -> PolicyVersion:
        """Loaded; may work. Waits for the driver's Begin and returns what the weights are called: (0, 0) on a new job,
        a new branch after a restore. `version`: of the checkpoint that was loaded, if any. Before it no channel may be
        used but weights: nothing comes until every role is ready."""
        ...

    async def step_done(
        self, step: int, *, branch: int, keys: tuple[str, ...], metrics: Mapping[str, float]
    ) -> StepCommit:
        """Every rank of a gang that ends steps, after its optimizer step; waits for all. Only after this returns may
        the new weights be shown to anybody or the units be acknowledged."""
        ...

    async def train(self, trainer: Trainer) -> None:
        """The whole work of a role that ends steps, from its load until it is stopped."""
        ...

    def phase(self, phase: Phase, *, deadline_s: float | None = None) -> None:
        """Declares what the worker does and until when it must next show life. Default deadlines are settings. Not
        needed for what is `load` until `ready`, `step` after it, or in a span that says so."""
        ...

    def span(
        self,
        kind: Literal["compute", "load", "offload", "weights", "comm", "other"],
        *,
        step: int = -1,
        phase: Phase | None = None,
        deadline_s: float | None = None,
        units: float = 0.0,
        tokens: float = 0.0,
    ) -> AbstractContextManager[Amount]:
        """Times a piece of work for timeline, metrics and profile. Waits on channels are timed by the channels. While
        it is open the worker is in `phase`; without it, `compute` is `step`, `load` and `offload` are `load`, and the
        others leave it as it is. Of several the one with the latest deadline holds. `deadline_s`: for a piece that
        takes longer than its phase's. A worker whose work does not move until then is named, and killed: see
        docs/recovery.md. `units`: of the role's inputs that are worked on; `tokens`: a finer measure of its own, such
        as tokens of a text. From both a profile has how long how much takes (docs/profile.md). Who knows them in the
        end only sets them there: `with ctx.span("compute", units=8) as amount: ...; amount.tokens = 4096`."""
        ...

    def moved(self) -> None:
        """Work has moved that the runtime does not see: tokens, steps of an engine. Not needed for spans, units and
        weights. Costs nothing."""
        ...

    def report(self, *, step: int, metrics: Mapping[str, float], key: LineageKey | str = "") -> None:
        """Numbers of one step for metrics.jsonl: summed over workers where the name ends in `_sum` or `_count`, last
        value otherwise. `key`: of the unit that they are of. A unit that is lost is made again and reported again, by
        this worker or another, and counts once; numbers without a key count each time. Those of steps that are void as
        the job goes back to a checkpoint do not. Never blocks."""
        ...

    def turn(self) -> AbstractAsyncContextManager[None]:
        """Holding the worker's slots. Where the plan has no lease set over them, entered at once; else entered when the
        worker's gang holds the set, the role loaded. Leaving it ends the turn, the role offloaded. Not nested."""
        ...

    async def safe_point(self, *, oldest: int | None = None) -> None:
        """Inside `turn()`: here the role may be offloaded. Where the turn is to end it is, and this returns in the next
        turn, the role loaded again; where not, it returns at once. To be called between pieces of work (engine steps,
        optimizer steps), never inside a collective, and by every rank of a gang at the same place of its program. A
        wait for an item, for room in a channel, for weights, facts or the driver's word is a safe point too: a role
        whose input is empty gives its slots to one that has work. So a role that works in a task of its own while
        another task waits keeps a span open.

        `oldest`: the step of the oldest work that is under way, of a role that takes units of a newer step before those
        of an older one are finished. A turn that ends with a step then goes on until nothing of the step is left;
        whoever waits for it would have the slots, and not the units."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of a role on its slots. `now`: measured at this moment. `resident`, `peak`: of the loaded role when idle
    and at most, `peak` with `resident` included; 0: not known."""

    now: int
    resident: int = 0
    peak: int = 0


@runtime_checkable
class Offloadable(Protocol):
    """A role that can leave its slots and come back. Called by the worker's runtime, never by the role, and never while
    the role is between two safe points: `load` on a grant, `offload` on a release. Both may come before `run` has
    built anything: then there is nothing to move. A raise of either is the worker's death."""

    def memory(self) -> Memory: ...

    async def load(self) -> None:
        """Everything back on the slots. Called on a loaded role too, where it changes nothing."""
        ...

    async def offload(self) -> None:
        """Everything off the slots, the storage freed: `memory().now` falls to what must stay."""
        ...


@runtime_checkable
class Probed(Protocol):
    """A role with an engine that can die or hang while its event loop lives: child processes, threads, a device."""

    async def check_health(self) -> None:
        """Called by the worker's runtime in a task of its own every few seconds (`probe_interval_s`) while the role is
        ready or works, one at a time. Returns once the engine itself has answered; raises what is wrong with it. Either
        a raise, or no answer within `probe_deadline_s`, is the worker's death with that sentence. Cancelled at will."""
        ...


class Movable(Protocol):
    """What moves a role's tensors: algorithms/offloading.py's HostCopy. Named here, where no torch is imported, as a
    rollout on a CPU does without."""

    def bytes_now(self) -> int: ...

    def offload(self) -> None: ...

    def load(self) -> None: ...


class Offloads:
    """The body of Offloadable for roles whose state is torch tensors. `host` is set once there is something to move.
    Copies run beside the event loop: the agent goes on hearing from us while 80 GB move."""

    host: Movable | None = None

    def memory(self) -> Memory:
        return Memory(now=self.host.bytes_now() if self.host is not None else 0)

    async def load(self) -> None:
        if self.host is not None:
            await asyncio.to_thread(self.host.load)

    async def offload(self) -> None:
        if self.host is not None:
            await asyncio.to_thread(self.host.offload)


class Role(Protocol):
    async def run(self, ctx: RoleContext) -> None: ...


@runtime_checkable
class Warmable(Protocol):
    """A role that can do some of its load before it has a place."""

    def warm(self, flow: FlowSettings, config: Mapping[str, Any]) -> None:
        """Called once before `run`, in a warm spare only (spec.roles[].spares), in a thread beside the event loop;
        `run` may begin hours later. For what needs neither peers, slots nor an accelerator, and is the same for every
        worker of the role: imports that `run` does late, environments, first uses of a library that cost seconds. A
        failure ends the spare, never the job."""
        ...
