"""The vocabulary of scenarios: manifests, what to wait for, what to do, and stretches of transitions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from tests.conformance.recorder import Track, Transition, has
from tests.conformance.scenario import Act, Do
from tests.conformance.world import MOUNT, Manifest, World

Slots = dict[str, object]
THREE_SLOTS: Final[Slots] = {"perPod": 3, "cpu": "200m", "memory": "600Mi"}
TWO_SLOTS: Final = THREE_SLOTS | {"perPod": 2}
FOUR_SLOTS: Final = THREE_SLOTS | {"perPod": 4}

# --- transitions ------------------------------------------------------------------------------------------------------
PLANNED: Final[tuple[Transition, ...]] = (
    "Valid=True/Accepted", "Suspended=False/NotSuspended", "Admitted=True/NoQueue", "PodsReady=Unknown/WaitingForPlan",
    "PlanApplied=Unknown/WaitingForPlan", "Running=Unknown/WaitingForPlan", "Profiled=False/ProfilingOff",
    "Degraded=False/Healthy",
)  # fmt: skip
STARTING: Final = (
    "PodsReady=False/PodsStarting", "PlanApplied=Unknown/PlanPending", "Running=Unknown/WaitingForDriver",
)  # fmt: skip
JOINED: Final = ("PodsReady=True/PodsReady", "Running=False/WaitingForWorkers", "PlanApplied=True/PlanInForce")
STEPPING: Final = ("Running=True/Stepping",)
STARTED: Final = (*PLANNED, *STARTING, *JOINED, *STEPPING)
STOPPED: Final = ("PodsReady=False/Stopped", "Running=False/Stopped", "Degraded=False/Stopped")
COMPLETE: Final = (*STOPPED, "Complete=True/FlowFinished", "Failed=False/FlowFinished")


def failed(reason: str) -> tuple[Transition, ...]:
    return (*STOPPED, f"Complete=False/{reason}", f"Failed=True/{reason}")


# --- manifests --------------------------------------------------------------------------------------------------------
def job(
    name: str = "a",
    *,
    steps: int = 6,
    env: str = "conformance_envs:Paced-v0",
    config: Manifest | None = None,
    pool: Manifest | None = None,
    workers: Manifest | None = None,
    spares: Manifest | None = None,
    **spec: Any,
) -> Manifest:
    """Eight steps of an environment for each of the job's, 0.4 s until a scenario says `go`; a checkpoint every two."""
    small = {"numEnvs": 2, "slices": 1, "horizon": 4, "epochs": 1, "minibatches": 1}
    kinds = {"env": "gymnasium", "rollout": "torch", "actor": "fsdp"}
    counts: dict[str, Manifest] = {"workers": workers or {}, "spares": spares or {}}
    one = {"name": "cpu", "roles": list(kinds), "pods": 1, "slots": THREE_SLOTS}
    base: Manifest = {
        "seed": 1,
        "flow": {"name": "ppo", "steps": steps, "config": {"env": env} | small | (config or {})},
        "roles": [
            {"name": role, "kind": kind} | {field: asked[role] for field, asked in counts.items() if role in asked}
            for role, kind in kinds.items()
        ],
        "pools": [one | (pool or {})],
        "checkpoint": {"uri": f"{MOUNT}/{name}", "everySteps": 2},
    }
    return {"apiVersion": "rlinf.io/v1alpha1", "kind": "RLJob", "metadata": {"name": name}, "spec": base | spec}


# --- what to wait for -------------------------------------------------------------------------------------------------
def at_step(number: int, do: Do, *, job: str = "a") -> Act:
    def reached(track: Track) -> bool:
        return has(track.latest, "Running=True") and int(track.latest["status"].get("step", 0)) >= number

    return Act(when=reached, what=f"step {number}", do=do, job=job)


def once(text: str, do: Do, *, job: str = "a") -> Act:
    """`once("Suspended=True", ...)`, `once("Running=True/Stepping", ...)`"""
    return Act(when=is_(text), what=text, do=do, job=job)


def recovered(do: Do) -> Act:
    def holds(track: Track) -> bool:
        return has(track.latest, "Running=True") and has(track.latest, "Degraded=False")

    return Act(when=holds, what="to be well again", do=do)


def is_(text: str) -> Callable[[Track], object]:
    return lambda track: has(track.latest, text)


def finished(track: Track) -> bool:
    return has(track.latest, "Complete=True") or has(track.latest, "Failed=True")


def gone(track: Track) -> bool:
    return track.gone


# --- what to do -------------------------------------------------------------------------------------------------------
def touch(*files: str) -> Do:
    async def do(world: World) -> None:
        for name in files:
            world.touch(name)

    return do


GO: Final = touch("go")


async def nothing(world: World) -> None:
    """For an act that only waits."""


def kill(part: str, *, slowly: bool = False) -> Do:
    """`slowly`: the next life of an environment begins so late that the driver reports in between."""

    async def do(world: World) -> None:
        if slowly:
            world.touch("slow-start")
        await world.kill("a", part)

    return do


def delete_pod(component: str, *, pool: str = "") -> Do:
    return lambda world: world.delete_pod("a", component, pool=pool)


def edit(job: str = "a", **spec: Any) -> Do:
    return lambda world: world.edit(job, spec)


def edit_pool(**pool: Any) -> Do:
    """Of the pool as it stands there: a patch replaces the whole list."""

    async def do(world: World) -> None:
        found = await world.job("a")
        assert found is not None
        await world.edit("a", {"pools": [found["spec"]["pools"][0] | pool]})

    return do


def refused(field: str, value: object, *, sentence: str) -> Do:
    async def do(world: World) -> None:
        said = await world.refused("a", {field: value})
        assert sentence in said, f"an edit of spec.{field} to {value!r} was not refused so: {said!r}"

    return do


def apply(manifest: Manifest, *, slowly: bool = False) -> Do:
    async def do(world: World) -> None:
        if slowly:
            world.touch("slow-start")
        await world.apply(manifest)

    return do


async def delete(world: World) -> None:
    await world.delete("a")


def remade(manifest: Manifest) -> Do:
    """Deleted, and made again under its name once nothing of it is left."""

    async def do(world: World) -> None:
        await world.delete("a")
        await world.until(lambda: world.is_gone("a"), what="nothing to be left of job a")
        await world.apply(manifest)

    return do


async def away(world: World) -> None:
    await world.scheduler_away()


async def back(world: World) -> None:
    await world.scheduler_back()


async def spoil_checkpoint(world: World) -> None:
    """One that says of itself that its file has 99 bytes; it has 2. It is read late: the plan was reported by then."""
    world.touch("slow-start")
    folder = world.folder / "a" / "b0-4"
    (folder / "actor").mkdir(parents=True)
    (folder / "COMMIT").write_text('{"format": 1, "version": "b0-4", "files": {"driver.json": 99}}')
    (folder / "driver.json").write_text("{}")
    for path in (folder, folder / "actor", folder.parent):
        path.chmod(0o777)
