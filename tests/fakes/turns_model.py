"""A model of a job in turns, for an exhaustive search: two lease sets, two pods, three roles, one a gang over both
pods, bounded channels, and faults. The rule that decides is the real one (rlinf_worker.turns.rule).

    tickets ──> env e0 ──q1──> rollout r0, r1 ──q2──> actor a0 + a1 ──(a step)──> tickets
    set x over both pods: r0 | a0 + a1        set y in pod 1: e0 | r1

Some units go round for ever, two make a round. An order is on its way until the worker obeys it, at any later time; a
round reaches the ranks at different times; a rank in the collective waits for the other; a worker dies or hangs at any
point.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from rlinf_worker.turns import rule as turns
from rlinf_worker.turns.rule import Kind, LeaseSet, Said, Standing, State, Turn

CAPACITY = 2
ROUND = 2
RANKS = ("a0", "a1")
WORDS = (Kind.YIELD, Kind.FINISH, Kind.LEAVE)  # that somebody waits


@dataclass(frozen=True, slots=True)
class Sim:
    """One worker. `unit`: it has one; for a rank, that its part of the round has come."""

    alive: bool = True
    hung: bool = False
    on: bool = False
    frozen: Standing | None = None
    told: Kind | None = None
    leaving: bool = False  # by itself
    orders: tuple[turns.Order, ...] = ()
    """On their way. Two where the word that its turn is to end overtakes one that it has not obeyed."""
    unit: bool = False
    inside: bool = False  # the collective
    idled: bool = False  # it gave its turn back because it was idle


@dataclass(frozen=True, slots=True)
class World:
    sims: tuple[tuple[str, Sim], ...]
    sets: tuple[State, ...]
    tickets: int = 0
    q1: int = 0
    q2: int = 0
    coming: tuple[str, ...] = ()  # ranks that a round is on its way to
    faults: int = 1

    def __getitem__(self, name: str) -> Sim:
        return dict(self.sims)[name]

    def but(self, name: str, **changes: object) -> World:
        sims = tuple((n, replace(s, **changes) if n == name else s) for n, s in self.sims)  # type: ignore[arg-type]
        return replace(self, sims=sims)


class Broken(Exception):
    """An invariant does not hold."""


class Job:
    """`start()` and `after(world)`: (what happened, the world then, whether a step was made, whether by a fault)."""

    def __init__(
        self,
        *,
        units: int = 2,
        faults: int = 1,
        hangs: bool = True,
        preload: bool = False,
        fed_inside: bool = True,
        counted: bool = True,
        quiet: bool = False,
        ends: bool = False,
        overtakes: bool = False,
        were_apart: bool = False,
    ) -> None:
        """`counted`: a rollout's turn is over with each unit, else only when it is idle. `quiet`: who leaves alone is
        so fast that it does not say so before. `ends`: a turn that others wait for may be told to end at any time.
        `overtakes`: also before its holders have obeyed that somebody waits. `were_apart`: all have slots to themselves
        when a plan puts them into the sets."""
        beside = frozenset({"actor"}) if preload else frozenset[str]()
        x = (Turn(role="rollout", workers=("r0",), beside=beside), Turn(role="actor", workers=RANKS, gang=True))
        y = (Turn(role="env", workers=("e0",)), Turn(role="rollout", workers=("r1",), fed_inside=fed_inside))
        self.sets = (LeaseSet(name="x", turns=x), LeaseSet(name="y", turns=y))
        self.set_of = {worker: i for i, lease in enumerate(self.sets) for worker in lease.workers}
        self.units, self.faults, self.hangs, self.counted = units, faults, hangs, counted
        self.quiet, self.ends, self.overtakes, self.were_apart = quiet, ends, overtakes, were_apart
        self._known: dict[tuple[int, State, turns.Event], tuple[State, list[turns.Action]]] = {}

    def start(self) -> World:
        names = [worker for lease in self.sets for worker in lease.workers]
        held = dict.fromkeys(names, Standing.HOLDS) if self.were_apart else {}
        sets = tuple(turns.rebuilt(lease, {n: held[n] for n in lease.workers if n in held}, {}) for lease in self.sets)
        sims = tuple((n, Sim(on=self.were_apart)) for n in names)
        return self._settled(World(sims, sets, tickets=self.units, faults=self.faults))

    # --- what a worker would say --------------------------------------------------------------------------------------
    def has_work(self, world: World, name: str) -> bool:
        sim = world[name]
        match name[0]:
            case "e":
                return world.q1 < CAPACITY if sim.unit else world.tickets > 0
            case "r":
                return world.q2 < CAPACITY if sim.unit else world.q1 > 0
            case _:
                return sim.unit

    def said(self, world: World, name: str) -> Said:
        sim, work = world[name], self.has_work(world, name)
        ripe = not (name[0] == "r" and sim.idled and not sim.unit and world.q1 == 1)
        if sim.leaving:
            standing = Standing.HOLDS if self.quiet and sim.told is Kind.LEAVE else Standing.LEAVES
        elif sim.on:
            idle = Standing.MORE if work else Standing.IDLE
            standing = Standing.HOLDS if sim.frozen is None else idle if sim.frozen is Standing.IDLE else sim.frozen
        else:
            standing = Standing.WANTS if work else Standing.CONTENT
        return Said(name, standing, ripe=ripe, answers=not sim.orders)

    def _settled(self, world: World) -> World:
        """Whoever's word has changed says so, until nothing follows from it any more."""
        while True:
            before = world
            for name, sim in world.sims:
                if sim.alive and not sim.hung:
                    if (
                        sim.on
                        and sim.told is not None
                        and sim.frozen is None
                        and not sim.inside
                        and not self.has_work(world, name)
                    ):
                        world = self._frozen(world, name, Standing.IDLE)
                    said, known = self.said(world, name), world.sets[self.set_of[name]][name]
                    if (said.standing, said.ripe) != (known.standing, known.ripe) or (known.asked and said.answers):
                        world = self._step(world, self.set_of[name], said)
            if world == before:
                self._check(world)
                return world

    def _frozen(self, world: World, name: str, standing: Standing) -> World:
        told = world[name].told
        leaving = told is Kind.LEAVE or (told in (Kind.FINISH, Kind.END) and standing is Standing.DUE)
        return world.but(name, frozen=standing, leaving=leaving)

    def _step(self, world: World, index: int, event: turns.Event) -> World:
        asked = (index, world.sets[index], event)
        if asked not in self._known:
            state, actions = turns.step(self.sets[index], world.sets[index], event)
            # Words about empty turns are not part of the search: the counter only makes it longer.
            self._known[asked] = replace(state, empty=0, items=False, flowed=False), actions
        state, actions = self._known[asked]
        world = replace(world, sets=tuple(state if i == index else s for i, s in enumerate(world.sets)))
        for action in actions:
            match action:
                case turns.Order(worker):
                    before = tuple(order for order in world[worker].orders if order.kind is not Kind.PRELOAD)
                    for order in before:
                        if action.kind is not Kind.END or order.kind not in WORDS:
                            raise Broken(f"{worker} is given {action.kind} while {order.kind} is on its way")
                    world = world.but(worker, orders=(*before, action))
                case turns.Kill(worker):
                    if not world[worker].hung and world[worker].alive:
                        raise Broken(f"{worker}, which is well, is killed")
                    world = self._dead(world, worker)
                case turns.Warn():
                    pass
        return world

    def _check(self, world: World) -> None:
        units = world.tickets + world.q1 + world.q2 + sum(s.unit for n, s in world.sims if n[0] != "a")
        units += ROUND if world.coming or world["a0"].unit or world["a1"].unit else 0
        if units != self.units:
            raise Broken(f"{units} units, wanted {self.units}")
        for lease in self.sets:
            roles = {turn.role for turn in lease.turns for worker in turn.workers if world[worker].on}
            if len(roles) > 1 and not self.were_apart:
                raise Broken(f"lease set {lease.name} is held by {' and '.join(sorted(roles))}")

    # --- what may happen ----------------------------------------------------------------------------------------------
    def after(self, world: World) -> Iterator[tuple[str, World, bool, bool]]:
        for name, sim in world.sims:
            if not sim.alive:
                yield f"{name} starts again", self._settled(self._gone(world, name)), False, False
                continue
            if world.faults:
                fewer = replace(world, faults=world.faults - 1)
                yield f"{name} dies", self._settled(self._dead(fewer, name)), False, True
                if self.hangs:
                    yield f"{name} hangs", self._settled(fewer.but(name, hung=True)), False, True
            if sim.hung:
                continue
            if sim.leaving:
                left = world.but(
                    name, on=False, frozen=None, leaving=False, told=None, idled=sim.frozen is Standing.IDLE
                )
                yield f"{name} has left", self._settled(left), False, False
            if sim.orders:
                yield f"{name} obeys {sim.orders[0].kind}", self._settled(self._obey(world, name)), False, False
            if name in world.coming:
                came = replace(world.but(name, unit=True), coming=tuple(n for n in world.coming if n != name))
                yield f"its part reaches {name}", self._settled(came), False, False
            if sim.on and sim.frozen is None:
                yield from self._work(world, name, sim)
        if world.q2 >= ROUND and not world.coming and all(world[n].alive and not world[n].unit for n in RANKS):
            yield "a round is formed", self._settled(replace(world, q2=world.q2 - ROUND, coming=RANKS)), False, False
        for index, lease in enumerate(self.sets):
            if turns.is_patience_needed(lease, world.sets[index]):
                patient = self._step(world, index, turns.Late.PATIENCE)
                yield f"the patience of {lease.name} is over", self._settled(patient), False, False
            lingering = turns.lingering(lease, world.sets[index])
            if self.ends and lingering and (self.overtakes or not any(world[n].orders for n in lingering)):
                ended = self._step(world, index, turns.Late.TURN)
                yield f"the turn in {lease.name} is to end", self._settled(ended), False, False
            late = [n for n in turns.late(world.sets[index]) if world[n].alive]
            if any(world[n].hung for n in late) and all(world[n].hung for n in late):
                killed = self._step(world, index, turns.Late.RELEASE)
                yield f"{' and '.join(late)} is late", self._settled(killed), False, False
        for name, sim in world.sims:  # the agent's watch over marks, which knows nothing of turns
            if sim.hung and sim.alive:
                yield f"{name} is noticed to hang", self._settled(self._dead(world, name)), False, False

    def _obey(self, world: World, name: str) -> World:
        sim = world[name]
        order, *later = sim.orders
        world = world.but(name, orders=tuple(later))
        match order.kind:
            case Kind.GRANT:
                self._check_alone(world, name)
                told = Kind.YIELD if order.yielding else None
                return world.but(name, on=True, frozen=None, told=told, idled=False)
            case Kind.YIELD | Kind.FINISH | Kind.LEAVE | Kind.END:
                world = world.but(name, told=order.kind)
                still = sim.frozen is Standing.DUE or (sim.frozen is Standing.IDLE and not self.has_work(world, name))
                return self._frozen(world, name, sim.frozen) if still and sim.frozen is not None else world
            case Kind.RESUME:
                return world.but(name, frozen=None, told=(sim.told or Kind.YIELD) if order.yielding else None)
            case Kind.OFFLOAD:
                if sim.on and sim.frozen is None:  # not frozen: it leaves when it is
                    return world.but(name, orders=(order, *later))
                return world.but(name, on=False, frozen=None, told=None, idled=sim.frozen is Standing.IDLE)
            case Kind.PRELOAD:
                return world

    def _check_alone(self, world: World, name: str) -> None:
        lease = self.sets[self.set_of[name]]
        mine = next(turn for turn in lease.turns if name in turn.workers)
        if there := [w for turn in lease.turns if turn is not mine for w in turn.workers if world[w].on]:
            raise Broken(f"{name} loads while {' and '.join(there)} of lease set {lease.name} is on its slots")

    def _work(self, world: World, name: str, sim: Sim) -> Iterator[tuple[str, World, bool, bool]]:
        if not sim.inside and not self.has_work(world, name):
            return
        match name[0]:
            case "e":
                took = replace(world, tickets=world.tickets - 1).but(name, unit=True)
                put = replace(world, q1=world.q1 + 1).but(name, unit=False)
                if sim.told is Kind.END:
                    put = self._frozen(put, name, Standing.DUE)
                yield f"{name} works", self._settled(put if sim.unit else took), False, False
            case "r":
                took = replace(world, q1=world.q1 - 1).but(name, unit=True)
                put = replace(world, q2=world.q2 + 1).but(name, unit=False)
                if self.counted or sim.told is Kind.END:
                    put = self._frozen(put, name, Standing.DUE)
                yield f"{name} works", self._settled(put if sim.unit else took), False, False
            case _ if not sim.inside:
                yield f"{name} begins its part", self._settled(world.but(name, inside=True)), False, False
            case _ if all(world[n].inside and world[n].on and not world[n].hung for n in RANKS):
                for n in RANKS:
                    world = self._frozen(world.but(n, unit=False, inside=False), n, Standing.DUE)
                yield "a step is made", self._settled(replace(world, tickets=world.tickets + ROUND)), True, False

    def _dead(self, world: World, name: str) -> World:
        """What it had goes elsewhere; a gang goes as a whole."""
        if name in RANKS:
            if world.coming or any(world[n].unit for n in RANKS):
                world = replace(world, q2=world.q2 + ROUND, coming=())
            for n in RANKS:
                world = world.but(n, alive=False, unit=False, inside=False)
            return world
        if world[name].unit:
            world = replace(world, tickets=world.tickets + 1) if name[0] == "e" else replace(world, q1=world.q1 + 1)
        return world.but(name, alive=False, unit=False)

    def _gone(self, world: World, name: str) -> World:
        sims = tuple((n, Sim() if n == name else s) for n, s in world.sims)
        return self._step(replace(world, sims=sims), self.set_of[name], turns.Gone(name))


