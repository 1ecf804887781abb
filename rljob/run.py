"""`rljob run`: check the manifest, run it here, show how it goes, say how it ended. Owns exit codes and signals.

Ctrl-C once: the job stops at the next step boundary with a checkpoint; twice: everything ends at once.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import logging.handlers
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rlinf_api import flows, names
from rlinf_api.conditions import written as condition
from rlinf_api.errors import InvalidManifest, RLinfError, UserError
from rlinf_api.job import PlacementMode, Problem, RLJobSpec
from rlinf_api.profile import Profile
from rlinf_operator.manifests import pods
from rlinf_operator.manifests.metadata import JobMeta
from rlinf_operator.settings import DEFAULTS
from rljob import by_hand, picture, reasons, timeline
from rljob import manifest as manifests
from rljob import plan as plans
from rljob.local import podspec, room
from rljob.local.pod_life import LOCAL_MACHINE
from rljob.local.runner import NAMESPACE, LocalRun, WorkDir, default_work_dir
from rljob.losable import Losable
from rljob.progress import ProgressLines

EXIT_COMPLETE, EXIT_FAILED, EXIT_BAD_MANIFEST, EXIT_INTERRUPTED = 0, 1, 2, 130
STUCK_TIMEOUT_S: Final = 60.0  # for a port of all loopback addresses to become free, or room where there is none
LOG_BYTES: Final = 16 << 20  # rljob.log's, as a worker's log has; then .1
DRAWN_SPANS: Final = 200_000  # the newest, in two seconds; `rljob timeline` reads more
ACCELERATORS: Final = {"nvidia.com/gpu": "/dev/nvidia0", "amd.com/gpu": "/dev/kfd"}
"""Extended resource to the device file that is there where the machine has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    file: Path
    seed: int | None = None
    assignments: tuple[str, ...] = ()
    work_dir: Path | None = None
    json_output: bool = False
    simulate_slots: bool = False
    plan: Path | None = None
    """The first plan, by hand."""
    profile: Path | None = None
    """What an earlier run measured: the first plan goes by it."""
    runtimes: tuple[Path, ...] = ()
    """Files of RLRuntimes, beside those of `file`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a run ended, for people and for the JSON line."""

    condition: str
    reason: str
    message: str
    job: Mapping[str, Any]
    exit_code: int


class RunWords:
    """Where a run's words go: a job that trains does not end because nobody can be told of it."""

    def __init__(self, options: Options) -> None:
        self._answers, self.errors = Losable(sys.stdout), Losable(sys.stderr)
        self._is_asked = options.json_output
        self.progress = self.errors if self._is_asked else self._answers

    def answer(self, found: Mapping[str, Any]) -> None:
        """The object of --output json."""
        if not self._is_asked:
            return
        print(json.dumps(found), file=self._answers, flush=True)
        if (lost := self._answers.lost) is not None:
            print(f"the object of --output json was not written: {lost.strerror or lost}", file=self.errors)

    def end(self) -> None:
        self._answers.end()
        self.errors.end()


def run(options: Options) -> int:
    said = RunWords(options)
    try:
        return _checked_and_run(options, said)
    finally:
        said.end()


