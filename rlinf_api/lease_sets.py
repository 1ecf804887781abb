"""Lease sets of a plan, expanded and checked: slots that change hands together, and the order of turns on them.

The driver calls `check_channels` apart: only the flow knows which roles a channel joins.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from rlinf_api import declared
from rlinf_api import slots as slot_ranges
from rlinf_api.declared import SlotMemory
from rlinf_api.errors import InvalidManifest
from rlinf_api.job import RLJobSpec
from rlinf_api.names import WorkerId
from rlinf_api.plan import ChannelPlan, LeaseSetPlan, RLPlanSpec
from rlinf_api.quantities import to_bytes
from rlinf_api.slots import PlacedWorker, Slot

GANG_KINDS: Final = frozenset({"fsdp"})
"""Kinds whose workers compute together. Of a user's own kinds only the flow can say so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedTurn:
    """`until_units`: of all its workers together, rounds for a gang; 0: the end of the step. `beside`: roles whose load
    fits into memory beside this one's peak."""

    role: str
    workers: tuple[WorkerId, ...]
    until_units: int = 0
    beside: frozenset[str] = field(default_factory=frozenset)

    def share_units(self, *, gang: bool) -> int:
        """What one of its workers takes in a turn. They count alone and let go together, so it is an even share."""
        return self.until_units if gang else -(-self.until_units // len(self.workers))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedSet:
    name: str
    slots: frozenset[Slot]
    turns: tuple[PlacedTurn, ...]

    @property
    def pods(self) -> frozenset[tuple[str, int]]:
        return frozenset((slot.pool, slot.ordinal) for slot in self.slots)

    @property
    def spans_pods(self) -> bool:
        return len(self.pods) > 1


def resolve(plan: RLPlanSpec, job: RLJobSpec, *, workers: Sequence[PlacedWorker]) -> tuple[PlacedSet, ...]:
    """Raises InvalidManifest that names the set, the slot or the role."""
    taken: dict[Slot, str] = {}
    found = []
    for entry in plan.lease_sets:
        what = f"plan revision {plan.revision}: lease set {entry.name!r}"
        slots = slot_ranges.expand(entry.slots)
        for slot in slots:
            _check_slot(plan, job, slot, what=what)
            if slot in taken:
                raise InvalidManifest(
                    what, got=f"slot {slot}, which is in lease set {taken[slot]!r} too", wanted="a slot in one set",
                    next="take it out of one of them",
                )  # fmt: skip
            taken[slot] = entry.name
        found.append(_resolved(plan, job, entry, frozenset(slots), workers=workers, what=what))
    _check_gangs(plan, job, workers, taken)
    return tuple(found)


def _check_slot(plan: RLPlanSpec, job: RLJobSpec, slot: Slot, *, what: str) -> None:
    pool = next((p for p in job.pools if p.name == slot.pool), None)
    pods = next((p.pods for p in plan.pools if p.name == slot.pool), 0)
    if pool is None or slot.ordinal >= pods or slot.index >= pool.slots.per_pod:
        wanted = f"ordinal below {pods} and index below {pool.slots.per_pod}" if pool is not None else "a pool's slot"
        raise InvalidManifest(what, got=f"slot {slot}, which does not exist", wanted=wanted)


def _resolved(
    plan: RLPlanSpec,
    job: RLJobSpec,
    entry: LeaseSetPlan,
    slots: frozenset[Slot],
    *,
    workers: Sequence[PlacedWorker],
    what: str,
) -> PlacedSet:
    order = [turn.role for turn in entry.turns]
    if twice := sorted({role for role in order if order.count(role) > 1}):
        raise InvalidManifest(what, got=f"role {twice[0]!r} twice in its turns", wanted="each role once")
    inside: dict[str, list[PlacedWorker]] = {role: [] for role in order}
    for worker in workers:
        within = [slot for slot in worker.slots if slot in slots]
        if not within:
            continue
        if len(within) < len(worker.slots):
            outside = next(slot for slot in worker.slots if slot not in slots)
            raise InvalidManifest(
                what, got=f"worker {worker.id} with slot {outside} outside of it", wanted="all slots of a worker in it",
                next=f"add {outside} to the set or move the worker",
            )  # fmt: skip
        if worker.role not in inside:
            raise InvalidManifest(
                what, got=f"worker {worker.id}, whose role has no turn there", wanted=f"one of {', '.join(order)}",
                next=f"add a turn of role {worker.role!r} or move the worker",
            )  # fmt: skip
        inside[worker.role].append(worker)
    if empty := [role for role, members in inside.items() if not members]:
        raise InvalidManifest(
            what, got=f"a turn of role {empty[0]!r}, which has no worker there", wanted="a worker in every turn",
            next="take the turn out or place a worker",
        )  # fmt: skip
    if not order:
        raise InvalidManifest(what, got="no turns", wanted="a turn for each role on its slots", next="write turns")
    limits = {slot: to_bytes(pool.slots.memory) for slot in slots for pool in job.pools if pool.name == slot.pool}
    entries = [worker for worker in plan.workers if worker.role in inside]
    memory, keeps = declared.by_role(entries, job), declared.kept_by_role(entries, job)
    room = min(limits.values())
    turns = [
        PlacedTurn(
            role=turn.role,
            workers=tuple(worker.id for worker in inside[turn.role]),
            until_units=turn.until.units or 0,
            beside=frozenset(role for role in order if _fits(turn.role, role, memory, keeps, limit=room)),
        )
        for turn in entry.turns
    ]
    return PlacedSet(name=entry.name, slots=slots, turns=tuple(turns))


def _fits(holder: str, comes: str, memory: Mapping[str, SlotMemory], keeps: Mapping[str, int], *, limit: int) -> bool:
    """Whether `comes` may load while `holder` works. Only where both are declared."""
    if holder == comes or holder not in memory or comes not in memory:
        return False
    peak, resident = memory[holder].peak, memory[comes].resident
    others = sum(kept for role, kept in keeps.items() if role not in (holder, comes))
    return peak > 0 and resident > 0 and peak + resident + others <= limit


def _check_gangs(plan: RLPlanSpec, job: RLJobSpec, workers: Sequence[PlacedWorker], taken: Mapping[Slot, str]) -> None:
    for role in job.roles:
        if role.kind in GANG_KINDS or declared.is_gang(role):
            check_gang(role.name, workers, taken, what=f"plan revision {plan.revision}")


def check_gang(role: str, workers: Sequence[PlacedWorker], taken: Mapping[Slot, str], *, what: str) -> None:
    """All ranks of a gang hold, and let go, together."""
    where = {taken.get(worker.slots[0], ""): worker.id for worker in workers if worker.role == role}
    if len(where) > 1:
        first, second = sorted(where)[:2]
        named = [f"{where[name]} in " + (f"lease set {name!r}" if name else "none") for name in (first, second)]
        raise InvalidManifest(
            f"{what}: gang {role!r} does not lie in one lease set", got=" and ".join(named),
            wanted="all of its workers in one", next="put its slots into one set, or take all of them out",
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What was seen of a queue's units so far: the largest, and of the steps that had most how many and how much. 0:
    nothing yet."""

    largest_bytes: int = 0
    step_units: int = 0
    step_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredQueue:
    """A queue as the flow declares it. `ranks`: of a consumer that takes rounds, else 0; `producers`: workers among
    whom its capacity is shared out."""

    channel: str
    producer: str
    consumer: str
    ranks: int = 0
    producers: int = 1
    measured: Measured = field(default_factory=Measured)


def check_channels(
    sets: Iterable[PlacedSet], channels: Mapping[str, ChannelPlan], queues: Iterable[DeclaredQueue], *, revision: int
) -> None:
    """Rule (a) of turns. A queue between roles of one set must hold what a whole turn makes, or the turn could not end
    where the plan says; and a whole round, or the consumer's turn would find none. As far as units have been seen: no
    plan says how large they are, nor how many a step makes. One unit of any size always finds room
    (queues/shelf.py)."""
    found = list(queues)
    for lease in sets:
        turns = {turn.role: turn for turn in lease.turns}
        for queue in found:
            if queue.producer in turns and queue.consumer in turns and queue.channel in channels:
                where = f"plan revision {revision}: channel {queue.channel!r} within lease set {lease.name!r}"
                _check_queue(queue, channels[queue.channel], turns[queue.producer], what=f"{where} is too small")


def _check_queue(queue: DeclaredQueue, channel: ChannelPlan, maker: PlacedTurn, *, what: str) -> None:
    seen, here, all_of_them = queue.measured, len(maker.workers), max(queue.producers, len(maker.workers))
    made = maker.share_units(gang=False) * here or -(-seen.step_units * here // all_of_them)
    turn = f"a turn of {maker.role!r}" + (f", until {maker.until_units} units" if maker.until_units else ", of a step")
    takes = f"a round of {channel.micro_batch} units for {queue.ranks} ranks"
    shared = -(-made * all_of_them // here)  # each producer has its share of the channel
    for need, why in ((shared, turn), (channel.micro_batch * queue.ranks, takes)):
        if channel.capacity.units < need:
            raise InvalidManifest(
                what, got=f"capacity.units {channel.capacity.units}", wanted=f"at least {need}: {why}",
                next="raise capacity.units or shorten the turn",
            )  # fmt: skip
    made_bytes = made * seen.largest_bytes if maker.until_units else seen.step_bytes * here // all_of_them
    need_bytes = -(-made_bytes * all_of_them // here)
    if to_bytes(channel.capacity.bytes) < need_bytes:
        raise InvalidManifest(
            what, got=f"capacity.bytes {channel.capacity.bytes}",
            wanted=f"at least {need_bytes}: {turn}, makes {made_bytes} bytes, as measured so far",
            next="raise capacity.bytes or shorten the turn",
        )  # fmt: skip
