"""Who holds a lease set, as a value: `step(lease, state, event) -> (state, actions)`. No process, no clock, no socket.

Driven by arbiter.py, for agents (sets inside one pod) and the driver (sets over pods), and by the exhaustive explorer
of tests/unit/rlinf_worker/turns/test_model.py. Not for: how a worker loads, freezes and offloads (turns/worker.py).

    free --GRANT--> HOLDS --(YIELD: somebody waits)--> frozen at a safe point: IDLE or DUE --OFFLOAD--> off the slots
                      ^ |                                  |                                             ^
                      | +--(FINISH, LEAVE: he is ready)----|---> LEAVES by itself -----------------------+
                      +---------------RESUME---------------+  work has come (MORE), or nobody else wants the slots

The rule, as DESIGN.md numbers it ((a) is a check of the plan, rlinf_api.lease_sets):
(b) a turn ends early only when every worker of the role is frozen at the same time, idle or due; one alone never does;
(c) a role that gave its turn back because it was idle waits until its channel has filled or drained to a quarter
    (`ripe`), or nobody can fill it any more, or its patience is over;
(d) two turns in a row without an item are said aloud;
(f) who is on the slots out of turn, as it had them before a plan put them into this set, is told to leave at its next
    pause, and nobody is let load until it has;
(e) who works on for `turn_most_s` while another wants the slots is told that its turn is over.

A worker has at most one order on its way; what it says before it has answered is of the past and ignored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final


class Standing(StrEnum):
    """What a worker last said of itself, or what became of it."""

    AWAY = "away"  # no process, or one that has not spoken yet
    CONTENT = "content"  # off the slots, nothing to do
    WANTS = "wants"  # off the slots, has work
    HOLDS = "holds"  # on the slots: loads or works
    IDLE = "idle"  # on the slots, frozen: its input is empty or its output full
    MORE = "more"  # frozen, but what it waited for has come
    DUE = "due"  # frozen: the units of its turn are done, or the step has ended
    LEAVES = "leaves"  # frozen, and offloads without being asked, as it was told to


ON_SLOTS = frozenset({Standing.HOLDS, Standing.IDLE, Standing.MORE, Standing.DUE, Standing.LEAVES})
FROZEN = frozenset({Standing.IDLE, Standing.DUE})
ENDED = frozenset({Standing.DUE, Standing.LEAVES})  # one of a gang that says so ends the turn for all


class Kind(StrEnum):
    GRANT = "grant"  # load and work
    YIELD = "yield"  # somebody waits: freeze when idle, and say so
    FINISH = "finish"  # he is ready: as yield, and leave without a further word once the turn is due
    LEAVE = "leave"  # as finish, and once idle too: to a worker that is its role's only one here
    END = "end"  # its turn is due, whatever is left of it: as finish, from its next safe point on
    RESUME = "resume"  # work on
    OFFLOAD = "offload"  # leave the slots; answered when the memory has been freed
    PRELOAD = "preload"  # load, but do not work yet: the holder's last work leaves room


_TOLD: Final = {None: 0, Kind.YIELD: 1, Kind.FINISH: 2, Kind.LEAVE: 3, Kind.END: 4}  # what includes what

KILL: Final = "kill"
"""The driver says it to an agent, beside these kinds: it has waited for this worker long enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    role: str
    workers: tuple[str, ...]
    gang: bool = False  # its workers want, hold and leave together
    fed_inside: bool = False  # only roles of this set fill its inputs
    beside: frozenset[str] = frozenset()  # roles that may load while this one works: their memory fits beside its peak
    until_units: int = 0  # for the workers: they count themselves; 0: the end of the step


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseSet:
    """One lease set of a plan."""

    name: str
    turns: tuple[Turn, ...]

    def turn_of(self, worker: str) -> int:
        return next(i for i, turn in enumerate(self.turns) if worker in turn.workers)

    @property
    def workers(self) -> tuple[str, ...]:
        return tuple(worker for turn in self.turns for worker in turn.workers)


@dataclass(frozen=True, slots=True)
class Member:
    standing: Standing = Standing.AWAY
    ripe: bool = True
    asked: Kind | None = None  # an order that it has not answered
    told: Kind | None = None  # how it was told that somebody waits
    loaded: bool = False  # by PRELOAD
    killed: bool = False

    @property
    def on_slots(self) -> bool:
        return self.standing in ON_SLOTS or self.asked is Kind.GRANT

    @property
    def wants(self) -> bool:
        return self.standing is Standing.WANTS and not self.killed and self.asked in (None, Kind.PRELOAD)