def _checked_and_run(options: Options, said: RunWords) -> int:
    started = time.monotonic()
    try:
        checked = _checked(options)
        plan, profiles = _first_plan(options, checked), _profiles(options, checked)
    except UserError as error:
        return _refused(said, str(error))
    if checked.problems or checked.spec is None:
        return _refused(said, *map(str, checked.problems))
    if beyond := [str(problem) for problem in beyond_local_mode(checked.name, checked.spec)]:
        return _refused(said, *beyond, reason="NotSupportedYet")
    work = WorkDir(options.work_dir or default_work_dir(checked.name))
    try:
        work.claim(checked.name, checked.spec)
        _log_to(work.log)
        ending = asyncio.run(_run(checked, checked.spec, work=work, stream=said.progress, plan=plan, profiles=profiles))
    except UserError as error:
        return _refused(said, str(error))
    except RLinfError as error:
        ending = Ending(condition="Failed", reason=error.reason, message=str(error), job={}, exit_code=EXIT_FAILED)
    except KeyboardInterrupt:  # before the signal handler was there, or after it had gone
        ending = _interrupted({})
    except Exception as error:  # top of the command: a sentence for people, the stack for us
        logging.getLogger(__name__).exception("rljob run failed")
        message = f"{type(error).__name__}: {error}; this is a bug in rljob, its stack is in {_shown(work.log)}"
        ending = Ending(condition="Failed", reason="InternalError", message=message, job={}, exit_code=EXIT_FAILED)
    finally:
        work.release()
    _draw(work.path)
    again = to_go_on(options, checked.spec, work_dir=work.path)
    _tell(ending, again=again, work_dir=work.path, wall_s=time.monotonic() - started, said=said)
    return ending.exit_code


def _interrupted(job: Mapping[str, Any]) -> Ending:
    status = job.get("status") or {}
    saved = (status.get("checkpoint") or {}).get("step", 0)
    message = f"stopped at once after step {status.get('step', 0)}; "
    message += f"the last checkpoint that was reported is of step {saved}" if saved else "no checkpoint was reported"
    return Ending(condition="Interrupted", reason="Interrupted", message=message, job=job, exit_code=EXIT_INTERRUPTED)


def _checked(options: Options) -> manifests.Checked:
    given = manifests.given(options.file, beside=options.runtimes)
    raw = given.the_job()
    if isinstance(raw.get("spec"), dict):
        raw["spec"] = flows.filled(raw["spec"])  # so that --set may name a role which the file does not
    manifests.override(raw, options.assignments)
    if options.seed is not None:
        manifests.override(raw, [f"spec.seed={options.seed}"])
    raw = manifests.resolved(raw, given.runtimes)
    checked = manifests.check(raw, has_plan=options.plan is not None)
    if options.plan is None and checked.spec is not None and checked.spec.placement.mode is PlacementMode.PINNED:
        raise UserError(
            "spec.placement.mode is Pinned, and a run on this machine begins without plans", wanted="Auto, or --plan",
            next="give the plan with --plan FILE",
        )  # fmt: skip
    if checked.spec is not None and not checked.problems:
        _accelerators(raw, checked.spec, simulate=options.simulate_slots)
        checked = manifests.check(raw, has_plan=options.plan is not None) if options.simulate_slots else checked
    return checked


def _first_plan(options: Options, checked: manifests.Checked) -> dict[str, Any] | None:
    if options.plan is None or checked.spec is None or checked.problems:
        return None
    try:
        return by_hand.first(plans.read(options.plan), job=checked.name, spec=checked.spec)
    except InvalidManifest as error:
        raise InvalidManifest(f"plan {options.plan} cannot be used", got=str(error)) from error


def _profiles(options: Options, checked: manifests.Checked) -> tuple[Profile, ...]:
    """The profiles of the same job on the same hardware, by its key."""
    if options.profile is None or checked.spec is None or checked.problems:
        return ()
    return reasons.of_key(options.profile, checked.spec)


def _accelerators(raw: dict[str, Any], spec: RLJobSpec, *, simulate: bool) -> None:
    """A pool that names an accelerator which this machine lacks is refused, or becomes a pool of CPU slots."""
    for pool in spec.pools:
        device = ACCELERATORS.get(pool.slots.resource)
        if not pool.slots.resource or (device is not None and os.path.exists(device)):
            continue
        if not simulate:
            raise UserError(
                f"pool {pool.name!r} needs {pool.slots.resource}, which this machine does not have",
                next="run it on a cluster, or say --simulate-slots to run its roles on CPU",
            )
        none = (f"spec.pools[{pool.name}].slots.{field}=''" for field in ("resource", "hostMemory"))
        manifests.override(raw, none)


