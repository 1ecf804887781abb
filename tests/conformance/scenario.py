"""What a scenario is, and how it is run in a world: apply, act when a state is observed, end, look at what is left."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.conformance.recorder import Recorder, State, Track, Transition, has, normal
from tests.conformance.world import WAIT_S, Backend, Manifest, World

Do = Callable[[World], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Act:
    """Once `job` is in the state that `when` tells, `do`. Acts come one after the other, and each looks at all states
    from the one of the act before it on."""

    when: Callable[[State], object]
    what: str
    do: Do
    job: str = "a"


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """Of one job."""

    children: tuple[str, ...] = ()
    """Kinds of what is left, with numbers: "Pod 1"."""
    step: int | None = None
    """None: the clock decides which."""
    attempt: int = 1
    life: int = 1
    restarts: tuple[str, ...] = ()
    """"POD CAUSE" of each replaced pod."""
    failure: str = ""
    """role, exit code and reason of firstFailure: "env 64 UserError"."""
    pods: tuple[str, ...] = ()
    """Of those left: "a-driver-a1 Succeeded 0"."""
    said: str = field(default="", compare=False)
    """Message of firstFailure, for whoever looks for the difference."""


def like(expected: End | None, seen: End | None) -> End | None:
    """What is expected, with what was seen where it says None."""
    if expected is None or seen is None or expected.step is not None:
        return expected
    return replace(expected, step=seen.step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    transitions: tuple[Transition, ...]
    end: End | None
    """None: the job is gone, with all its children."""


def beside_a_sidecar(expected: Expected) -> Expected:
    """The same job whose pods have a container that does not end by itself: of one that has ended no pod is left."""
    end = expected.end
    if end is not None and end.pods:
        rest = tuple(kind for kind in end.children if not kind.startswith("Pod "))
        expected = replace(expected, end=replace(end, children=rest, pods=()))
    return expected


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    name: str
    jobs: tuple[Manifest, ...]
    expected: Mapping[str, Expected]
    acts: tuple[Act, ...] = ()
    until: Callable[[State], object]
    """Of the last job in `expected`: the scenario is over."""
    before: Do | None = None
    alone: bool = False
    """It disturbs other jobs of the control plane."""


@dataclass(slots=True)
class Outcome:
    transitions: dict[str, list[Transition]] = field(default_factory=dict)
    raw: dict[str, list[list[Transition]]] = field(default_factory=dict)
    ends: dict[str, End | None] = field(default_factory=dict)
    error: str = ""
    trace: str = ""
    seconds: float = 0.0

    def story(self) -> str:
        """Write by write, for whoever looks for the difference."""
        lines = [f"{self.error or 'it ended'} after {self.seconds:.1f} s"]
        for label, writes in self.raw.items():
            lines += [f"job {label}:", *("  " + ", ".join(write) for write in writes)]
        lines += [f"first failure of job {label}: {end.said}" for label, end in self.ends.items() if end and end.said]
        return "\n".join([*lines, *self.trace.splitlines()])


async def run(scenario: Scenario, backend: Backend, folder: Path) -> Outcome:
    outcome, loop = Outcome(), asyncio.get_running_loop()
    started = loop.time()
    try:
        async with asyncio.timeout(3 * WAIT_S), backend.world(folder) as world:
            recorder, opened = Recorder(), asyncio.Event()
            watching = asyncio.create_task(_watch(world, recorder, opened))
            try:
                await opened.wait()  # bounded by the scenario's own time
                await _play(scenario, world, recorder)
                for label in scenario.expected:
                    outcome.ends[label] = await _end(world, recorder.tracks[label], label)
            finally:
                watching.cancel()
                [broken] = await asyncio.gather(watching, return_exceptions=True)
                outcome.raw = {label: track.writes for label, track in recorder.tracks.items()}
                outcome.transitions = {label: normal(track.writes) for label, track in recorder.tracks.items()}
            if not isinstance(broken, asyncio.CancelledError):
                raise AssertionError("the watch ended before the scenario") from broken
    except Exception as error:  # noqa: BLE001  of this scenario: it would cancel those that run beside it
        outcome.error, outcome.trace = f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error))
    outcome.seconds = loop.time() - started
    return outcome


async def _watch(world: World, recorder: Recorder, opened: asyncio.Event) -> None:
    async for kind, job in world.changes(opened):
        recorder.feed(kind, job)


async def _play(scenario: Scenario, world: World, recorder: Recorder) -> None:
    if scenario.before is not None:
        await scenario.before(world)
    for job in scenario.jobs:
        await world.apply(job)
    seen: dict[str, int] = {}
    for act in scenario.acts:
        since = seen.get(act.job, 0)
        seen[act.job] = await recorder.until(act.job, act.when, what=act.what, timeout_s=WAIT_S, since=since)
        await act.do(world)
    for label in scenario.expected:
        await recorder.until(label, scenario.until, what="the end", timeout_s=WAIT_S, since=seen.get(label, 0))


async def _end(world: World, track: Track, label: str) -> End | None:
    name = label.partition("#")[0]
    job = await world.job(name)
    if job is None or job["metadata"]["uid"] != track.uid:
        if job is None:
            await world.until(lambda: world.is_gone(name), what=f"nothing to be left of job {name}")
        return None
    await world.until(lambda: _at_rest(world, name), what=f"the pods of job {name} to be at rest")
    job, children = await world.job(name), await world.children(name)
    assert job is not None, f"job {name} is gone"
    status = job["status"]
    kinds = [c["kind"] for c in children]
    failure = status.get("firstFailure")
    return End(
        children=tuple(f"{kind} {kinds.count(kind)}" for kind in sorted(set(kinds))),
        step=status.get("step", 0),
        attempt=status.get("attempt", 0),
        life=status.get("life", 1),
        restarts=tuple(entry.partition(" ")[2] for entry in status.get("restarts", ())),
        failure=f"{failure.get('role', '')} {failure.get('exitCode', 0)} {failure.get('reason')}" if failure else "",
        pods=tuple(sorted(_ended(c) for c in children if c["kind"] == "Pod")),
        said=str(failure.get("message", "")) if failure else "",
    )


async def _at_rest(world: World, job: str) -> bool:
    """No pod is on its way out, and what is left has ended, if the job has."""
    pods = [c for c in await world.children(job) if c["kind"] == "Pod"]
    found = await world.job(job)
    over = found is not None and (has(found, "Complete=True") or has(found, "Failed=True"))
    leaving = any("deletionTimestamp" in p["metadata"] for p in pods)
    return not leaving and not (over and any(p["status"].get("phase") not in ("Succeeded", "Failed") for p in pods))


def _ended(pod: Manifest) -> str:
    """
    >>> _ended({"metadata": {"name": "a-driver-a1"}, "status": {"phase": "Pending"}})
    'a-driver-a1 Pending'
    """
    status = pod.get("status") or {}
    codes = [
        str(c["state"]["terminated"]["exitCode"])
        for c in status.get("containerStatuses") or []
        if "terminated" in (c.get("state") or {})
    ]
    return " ".join([pod["metadata"]["name"], str(status.get("phase", "")), *codes])