@dataclass(frozen=True, slots=True)
class State:
    """`at`: the turn that is, or was last. `yielding`: the holders are told that somebody waits. `leaving`: all were
    frozen, or one leaves by itself; the turn ends."""

    members: tuple[tuple[str, Member], ...]
    at: int = -1
    holding: bool = False
    yielding: bool = False
    leaving: bool = False
    next: int = -1  # loads already, and is to be granted
    impatient: bool = False  # an unripe role has waited long enough
    items: bool = False  # this turn has had one
    flowed: bool = False  # some turn has
    empty: int = 0  # turns in a row without

    def __getitem__(self, worker: str) -> Member:
        return dict(self.members)[worker]

    def but(self, worker: str, **changes: object) -> State:
        members = tuple(
            (name, replace(m, **changes) if name == worker else m)  # type: ignore[arg-type]
            for name, m in self.members
        )
        return replace(self, members=members)


def fresh(lease: LeaseSet) -> State:
    return State(members=tuple((worker, Member()) for worker in lease.workers))


def rebuilt(lease: LeaseSet, standings: Mapping[str, Standing], asked: Mapping[str, Kind]) -> State:
    """The state that follows from what workers are known to do, and from orders that are on their way to them: for a
    new driver, and where another plan changes a set under way."""
    state = fresh(lease)
    for worker in lease.workers:
        order = asked.get(worker)
        state = state.but(
            worker,
            standing=standings.get(worker, Standing.AWAY),
            asked=order,
            told=order if order in _TOLD else None,
            loaded=order is Kind.PRELOAD,
        )
    held = [lease.turn_of(worker) for worker, member in state.members if member.on_slots]
    if not held:
        return state
    leaving = any(m.standing is Standing.LEAVES or m.asked is Kind.OFFLOAD for _, m in state.members if m.on_slots)
    return replace(state, at=held[0], holding=True, leaving=leaving)


# --- events -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Said:
    """`answers`: the order on its way had been obeyed when this was said. `items`: some since its last word."""

    worker: str
    standing: Standing
    ripe: bool = True
    items: bool = False
    answers: bool = True


@dataclass(frozen=True, slots=True)
class Gone:
    """Its process tree is reaped and its memory seen to be free."""

    worker: str


class Late(StrEnum):
    RELEASE = "release"  # who should have answered by now is killed
    PATIENCE = "patience"
    TURN = "turn"  # the holders have worked on for long enough while somebody waits


Event = Said | Gone | Late


# --- actions ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Order:
    worker: str
    kind: Kind
    yielding: bool = False


@dataclass(frozen=True, slots=True)
class Kill:
    worker: str


@dataclass(frozen=True, slots=True)
class Warn:
    """(d): what the roles of the set do, in words."""

    text: str


Action = Order | Kill | Warn


def step(lease: LeaseSet, state: State, event: Event) -> tuple[State, list[Action]]:
    """Total: an event that means nothing changes nothing."""
    actions: list[Action] = []
    match event:
        case Said():
            state = _said(lease, state, event)
        case Gone(worker):
            members = tuple((name, Member() if name == worker else member) for name, member in state.members)
            state = replace(state, members=members)
        case Late.RELEASE:
            for worker in late(state):
                state = state.but(worker, killed=True)
                actions.append(Kill(worker))
        case Late.PATIENCE:
            state = replace(state, impatient=True)
        case Late.TURN:
            for worker in lingering(lease, state):
                state = _ask(state, actions, worker, Kind.END)
    while (settled := _settle(lease, state, actions)) != state:
        state = settled
    return state, actions


def _said(lease: LeaseSet, state: State, said: Said) -> State:
    member = state[said.worker]
    if said.items:
        state = replace(state, items=True, flowed=True)
    if member.killed or (member.asked is not None and not said.answers):
        return state
    if said.standing is Standing.LEAVES and lease.turn_of(said.worker) == state.at:
        state = replace(state, leaving=True)
    loaded = member.loaded and said.standing not in ON_SLOTS and member.asked is not Kind.OFFLOAD
    return state.but(said.worker, standing=said.standing, ripe=said.ripe, asked=None, loaded=loaded)


def late(state: State) -> list[str]:
    """Who is to be killed when the deadline is over: an order that only a hung worker leaves unanswered (a frozen or a
    waiting worker's loop is free), an offload that does not end, or work on where the turn has ended: by another of its
    role, or as it was told so."""
    ended = state.leaving or any(m.standing in ENDED for _, m in state.members)
    return [
        worker
        for worker, m in state.members
        if not m.killed
        and (
            m.asked in (Kind.GRANT, Kind.RESUME, Kind.OFFLOAD)
            or m.standing is Standing.LEAVES
            or ((ended or m.told is Kind.END) and m.standing is Standing.HOLDS)
        )
    ]