def beyond_local_mode(name: str, spec: RLJobSpec) -> Iterator[Problem]:
    """What the pools' templates ask for and processes cannot be given: the pods as the operator renders them, looked at
    before any is made. One that is refused later is replaced, and refused again; one that waits for a Secret waits for
    ever, as nobody but the operator makes objects of a local run."""
    if spec.managed_by != names.OPERATOR:
        message = f"got {spec.managed_by!r}: another controller is to run it, and this machine has none; remove it"
        yield Problem(field="spec.managedBy", message=message)
    job = JobMeta(namespace=NAMESPACE, name=name, uid="")
    told: set[str] = set()
    for pool in spec.pools:
        render = functools.partial(pods.worker, job, spec, pool=pool.name, ordinal=0)
        for sentence in _beyond(f"pool:{pool.name}", render, name=name):
            told.add(sentence)
            yield Problem(field=f"spec.pools[{pool.name}].template", message=sentence)
    for sentence in _beyond("driver", functools.partial(pods.driver, job, spec), name=name):
        if sentence not in told:  # of spec.template, which holds for the pools as well
            yield Problem(field="spec.driver.template", message=sentence)


def _beyond(part: str, render: Callable[..., pods.Rendered], *, name: str) -> list[str]:
    secret = names.secret_name(name, part, uid="")
    made = {("Secret", secret): (), ("ConfigMap", names.config_name(name)): (names.JOB_FILE,)}
    try:
        pod = render(attempt=1, life=1, settings=DEFAULTS).manifest
        return [*podspec.refusals(pod), *podspec.unmade(pod, made=made)]
    except (KeyError, TypeError, AttributeError) as error:  # shapes that an API server would refuse
        return [f"is no pod's: got {error!r}; compare it with what `kubectl explain pod.spec` says"]


async def _run(
    checked: manifests.Checked,
    spec: RLJobSpec,
    *,
    work: WorkDir,
    stream: Losable,
    plan: dict[str, Any] | None = None,
    profiles: tuple[Profile, ...] = (),
) -> Ending:
    loop, progress, interrupts = asyncio.get_running_loop(), ProgressLines(stream), Interrupts()
    interrupts.listen(loop.add_signal_handler)  # until the loop ends: nothing may break off the clearing up
    progress.say(f"job {checked.name} in {_shown(work.path)}")
    async with LocalRun(checked.manifest, spec, work_dir=work, plan=plan, profiles=profiles) as local:
        watching = asyncio.create_task(_watch(local, progress))
        try:
            await _first_of(watching, interrupts.first)
            if not watching.done():
                progress.say("stopping at the next step boundary, with a checkpoint; Ctrl-C again stops at once")
                await local.suspend()
                await _first_of(watching, interrupts.second)
            if not watching.done():
                progress.say("stopping at once")
                local.hurry()
                return _interrupted(await local.job())
            return watching.result()
        finally:
            watching.cancel()


class Interrupts:
    """SIGINT and SIGTERM, counted. Two that come together are one word said twice: a terminal tells the whole process
    group, and whoever started rljob may pass the signal on. SIGHUP, of a terminal that closed or a connection that was
    lost, is a first one and never a second: nobody is left there to be in a hurry."""

    SAME_WORD_S: Final = 0.2

    def __init__(self) -> None:
        self.first, self.second = asyncio.Event(), asyncio.Event()
        self._last = float("-inf")

    def listen(self, handle: Callable[[int, Callable[[], None]], None]) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            handle(number, self.count)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup: the run is to outlast its terminal
            handle(signal.SIGHUP, self.hang_up)

    def hang_up(self) -> None:
        self._last = time.monotonic()
        self.first.set()

    def count(self) -> None:
        before, self._last = self._last, time.monotonic()
        if self._last - before < self.SAME_WORD_S:
            return
        (self.second if self.first.is_set() else self.first).set()


