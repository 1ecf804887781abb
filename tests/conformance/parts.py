"""The vocabulary of scenarios: manifests, what to wait for, what to do, and stretches of transitions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from tests.conformance.recorder import State, Transition, has
from tests.conformance.scenario import Act, Do
from tests.conformance.world import MOUNT, Manifest, World

Slots = dict[str, object]
THREE_SLOTS: Final[Slots] = {"perPod": 3, "cpu": "200m", "memory": "600Mi"}
TWO_SLOTS: Final = THREE_SLOTS | {"perPod": 2}
FOUR_SLOTS: Final = THREE_SLOTS | {"perPod": 4}
LEARNS: Final = "fsdp"

# --- transitions ------------------------------------------------------------------------------------------------------
WAITING_FOR_PLAN: Final[tuple[Transition, ...]] = (
    "Valid=True/Accepted", "Suspended=False/NotSuspended", "Admitted=True/NoQueue", "PodsReady=Unknown/WaitingForPlan",
    "PlanApplied=Unknown/WaitingForPlan", "Running=Unknown/WaitingForPlan", "Profiled=False/ProfilingOff",
    "Degraded=False/Healthy",
)  # fmt: skip
STARTING: Final = (
    "PodsReady=False/PodsStarting", "PlanApplied=Unknown/PlanPending", "Running=Unknown/WaitingForDriver",
)  # fmt: skip
BEGUN: Final = (*WAITING_FOR_PLAN[:3], *STARTING, *WAITING_FOR_PLAN[6:])
"""The first status of a job that gets a plan when it asks: the pass that has it made leaves the word to the next."""
JOINED: Final = ("PodsReady=True/PodsReady", "Running=False/WaitingForWorkers", "PlanApplied=True/PlanInForce")
STEPPING: Final = ("Running=True/Stepping",)
STARTED: Final = (*BEGUN, *JOINED, *STEPPING)
STOPPED: Final = ("PodsReady=False/Stopped", "Running=False/Stopped", "Degraded=False/Stopped")
COMPLETE: Final = (*STOPPED, "Complete=True/FlowFinished")


def failed(reason: str) -> tuple[Transition, ...]:
    return (*STOPPED, f"Failed=True/{reason}")


# --- manifests --------------------------------------------------------------------------------------------------------
def job(
    name: str = "a",
    *,
    steps: int = 40,
    env: str = "conformance_envs:Paced-v0",
    actor: str = "light_actor:Light",
    config: Manifest | None = None,
    pool: Manifest | None = None,
    workers: Manifest | None = None,
    spares: Manifest | None = None,
    **spec: Any,
) -> Manifest:
    """Eight steps of an environment for each of the job's, 0.4 s until a scenario says `go`; a checkpoint every two.

    As many steps as leave a slow machine the time to see the first, and to say `go` then. `actor`: LEARNS where more is
    tried than what a job becomes; half of a job's CPU is the start of torch."""
    small = {"numEnvs": 2, "slices": 1, "horizon": 4, "epochs": 1, "minibatches": 1}
    kinds = {"env": "gymnasium", "rollout": "torch", "actor": actor}
    counts: dict[str, Manifest] = {"workers": workers or {}, "spares": spares or {}}
    one = {"name": "cpu", "roles": list(kinds), "pods": 1, "slots": THREE_SLOTS}
    base: Manifest = {
        "seed": 1,
        "placement": {"profileSteps": 0},  # how long a profile takes to come is no part of a story
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
    def reached(state: State) -> bool:
        return has(state.job, "Running=True") and int(state.job["status"].get("step", 0)) >= number

    return Act(when=reached, what=f"step {number}", do=do, job=job)


def once(text: str, do: Do, *, job: str = "a") -> Act:
    """`once("Suspended=True", ...)`, `once("Running=True/Stepping", ...)`"""
    return Act(when=is_(text), what=text, do=do, job=job)


def joined(do: Do, *, job: str = "a") -> Act:
    """All of JOINED was told, and there was no step yet."""
    wanted = ("PodsReady=True", "PlanApplied=True", "Running=False/WaitingForWorkers")
    return Act(when=lambda state: all(has(state.job, text) for text in wanted), what="JOINED", do=do, job=job)


def interruption(do: Do) -> tuple[Act, Act]:
    """The job is degraded, and at work no more: before both were told, Running=True may still be that of before."""
    away = Act(when=lambda state: not has(state.job, "Running=True"), what="not to be at work", do=do)
    return once("Degraded=True", nothing), away


def recovered(do: Do) -> Act:
    def holds(state: State) -> bool:
        return has(state.job, "Running=True") and has(state.job, "Degraded=False")

    return Act(when=holds, what="to be well again", do=do)


def is_(text: str) -> Callable[[State], object]:
    return lambda state: has(state.job, text)


def finished(state: State) -> bool:
    return has(state.job, "Complete=True") or has(state.job, "Failed=True")


def gone(state: State) -> bool:
    return state.gone


# --- what to do -------------------------------------------------------------------------------------------------------
def touch(*files: str) -> Do:
    async def do(world: World) -> None:
        for name in files:
            world.touch(name)

    return do


def untouch(*files: str) -> Do:
    async def do(world: World) -> None:
        for name in files:
            world.untouch(name)

    return do


GO: Final = touch("go")
HOLD: Final = touch("hold")
RELEASE: Final = untouch("hold")


async def nothing(world: World) -> None:
    """For an act that only waits."""


def kill(part: str, *, held: bool = False) -> Do:
    """`held`: no environment begins its next life until RELEASE, so that the driver reports in between."""

    async def do(world: World) -> None:
        if held:
            world.touch("hold")
        await world.kill("a", part)

    return do


def delete_pod(component: str, *, pool: str = "", held: bool = False) -> Do:
    """`held`: as of `kill`."""

    async def do(world: World) -> None:
        if held:
            world.touch("hold")
        await world.delete_pod("a", component, pool=pool)

    return do


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


def apply(manifest: Manifest, *, held: bool = False) -> Do:
    """At the pace of before `go`."""

    async def do(world: World) -> None:
        world.untouch("go")
        if held:
            world.touch("hold")
        await world.apply(manifest)

    return do


def kept(*names: str) -> Do:
    """Job a has a single checkpoint, one of these: whoever looks too late for the first sees the next."""

    async def do(world: World) -> None:
        def hold() -> bool:
            found = [path.parent.name for path in (world.folder / "a").glob("b*/COMMIT")]
            return len(found) == 1 and found[0] in names

        await world.until(hold, what=f"a single checkpoint of {names}")

    return do


def ended_by(most: int) -> Do:
    """Job a has gone so far at most, and its last step is kept. An edit takes its time: one less than the job's steps
    proves that it ended the job."""

    async def do(world: World) -> None:
        found = await world.job("a")
        assert found is not None
        status = found["status"]
        assert status["step"] <= most
        assert status["checkpoint"]["step"] == status["step"]
        assert (world.folder / "a" / f"b0-{status['step']}" / "COMMIT").exists()

    return do


async def delete(world: World) -> None:
    await world.delete("a")


def remade(manifest: Manifest) -> Do:
    """Deleted, and made again under its name once nothing of it is left."""

    async def do(world: World) -> None:
        await world.delete("a")
        await world.until(lambda: world.is_gone("a"), what="nothing to be left of job a")
        world.untouch("go")
        await world.apply(manifest)

    return do


async def away(world: World) -> None:
    await world.scheduler_away()


async def back(world: World) -> None:
    await world.scheduler_back()


async def spoil_checkpoint(world: World) -> None:
    """One that says of itself that its file has 99 bytes; it has 2. It is read after RELEASE."""
    world.touch("hold")
    folder = world.folder / "a" / "b0-4"
    (folder / "actor").mkdir(parents=True)
    (folder / "COMMIT").write_text('{"format": 1, "version": "b0-4", "files": {"driver.json": 99}}')
    (folder / "driver.json").write_text("{}")
    for path in (folder, folder / "actor", folder.parent):
        path.chmod(0o777)
