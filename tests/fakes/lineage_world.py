"""Jobs in memory whose units are not called as their tickets are: several of one, one of several, a chain of queues.

world = LineageWorld(SHAPES["three of each"], seed=3)
await world.run(at={40: lambda w: w.kill("env/0")})
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlinf_worker.channels.protocol import Item, LineageKey
from rlinf_worker.flows.protocol import Flow, Ticket
from tests.builders_driver import make_job
from tests.fakes.driver_roles import ROLES, SimEnv
from tests.fakes.driver_workers import SimWorker
from tests.fakes.driver_world import World

GROUP = 2


def slices_of(flow: Flow) -> int:
    return int(flow.config["slices"])


async def _put(flow: Flow, *, units: int | None, affine: int = 1) -> None:
    """`affine`: so many tickets after each other are one worker's."""
    tickets = flow.source("segments", to="env")
    flow.queue("trajectories", "env", "actor", rounds=True)
    flow.weights("actor", "rollout")
    async for step in flow.steps():
        keys = [LineageKey(f"env:{n}@{step.number}") for n in range(slices_of(flow))]
        await tickets.put([Ticket(key=key, affinity=n // affine, units=units) for n, key in enumerate(keys)], step=step)


async def three_of_each(flow: Flow) -> None:
    await _put(flow, units=3)


async def uncounted(flow: Flow) -> None:
    await _put(flow, units=None)


async def grouped(flow: Flow) -> None:
    await _put(flow, units=1, affine=GROUP)


async def _chain(flow: Flow, *, units: int | None) -> None:
    """env makes drafts of a ticket, rollout one unit of each: `units` is of the end."""
    tickets = flow.source("segments", to="env")
    flow.queue("drafts", "env", "rollout")
    flow.queue("trajectories", "rollout", "actor", rounds=True)
    async for step in flow.steps():
        keys = [LineageKey(f"env:{n}@{step.number}") for n in range(slices_of(flow))]
        await tickets.put([Ticket(key=key, units=units) for key in keys], step=step)


async def chained(flow: Flow) -> None:
    await _chain(flow, units=3)


async def chained_uncounted(flow: Flow) -> None:
    await _chain(flow, units=None)


async def compared(flow: Flow) -> None:
    """rollout makes one group of all drafts of a ticket, which have to come to the same one of two."""
    tickets = flow.source("segments", to="env")
    flow.queue("drafts", "env", "rollout", together=True)
    flow.queue("trajectories", "rollout", "actor", rounds=True)
    async for step in flow.steps():
        keys = [LineageKey(f"env:{n}@{step.number}") for n in range(slices_of(flow))]
        await tickets.put([Ticket(key=key) for key in keys], step=step)


async def until_enough(flow: Flow) -> None:
    """Dynamic sampling: of some tickets nothing can be learnt; others are put until the step has what it wants."""
    tickets = flow.source("segments", to="env")
    scores = flow.results("scores", producer="env", payload={"kept": "int"})
    flow.queue("trajectories", "env", "actor", rounds=True)
    flow.weights("actor", "rollout")
    async for step in flow.steps():
        kept, number = 0, int(flow.state.get("next", 0))
        while kept < slices_of(flow):
            keys = [LineageKey(f"env:{number + n}@{step.number}") for n in range(slices_of(flow) - kept)]
            await tickets.put([Ticket(key=key) for key in keys], step=step)
            found = await scores.of(step, keys)
            assert [result.key for result in found] == keys
            kept += sum(result.value["kept"] for result in found)
            number += len(keys)
        flow.state["next"] = number


def kept_of(slices: int, *, upto: int) -> list[str]:
    """What step `upto` trains on, by what the steps before it had used up."""
    number, found = 0, list[str]()
    for step in range(1, upto + 1):
        found = []
        while len(found) < slices:
            keys = [f"env:{number + n}@{step}" for n in range(slices - len(found))]
            number += len(keys)
            found += [key for key in keys if is_worth(key)]
    return found


def is_worth(key: str) -> bool:
    return draws(key) > 1


class SimDrafter(SimEnv):
    produces = "drafts"


class SimMiddle(SimEnv):
    consumes, produces = "drafts", "trajectories"


def draws(key: str, *, salt: int = 0) -> int:
    """0 to 3, by the key."""
    return (zlib.crc32(key.encode()) + salt) % 4


def same(worker: SimWorker, items: Sequence[Item]) -> list[str]:
    return [f"{items[0].key}/{n}" for n in range(3)]


def others(worker: SimWorker, items: Sequence[Item]) -> list[str]:
    """Another life calls them otherwise."""
    return [f"{items[0].key}/{3 * worker.attempt + n}" for n in range(3)]


def drawn(worker: SimWorker, items: Sequence[Item]) -> list[str]:
    return [f"{items[0].key}/{n}" for n in range(draws(items[0].key))]


def drawn_anew(worker: SimWorker, items: Sequence[Item]) -> list[str]:
    """Another life comes to another number."""
    return [f"{items[0].key}/{n}" for n in range(draws(items[0].key, salt=worker.attempt))]


def group(worker: SimWorker, items: Sequence[Item]) -> list[str]:
    first = min(int(item.key.partition(":")[2].partition("@")[0]) for item in items)
    return [f"g:{first // GROUP}@{items[0].step}"]


def of_all(worker: SimWorker, items: Sequence[Item]) -> list[str]:
    return [items[0].tickets[0]]


def worthy(worker: SimWorker, items: Sequence[Item]) -> list[str]:
    return [items[0].key] if is_worth(items[0].key) else []


@dataclass(frozen=True, kw_only=True)
class Shape:
    flow: str
    makes: Mapping[str, Callable[[SimWorker, Sequence[Item]], Sequence[str]]]
    """By the channel that it goes into."""
    wants: Callable[[Sequence[str]], Sequence[str]]
    """What is trained on, of the tickets of a step."""
    job: Mapping[str, Any] = field(default_factory=dict)
    roles: Mapping[str, type[SimWorker]] = field(default_factory=dict)
    is_exact: bool = True
    """Else whoever makes it again may come to more or fewer."""


def expanded(tickets: Sequence[str]) -> list[str]:
    return [f"{ticket}/{n}" for ticket in tickets for n in range(3)]


def expanded_as_drawn(tickets: Sequence[str]) -> list[str]:
    return [f"{ticket}/{n}" for ticket in tickets for n in range(draws(ticket))]


def as_groups(tickets: Sequence[str]) -> list[str]:
    step = tickets[0].partition("@")[2]
    return [f"g:{n}@{step}" for n in range(len(tickets) // GROUP)]


CHAIN = {"env": SimDrafter, "rollout": SimMiddle}


def ends(worker: SimWorker, items: Sequence[Item]) -> list[str]:
    return [f"{items[0].key}.end"]


SHAPES: dict[str, Shape] = {
    "three of each": Shape(flow="three_of_each", makes={"trajectories": same}, wants=expanded),
    "three of each, in order": Shape(
        flow="three_of_each", makes={"trajectories": same}, wants=expanded, job={"order": "lineage", "micro_batch": 4}
    ),
    "three of each, with little room": Shape(
        flow="three_of_each", makes={"trajectories": same}, wants=expanded, job={"capacity": 4, "micro_batch": 1}
    ),
    "others each time": Shape(flow="three_of_each", makes={"trajectories": others}, wants=expanded, is_exact=False),
    "as many as come": Shape(flow="uncounted", makes={"trajectories": drawn}, wants=expanded_as_drawn),
    "as many as come, in order": Shape(
        flow="uncounted", makes={"trajectories": drawn}, wants=expanded_as_drawn, job={"order": "lineage"}
    ),
    "another number each time": Shape(
        flow="uncounted", makes={"trajectories": drawn_anew}, wants=expanded_as_drawn, is_exact=False,
        job={"actors": 2, "micro_batch": 1},
    ),
    "one of two": Shape(flow="grouped", makes={"trajectories": group}, wants=as_groups, job={"actors": 2}),
    "a chain": Shape(
        flow="chained", makes={"drafts": same, "trajectories": ends}, roles=CHAIN, job={"rollouts": 2},
        wants=lambda tickets: [f"{key}.end" for key in expanded(tickets)],
    ),
    "one of three, by one of two with little room": Shape(
        flow="compared", makes={"drafts": same, "trajectories": of_all}, roles=CHAIN, wants=list,
        job={"rollouts": 2, "micro_batch": 1, "depth": 1, "staleness": 1},
    ),
    "until there are enough": Shape(flow="until_enough", makes={"trajectories": worthy}, wants=list),
    "until there are enough, in order": Shape(
        flow="until_enough", makes={"trajectories": worthy}, wants=list, job={"order": "lineage", "actors": 2}
    ),
    "a chain of as many as come": Shape(
        flow="chained_uncounted", makes={"drafts": drawn, "trajectories": ends}, roles=CHAIN, job={"rollouts": 2},
        wants=lambda tickets: [f"{key}.end" for key in expanded_as_drawn(tickets)],
    ),
}  # fmt: skip


class LineageWorld(World):
    def __init__(self, shape: Shape, *, seed: int = 0, steps: int = 3, **more: Any) -> None:
        self.shape, self.roles = shape, {**ROLES, **shape.roles}
        flow = f"tests.fakes.lineage_world:{shape.flow}"
        super().__init__(make_job(**{"flow": flow, "steps": steps, "every_steps": 1, **shape.job, **more}), seed=seed)

    def together(self, item: Item, here: Sequence[Item]) -> list[Item]:
        if item.channel == "drafts" and self.shape.flow == "compared":
            alike = [other for other in here if (other.branch, other.tickets) == (item.branch, item.tickets)]
            return alike if len(alike) == 3 else []
        if self.shape.flow != "grouped":
            return [item]
        (mine,) = group(None, [item])  # type: ignore[arg-type]
        alike = [other for other in here if group(None, [other]) == [mine] and other.branch == item.branch]  # type: ignore[arg-type]
        return alike if len(alike) == GROUP else []

    def made_of(self, worker: SimWorker, items: Sequence[Item]) -> Sequence[str]:
        return self.shape.makes[worker.produces](worker, items)

    def told_of(self, worker: SimWorker, items: Sequence[Item], keys: Sequence[str]) -> Any:
        return {"kept": len(keys)} if self.shape.flow == "until_enough" else None

    def is_dropped(self, worker: SimWorker, item: Item) -> bool:
        return self.shape.flow == "until_enough" and not is_worth(item.key)

    def expected(self, step: int) -> tuple[str, ...]:
        slices = int(self.driver.job.flow_settings.config["slices"])
        if self.shape.flow == "until_enough":
            return tuple(sorted(kept_of(slices, upto=step)))
        return tuple(sorted(self.shape.wants([f"env:{n}@{step}" for n in range(slices)])))