def lingering(lease: LeaseSet, state: State) -> list[str]:
    """Who works on though another could have the slots at once, or out of turn while anybody wants them; also one that
    has not answered yet that somebody waits: its loop is busy, or the word never came to it."""
    if not state.holding or state.leaving:
        return []
    wanted = list(_candidates(lease, state))
    has_rival, late = any(i != state.at for i in wanted), any(m.wants for _, m in _holders(lease, state))
    return [
        worker
        for worker, m in state.members
        if m.standing is Standing.HOLDS
        and m.asked in _TOLD
        and not m.killed
        and m.told is not Kind.END
        and (has_rival or (late and lease.turn_of(worker) != state.at))
    ]


def is_patience_needed(lease: LeaseSet, state: State) -> bool:
    """Somebody unripe waits while nobody uses the slots."""
    if state.impatient or state.leaving:
        return False
    in_use = state.holding and not _all_frozen(lease, state)
    return not in_use and any(m.wants and not m.ripe for _, m in state.members)


# --- what follows from a state ----------------------------------------------------------------------------------------
def _settle(lease: LeaseSet, state: State, actions: list[Action]) -> State:
    if not state.holding:
        on_slots = next((worker for worker, m in state.members if m.on_slots), None)
        if on_slots is not None:  # it held the slots before they were in a lease set
            return replace(state, at=lease.turn_of(on_slots), holding=True, yielding=False, leaving=False)
        return _free(lease, state, actions)
    if not any(m.on_slots for _, m in _holders(lease, state)):
        return _turn_over(lease, state, actions)
    state = _out_of_turn(lease, state, actions)
    return _leave(lease, state, actions) if state.leaving else _held(lease, state, actions)


def _holders(lease: LeaseSet, state: State) -> list[tuple[str, Member]]:
    return [(worker, state[worker]) for worker in lease.turns[state.at].workers]


def _all_frozen(lease: LeaseSet, state: State) -> bool:
    on_slots = [m for _, m in _holders(lease, state) if m.on_slots]
    frozen = [m.standing in FROZEN and m.asked is None and not m.killed for m in on_slots]
    return bool(on_slots) and all(frozen)


def _ask(state: State, actions: list[Action], worker: str, kind: Kind) -> State:
    actions.append(Order(worker, kind, state.yielding))
    member = state[worker]
    standing = Standing.HOLDS if kind is Kind.RESUME else member.standing
    loaded = member.loaded or kind is Kind.PRELOAD
    told: Kind | None = kind
    if kind not in _TOLD:
        before = member.told if kind is Kind.RESUME else None
        told = (before or Kind.YIELD) if state.yielding else None
    return state.but(worker, asked=kind, standing=standing, told=told, loaded=loaded)


def _tell(lease: LeaseSet, state: State, rivals: list[int], actions: list[Action]) -> State:
    """The holders that somebody waits: where he is ready, they leave by themselves, which saves the way to here and
    back. One that may be idle while another of its role works waits for word all the same (b)."""
    ready = any(_is_ripe(lease, state, i, nobody_works=True) for i in rivals)
    alone = len(lease.turns[state.at].workers) == 1
    kind = Kind.YIELD if not ready else Kind.LEAVE if alone else Kind.FINISH
    for worker, member in _holders(lease, state):
        if member.standing is Standing.HOLDS and member.asked is None and _TOLD[kind] > _TOLD[member.told]:
            state = _ask(state, actions, worker, kind)
    return state


def _turn_over(lease: LeaseSet, state: State, actions: list[Action]) -> State:
    empty = 0 if state.items or not state.flowed else min(2, state.empty + 1)
    if empty == 2 and state.empty == 1:
        said = "; ".join(f"{worker} {m.standing}" + ("" if m.ripe else ", unripe") for worker, m in state.members)
        actions.append(Warn(f"two turns in a row of lease set {lease.name!r} passed without an item: {said}"))
    return replace(state, holding=False, yielding=False, leaving=False, items=False, empty=empty)


def _candidates(lease: LeaseSet, state: State) -> Iterator[int]:
    """Turns whose roles want the slots, the next in the plan's order first."""
    count = len(lease.turns)
    for i in sorted(range(count), key=lambda i: (i != state.next, (i - state.at - 1) % count)):
        wants = [state[worker].wants for worker in lease.turns[i].workers]
        if all(wants) if lease.turns[i].gang else any(wants):
            yield i


def _is_ripe(lease: LeaseSet, state: State, i: int, *, nobody_works: bool) -> bool:
    """(c): `nobody_works` means that no role of this set adds to any channel now."""
    turn = lease.turns[i]
    ripe = [state[worker].ripe for worker in turn.workers if state[worker].wants]
    if (all(ripe) if turn.gang else any(ripe)) or (turn.fed_inside and nobody_works):
        return True
    return state.impatient and nobody_works