async def _first_of(task: asyncio.Task[Any], event: asyncio.Event) -> None:
    waiting = asyncio.create_task(event.wait())
    try:
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()


async def _watch(local: LocalRun, progress: ProgressLines) -> Ending:
    """Until the job has ended, or a part of rljob, or the job cannot go on: what no node of a cluster has today it may
    have tomorrow, but nobody adds a node to this machine."""
    changes, stuck_at, was_held_up = local.changes(), 0.0, ""
    job: dict[str, Any] = {}
    following = asyncio.ensure_future(anext(changes, None))
    try:
        while True:
            done, _ = await asyncio.wait({following}, timeout=1.0)
            if local.kubelet.failure is not None:
                raise local.kubelet.failure
            if done:
                found = following.result()
                if found is None:
                    raise UserError("the job's object was deleted while it ran", next="start it again")
                job = found
                following = asyncio.ensure_future(anext(changes, None))
                progress.show(job)
                if (ending := ended(job)) is not None:
                    return ending
            if (held_up := local.kubelet.held_up) and not was_held_up:
                progress.say(f"this machine cannot run a pod, which is tried again: {held_up}")
            was_held_up = held_up
            reason, stuck = _stuck(job, held_up)
            stuck_at = (stuck_at or time.monotonic()) if stuck else 0.0
            if stuck and time.monotonic() - stuck_at > STUCK_TIMEOUT_S:
                return Ending(condition="Failed", reason=reason, message=stuck, job=job, exit_code=EXIT_FAILED)
    finally:
        following.cancel()


def _stuck(job: Mapping[str, Any], held_up: str) -> tuple[str, str]:
    """(reason, message) of what keeps the job from going on; empty while it is at work, even without some pod."""
    ready = condition(job, "PodsReady")
    if (ready.get("status"), ready.get("reason")) == ("False", "Unschedulable"):
        return "Unschedulable", str(ready.get("message", ""))
    return LOCAL_MACHINE, "" if condition(job, "Running").get("status") == "True" else held_up


def ended(job: Mapping[str, Any]) -> Ending | None:
    """Complete, Failed, suspended on request, or refused by the operator."""
    for kind, wanted, code in (
        ("Complete", "True", EXIT_COMPLETE),
        ("Failed", "True", EXIT_FAILED),
        ("Suspended", "True", EXIT_INTERRUPTED),
        ("Valid", "False", EXIT_BAD_MANIFEST),
    ):
        found = condition(job, kind)
        if found.get("status") == wanted:
            shown = kind if wanted == "True" else "Invalid"
            return Ending(
                condition=shown, reason=found["reason"], message=found.get("message", ""), job=job, exit_code=code
            )
    return None


def result(ending: Ending, *, work_dir: Path, wall_s: float) -> dict[str, Any]:
    """The object of --output json."""
    status = ending.job.get("status") or {}
    numbers = {m["name"]: float(m["value"]) for m in status.get("metrics", ())}
    answer: dict[str, Any] = {
        "condition": ending.condition,
        "reason": ending.reason,
        "message": ending.message,
        "steps": status.get("step", 0),
        "wall_s": round(wall_s, 3),
        "work_dir": str(work_dir),
        "plan": (status.get("plan") or {}).get("current", ""),
    }
    for name in ("return_mean", "env_steps", "reward_mean", "tokens_per_s", "loss"):
        if name in numbers:
            answer[name] = numbers[name]
    lines, seconds = _stepping_seconds(work_dir / "metrics.jsonl", life_steps=int(status.get("step", 0)))
    if "env_steps" in numbers and seconds > 0:
        per_step = numbers["env_steps"] / max(1, int(status.get("step", 1)))
        answer["env_steps_per_s"] = round(per_step * lines / seconds, 1)
    return answer