@dataclass(frozen=True, slots=True)
class Found:
    """`stuck`: the way to a state from which no step can be made without another fault; empty: there is none."""

    states: int
    steps: int
    stuck: tuple[str, ...] = ()


def explore(job: Job, *, limit: int = 2_000_000) -> Found:
    """Every reachable state; of each, whether a step can still be made. Raises Broken with the way to it."""
    start = job.start()
    number = {start: 0}
    worlds, came_from = [start], [(-1, "")]
    before: list[list[int]] = [[]]  # by faultless transitions
    making: list[int] = []
    at = 0
    while at < len(worlds):
        assert len(worlds) <= limit, f"more than {limit} states"
        try:
            for what, world, is_step, is_fault in job.after(worlds[at]):
                if world not in number:
                    number[world] = len(worlds)
                    worlds.append(world)
                    came_from.append((at, what))
                    before.append([])
                if not is_fault:
                    before[number[world]].append(at)
                if is_step:
                    making.append(at)
        except Broken as broken:
            raise Broken(f"{broken}; after: {', '.join(_way(came_from, at))}") from broken
        at += 1
    alive, todo = set(making), list(making)
    while todo:
        for earlier in before[todo.pop()]:
            if earlier not in alive:
                alive.add(earlier)
                todo.append(earlier)
    dead = next((i for i in range(len(worlds)) if i not in alive), None)
    return Found(len(worlds), len(making), ("start", *_way(came_from, dead)) if dead is not None else ())


def _way(came_from: list[tuple[int, str]], at: int) -> list[str]:
    way: list[str] = []
    while at > 0:
        at, what = came_from[at]
        way.append(what)
    return way[::-1]