def _free(lease: LeaseSet, state: State, actions: list[Action]) -> State:
    wanted = list(_candidates(lease, state))
    chosen = next((i for i in wanted if _is_ripe(lease, state, i, nobody_works=True)), None)
    if chosen is None:
        return replace(state, next=-1) if state.next not in wanted else state
    # What was loaded for another turn that did not come, or has not left yet, goes first.
    others = [worker for i, turn in enumerate(lease.turns) if i != chosen for worker in turn.workers]
    for worker in others:
        if state[worker].loaded and state[worker].asked is None:
            state = _ask(state, actions, worker, Kind.OFFLOAD)
    if any(state[worker].loaded or state[worker].killed for worker in others):
        return state
    state = replace(state, at=chosen, holding=True, next=-1, impatient=False)
    state = replace(state, yielding=bool([i for i in wanted if i != chosen]))
    for worker in lease.turns[chosen].workers:
        if state[worker].wants:
            state = _ask(state, actions, worker, Kind.GRANT)
    return state


def _held(lease: LeaseSet, state: State, actions: list[Action]) -> State:
    holders = _holders(lease, state)
    alone = all(lease.turn_of(worker) == state.at for worker, m in state.members if m.on_slots)
    rivals = [i for i in _candidates(lease, state) if i != state.at]
    due = any(m.standing is Standing.DUE for _, m in holders)
    if (rivals or due) and not state.yielding:
        state = replace(state, yielding=True)
    if state.yielding:
        state = _tell(lease, state, rivals, actions)
    if alone:
        state = _preload(lease, state, rivals, actions)
    if _all_frozen(lease, state):
        torn = lease.turns[state.at].gang and not all(m.on_slots for _, m in holders)
        if torn or any(_is_ripe(lease, state, i, nobody_works=True) for i in rivals):
            return _leave(lease, state, actions)
        if due and not rivals:  # the same role again, without having left
            return _again(lease, state, actions)
        return state
    for worker, member in holders:
        if member.standing is Standing.MORE and member.asked is None and not member.killed:
            state = _ask(state, actions, worker, Kind.RESUME)
        elif member.wants and not due and alone and not lease.turns[state.at].gang:  # late in its role's turn
            state = _ask(state, actions, worker, Kind.GRANT)
    return state


def _out_of_turn(lease: LeaseSet, state: State, actions: list[Action]) -> State:
    """(f), role by role as (b): a rank that left alone would leave the others in their collective."""
    for i, turn in enumerate(lease.turns):
        there = [worker for worker in turn.workers if i != state.at and state[worker].on_slots]
        rest = all(state[worker].standing in FROZEN and state[worker].asked is None for worker in there)
        kind = Kind.LEAVE if len(turn.workers) == 1 else Kind.FINISH
        for worker in there:
            member = state[worker]
            if member.asked is not None or member.killed or member.standing is Standing.LEAVES:
                continue
            if rest:
                state = _ask(state, actions, worker, Kind.OFFLOAD)
            elif member.standing is Standing.MORE:
                state = _ask(state, actions, worker, Kind.RESUME)
            elif member.standing is Standing.HOLDS and _TOLD[kind] > _TOLD[member.told]:
                state = _ask(state, actions, worker, kind)
    return state


def _preload(lease: LeaseSet, state: State, rivals: list[int], actions: list[Action]) -> State:
    holder = lease.turns[state.at]
    if state.next >= 0 or not rivals or lease.turns[rivals[0]].role not in holder.beside:
        return state
    if any(m.loaded for _, m in state.members):
        return state
    for worker in lease.turns[rivals[0]].workers:
        if state[worker].wants:
            state = _ask(state, actions, worker, Kind.PRELOAD)
    return replace(state, next=rivals[0])


def _leave(lease: LeaseSet, state: State, actions: list[Action]) -> State:
    """The turn ends: who is frozen leaves, who is not works on until its own end of it."""
    state = replace(state, leaving=True, yielding=True)
    for worker, member in _holders(lease, state):
        if not member.on_slots or member.asked is not None or member.killed or member.standing is Standing.LEAVES:
            continue
        if member.standing in FROZEN:
            state = _ask(state, actions, worker, Kind.OFFLOAD)
        elif member.standing is Standing.MORE:
            state = _ask(state, actions, worker, Kind.RESUME)
        elif member.told is not Kind.FINISH:
            state = _ask(state, actions, worker, Kind.FINISH)
    return state


def _again(lease: LeaseSet, state: State, actions: list[Action]) -> State:
    state = replace(state, yielding=False, items=False)
    for worker, member in _holders(lease, state):
        if member.standing in FROZEN and member.asked is None:
            state = _ask(state, actions, worker, Kind.RESUME)
    return state