def _stepping_seconds(metrics: Path, *, life_steps: int) -> tuple[int, float]:
    """(steps of the last branch, their seconds), from metrics.jsonl: a run that goes on counts itself only."""
    try:
        lines = list(timeline.read_lines(metrics, lambda _: timeline.STEP))
    except UserError:  # the run has ended, whatever became of its file
        return 0, 0.0
    own = [line for line in lines if line["branch"] == lines[-1]["branch"]][-life_steps:]
    return len(own), sum(float(line["step_s"]) for line in own)


def _tell(ending: Ending, *, again: str, work_dir: Path, wall_s: float, said: RunWords) -> None:
    answer, stream = result(ending, work_dir=work_dir, wall_s=wall_s), said.progress
    facts = [f"{answer['steps']} steps in {wall_s:.1f} s"]
    facts += [f"return {answer['return_mean']:.1f}"] if "return_mean" in answer else []
    facts += [f"{answer['env_steps_per_s']:.0f} env steps/s"] if "env_steps_per_s" in answer else []
    print(f"{ending.condition}: {ending.message}", file=stream)
    print(f"{', '.join(facts)}; everything is in {_shown(work_dir)}", file=stream)
    if ending.exit_code == EXIT_FAILED:
        print(f"what happened is in {_shown(work_dir / 'events.jsonl')}, what was printed in logs/", file=stream)
    if ending.exit_code == EXIT_INTERRUPTED:
        print(f"to go on: {again}", file=stream)
    said.answer(answer)


def to_go_on(options: Options, spec: RLJobSpec, *, work_dir: Path) -> str:
    """The command that is the same job in the same work dir, for a shell: with less it is refused, or another job.

    >>> to_go_on(Options(file=Path("job.yaml"), seed=7), spec, work_dir=Path("runs/my job"))
    "rljob run job.yaml --work-dir 'runs/my job' --seed 7"
    """
    words = ["rljob", "run", str(options.file), "--work-dir", _shown(work_dir)]
    words += ["--seed", str(options.seed)] if options.seed is not None else []
    words += [word for assignment in options.assignments for word in ("--set", assignment)]
    words += ["--set", "spec.suspend=false"] if spec.suspend else []
    words += ["--simulate-slots"] if options.simulate_slots else []
    words += ["--plan", str(options.plan)] if options.plan is not None else []
    words += ["--profile", str(options.profile)] if options.profile is not None else []
    words += [word for file in options.runtimes for word in ("--runtime", str(file))]
    command = shlex.join(words)
    return f"{command}, with the same manifest on its standard input" if str(options.file) == "-" else command


def _draw(work_dir: Path) -> None:
    """timeline.json and timeline.svg; a run is over whether it can be drawn or not."""
    if not (work_dir / "spans").is_dir():
        return
    try:
        record = timeline.read(work_dir, max_spans=DRAWN_SPANS)
        timeline.write(record, work_dir / timeline.FILE)
        picture.write(record, work_dir / picture.FILE)
    except (RLinfError, OSError, ValueError, KeyError) as error:
        logging.getLogger(__name__).warning("no timeline was written", extra={"error": str(error)})


def _refused(said: RunWords, *sentences: str, reason: str = "InvalidSpec") -> int:
    """Before anything was started."""
    for line in sentences:
        print(line, file=said.errors)
    answer = {"condition": "Invalid", "reason": reason, "message": "; ".join(sentences)}
    said.answer({**answer, "steps": 0, "wall_s": 0.0, "work_dir": "", "plan": ""})
    return EXIT_BAD_MANIFEST


def _shown(path: Path) -> str:
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


class _LogFile(logging.handlers.RotatingFileHandler):
    """A line that finds no room is lost; the log goes on when there is some."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)


def _log_to(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = _LogFile(path, maxBytes=LOG_BYTES, backupCount=1, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise UserError(
            f"log {path} cannot be written", got=room.told(error, path), next="make room, or choose another --work-dir"
        ) from error
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
