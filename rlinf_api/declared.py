"""What roles and plans declare before anything was measured: memory of a slot, world sizes of a gang. Pure.

Kind `synthetic` declares all of it (config fields `memory`, `options`, `ranks`), those of language models their
`memory` where the manifest has it; any other role is taken to fit, unless a plan says what it needs. For plan_rules and
lease_sets, which check plans, for placement, and for the planner.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from rlinf_api import options as options_of
from rlinf_api.job import RLJobSpec, RoleSpec
from rlinf_api.plan import WorkerMemory, WorkerPlan
from rlinf_api.quantities import MOST, to_bytes
from rlinf_api.slots import Allotment

MIB: Final = 1 << 20
KIND: Final = "synthetic"
DECLARE_MEMORY: Final = frozenset({KIND, "transformers", "vllm", "rule", "fsdp"})


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotMemory:
    """Bytes of one slot. 0: not declared."""

    resident: int = 0
    peak: int = 0
    offloaded: int = 0

    @property
    def active(self) -> int:
        """While it is at work: its peak, which includes what is resident."""
        return max(self.peak, self.resident)

    def or_more(self, other: SlotMemory) -> SlotMemory:
        """The larger of both, number by number."""
        return SlotMemory(
            resident=max(self.resident, other.resident),
            peak=max(self.peak, other.peak),
            offloaded=max(self.offloaded, other.offloaded),
        )


def of_role(role: RoleSpec, *, option: str = "") -> SlotMemory:
    """By its config, in MiB per slot; an option that is chosen, by a plan or else by the config, has its own peak.

    >>> role = RoleSpec.model_validate({"name": "train", "kind": "synthetic", "config":
    ...                                 {"memory": {"resident": 1, "peak": 2}, "options": [{"peak": 4}], "option": 0}})
    >>> found = of_role(role)
    >>> found.resident // MIB, found.peak // MIB, found.offloaded
    (1, 4, 0)
    """
    memory = role.config.get("memory")
    if role.kind not in DECLARE_MEMORY or not isinstance(memory, dict):
        return SlotMemory()
    chosen = options_of.chosen(role.config, option) if role.kind == KIND else None
    peak = memory.get("peak") if chosen is None else chosen.get("peak")
    resident, offloaded = _bytes(memory.get("resident")), _bytes(memory.get("offloaded"))
    return SlotMemory(resident=resident, peak=_bytes(peak), offloaded=offloaded)


def options(role: RoleSpec) -> tuple[str, ...]:
    """By which names a plan chooses among the ways of working that the role's config lists; none: the role knows."""
    if role.kind != KIND:
        return ()
    listed = role.config.get("options")
    return (options_of.BASE, *(str(n) for n in range(len(listed) if isinstance(listed, list) else 0)))


def of_entry(entry: WorkerPlan, role: RoleSpec) -> SlotMemory:
    """The memory of a plan's entry: the larger of what it says and what the role's config says. An engine's `kv` is
    held beside what is resident, as long as the engine is on its slots."""
    said, of_config = entry.memory, of_role(role, option=entry.option)
    if said is None:
        return of_config
    resident, peak = to_bytes(said.resident), to_bytes(said.peak)
    if kv := to_bytes(said.kv):
        resident += kv
        peak = max(peak, resident)
    return of_config.or_more(SlotMemory(resident=resident, peak=peak, offloaded=to_bytes(said.offloaded)))


def allotment(entry: WorkerPlan) -> Allotment:
    """What the plan itself says, as the entry's workers are told it."""
    said = entry.memory or WorkerMemory()
    return Allotment(
        resident_bytes=to_bytes(said.resident),
        peak_bytes=to_bytes(said.peak),
        offloaded_bytes=to_bytes(said.offloaded),
        kv_bytes=to_bytes(said.kv),
        option=entry.option,
        tokens=entry.tokens,
        stays=entry.stays,
    )


def kept(entry: WorkerPlan, memory: SlotMemory) -> int:
    """Bytes of a slot that the entry's workers keep while others have the turn. Of one that stays and does not say what
    is resident, its peak."""
    return max(memory.resident or memory.active, memory.offloaded) if entry.stays else memory.offloaded


def kept_by_role(entries: Iterable[WorkerPlan], job: RLJobSpec) -> dict[str, int]:
    """The most of any of a role's entries."""
    roles = {role.name: role for role in job.roles}
    found: dict[str, int] = {}
    for entry in entries:
        found[entry.role] = max(kept(entry, of_entry(entry, roles[entry.role])), found.get(entry.role, 0))
    return found


def by_role(entries: Iterable[WorkerPlan], job: RLJobSpec) -> dict[str, SlotMemory]:
    """The most of any of a role's entries; without roles of an entry of which nothing is declared."""
    roles = {role.name: role for role in job.roles}
    found: dict[str, SlotMemory] = {}
    unknown: set[str] = set()
    for entry in entries:
        if (memory := of_entry(entry, roles[entry.role])) == SlotMemory():
            unknown.add(entry.role)
        found[entry.role] = memory.or_more(found.get(entry.role, SlotMemory()))
    return {role: memory for role, memory in found.items() if role not in unknown}


def world_sizes(role: RoleSpec) -> tuple[int, ...]:
    """The numbers of workers that the role's config allows (`ranks`); none: any number."""
    ranks = role.config.get("ranks")
    if role.kind != KIND or not isinstance(ranks, list):
        return ()
    return tuple(r for r in ranks if isinstance(r, int))


def lanes(role: RoleSpec) -> int:
    """How many units a worker has in work at once, where its kind says so; 0: it does not say. 1: one after the other.

    >>> config = {"service": "concurrent", "lanes": 4}
    >>> lanes(RoleSpec.model_validate({"name": "rollout", "kind": "synthetic", "config": config}))
    4
    """
    said = role.config.get("lanes", 1)
    if role.kind != KIND or not isinstance(said, int):
        return 0
    return max(1, said) if role.config.get("service") == "concurrent" else 1


def is_gang(role: RoleSpec, *, trains: bool = False) -> bool:
    """Whether its ranks take rounds together. Kind `synthetic` says so; any other does where it `trains`,
    which is known of a job that runs."""
    return role.config.get("gang") is True if role.kind == KIND else trains


def gathers(role: RoleSpec) -> bool:
    """Whether the one who asks in a cycle sends its share of a step in sub-batches. Kind `synthetic` does."""
    return role.kind == KIND


def trains_at_once(role: RoleSpec, *, flow: str) -> bool:
    """Whether a gang begins to train when the last unit of the step is there: PPO passes over all of them."""
    return role.kind == "fsdp" and flow == "ppo"


def _bytes(mebibytes: object) -> int:
    """A config is the worker's to check: what no machine has is too large here, and not an error."""
    return int(min(max(mebibytes * MIB, 0), MOST)) if isinstance(mebibytes, int | float) else 0
