"""Steps as gangs report them: done by every rank of all, committed once, answered word for word if asked again.

Called by core.py. The rules of what may commit are steps.py's; here is who is told, and what is written down.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_api.names import WorkerId
from rlinf_worker.channels import messages
from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.driver import idle
from rlinf_worker.driver.exchange import Exchange
from rlinf_worker.driver.job import Dirty, Job
from rlinf_worker.driver.recovery import BETWEEN, Recoveries
from rlinf_worker.driver.steps import Committed
from rlinf_worker.queues.expected import Ended

CHECKPOINT_RETRY_S: Final = 10.0
"""After a checkpoint that could not be written: each try costs a step its time, and somebody has to clear the disk."""


STEPS_KEPT: Final = 16  # more than may be open at once; who reports of others finds no reader
NUMBERS_KEPT: Final = 512
"""By name, of a job: all of them stand in its status, an object of the API server's, and each is a time series."""
NAME_CHARS: Final = 200
KEYS_KEPT: Final = 100_000  # of a step: more than it has units; what comes after is taken as said without a key


@dataclass(slots=True)
class _Said:
    totals: dict[str, float] = field(default_factory=dict)
    sums: dict[str, dict[str, float]] = field(default_factory=dict)  # by key: what of them is in the totals


class Reported:
    """What workers say of a step by `ctx.report`, until it goes out with the next commit. A unit that was lost is made
    again and reported again: numbers under its key take the place of those before. Numbers without a key do not say
    what they are of, and add up over the lives of a worker."""

    def __init__(self) -> None:
        self._steps: dict[int, _Said] = {}

    def add(self, numbers: Mapping[str, float], *, step: int, key: str = "") -> dict[str, float]:
        """The totals of those numbers by now: summed where the name says so, else the last value."""
        said = self._steps.setdefault(step, _Said())
        before: dict[str, float] = {}
        if key and (key in said.sums or len(said.sums) < KEYS_KEPT):
            before = said.sums.setdefault(key, {})
        for name, value in numbers.items():
            if name.endswith(("_sum", "_count")):
                said.totals[name] = said.totals.get(name, 0.0) + value - before.get(name, 0.0)
                before[name] = value
            else:
                said.totals[name] = value
        while len(self._steps) > STEPS_KEPT:
            del self._steps[next(iter(self._steps))]
        return {name: said.totals[name] for name in numbers}

    def take(self, step: int) -> dict[str, float]:
        said = self._steps.pop(step, None)
        return said.totals if said is not None else {}

    def forget(self) -> None:
        """The steps are made again, on another branch."""
        self._steps.clear()


class Numbers(dict[str, float]):
    """The newest of each name."""

    def __init__(self) -> None:
        super().__init__()
        self.left_out = 0

    def known(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """Those of these that there is room for; the others are counted."""
        room, found = NUMBERS_KEPT - len(self), dict[str, float]()
        for name, value in numbers.items():
            is_new = name not in self
            if not is_new or (room > 0 and len(name) <= NAME_CHARS):
                found[name] = value
                room -= is_new
        self.left_out += len(numbers) - len(found)
        return found


class Commits:
    def __init__(
        self, job: Job, exchange: Exchange, recoveries: Recoveries, *, wants_checkpoint: Callable[[], bool]
    ) -> None:
        """`wants_checkpoint`: whether the step that commits gets one out of turn."""
        self._job, self._exchange, self._recoveries = job, exchange, recoveries
        self._wants_checkpoint = wants_checkpoint
        self.last: pb.StepCommit | None = None
        self.last_at = 0.0
        self.step_seconds: deque[float] = deque(maxlen=50)
        self.metrics = Numbers()
        self._owed_at: float | None = None  # when a checkpoint that could not be written is asked for again
        self._unsaved: PolicyVersion | None = None  # whose checkpoint could not be written
        self.problem = ""  # why the last checkpoint could not be written; empty: it could
        self.failing_since: float | None = None
        self._early: dict[tuple[WorkerId, int, int], tuple[str, pb.StepDone]] = {}  # by rank, branch and step
        self._reported = Reported()
        self._accounts: dict[int, dict[WorkerId, pb.Account]] = {}  # by step
        self._steps = idle.IdleSteps()
        self.on_committed: Callable[[Committed], None] = lambda done: None

    def forget(self) -> None:
        """The steps since a checkpoint are made again, on another branch."""
        self.last = None
        self._reported.forget()

    def _told(self, version: PolicyVersion) -> pb.StepCommit | None:
        """The last word, where it made that version."""
        return self.last if self.last is not None and messages.version_from_pb(self.last.version) == version else None

    @property
    def is_saving(self) -> bool:
        """The newest step's checkpoint was asked for, and it is not known what became of it."""
        version = self._job.ledger.version
        told = self._told(version)
        return told is not None and told.checkpoint and self._unsaved != version and not self._job.is_saved

    @property
    def told_last(self) -> bool:
        """The gang was told that it has committed its last step, by this driver or the one before: it does no other."""
        told = self._told(self._job.ledger.version)
        return told is not None and told.last

    @property
    def rests(self) -> bool:
        """After a checkpoint that could not be written: none is asked for out of turn."""
        return self._owed_at is not None and self._job.clock() < self._owed_at

    def on_step_done(self, wid: WorkerId, gang: str, done: pb.StepDone) -> None:
        job, ledger = self._job, self._job.ledger
        version = ledger.version
        if done.highest_driver_attempt > job.attempt:
            text = f"{wid} obeys driver attempt {done.highest_driver_attempt}, this is {job.attempt}"
            job.stop(text, stale=True)
        elif done.step <= version.number and done.branch == version.branch:  # the answer was lost with a stream
            job.sessions.tell(wid, step_commit=self._again(done.step))
        elif ledger.done(
            done.step,
            branch=done.branch,
            gang=gang,
            rank=done.rank,
            keys=done.keys,
            metrics=json.loads(done.metrics_json or "{}"),
            ended=map(Ended.from_pb, done.ended),
        ):
            self.try_commit(done.step)
        elif done.branch >= version.branch:
            # A new driver hears of it before its flow has opened the step, with each connection again.
            self._early[wid, done.branch, done.step] = gang, done

    def learn(self, hello: pb.Hello, *, is_rank: bool) -> None:
        """What a new driver cannot know: which step has committed, in which words, which branches have been. `is_rank`:
        of a rank that ends steps and has begun."""
        ledger = self._job.ledger
        ledger.heard_of(hello.highest_branch)
        for held in (*hello.produced, *hello.taken):
            ledger.heard_of(max(held.unit.branch, held.unit.version.branch))
        if is_rank and hello.HasField("last_commit") and self._is_news(hello.last_commit):
            self.last = hello.last_commit
        if hello.HasField("committed"):
            ledger.heard_of(hello.committed.branch)
            state_json = hello.last_commit.state_json or hello.state_json
            if is_rank and ledger.adopt(messages.version_from_pb(hello.committed), state_json=state_json):
                self._exchange.forget_committed(ledger.version)
                self.hear_early()

    def _is_news(self, commit: pb.StepCommit) -> bool:
        said = messages.version_from_pb(commit.version)
        return self.last is None or said > messages.version_from_pb(self.last.version)

    def hear_early(self) -> None:
        early, self._early = self._early, {}
        for (wid, _, _), (gang, done) in early.items():
            self.on_step_done(wid, gang, done)

    def try_commit(self, step: int) -> None:
        job = self._job
        worlds = {role: len(job.members.of_role(role)) for role in job.topology.gang_roles}
        tickets_of = partial(self._exchange.ends.tickets_of, step)
        committed = job.ledger.commit(step, worlds=worlds, now=job.clock(), tickets_of=tickets_of)
        if committed is not None:
            self._on_committed(committed)

    def _again(self, step: int) -> pb.StepCommit:
        """The very same answer where it is known: ranks that differ on `checkpoint` would wait for each other."""
        ledger = self._job.ledger
        if (told := self._told(PolicyVersion(ledger.version.branch, step))) is not None:
            return told
        return self._message(step, checkpoint=ledger.has_checkpoint(step), last=step >= ledger.steps)

    def _message(self, step: int, *, checkpoint: bool, last: bool, seconds: float = 0.0) -> pb.StepCommit:
        job = self._job
        return pb.StepCommit(
            step=step,
            version=messages.version_to_pb(PolicyVersion(job.ledger.version.branch, step)),
            checkpoint=checkpoint and bool(job.checkpoint_uri),
            state_json=job.ledger.state_json(seed=job.flow_settings.seed),
            last=last,
            time=time.time(),
            seconds=seconds,
            steps=job.ledger.steps,
            checkpoint_keep=job.spec.checkpoint.keep,
        )

    def _on_committed(self, done: Committed) -> None:
        job = self._job
        checkpoint = done.checkpoint or self._wants_checkpoint()
        if self._owed_at is not None and job.clock() >= self._owed_at:
            checkpoint, self._owed_at = True, None
        message = self.last = self._message(done.step, checkpoint=checkpoint, last=done.last, seconds=done.seconds)
        ended_at, self.last_at = self.last_at, job.clock()  # the first: of the step before, whose accounts are here
        for worker in job.members.workers:  # the gangs, and all others so that they close the step's account
            job.sessions.tell(worker, step_commit=message)
        self._exchange.close_step(done.step, branch=done.version.branch)
        self.step_seconds.append(done.seconds)
        self.metrics.update(step_s=done.seconds)
        self.metrics.update(self._told_numbers(done.metrics))
        accounts = self._accounts.pop(done.step - 1, {})
        workers = job.members.workers.values()
        shares = self._steps.shares(done.step - 1, workers, accounts)
        self._steps.ended(done.step, workers, at=self.last_at, seconds=done.seconds)
        lines = {str(wid): _line(account) for wid, account in accounts.items()}
        job.output.step(done, parts=self._reported.take(done.step - 1), accounts=lines, idle=shares)
        self._recoveries.step({wid: account.seconds for wid, account in accounts.items()}, ended_at=ended_at)
        self.on_committed(replace(done, checkpoint=message.checkpoint))
        if done.last:
            self._recoveries.tell()
            job.ending_at = job.clock() + job.settings.save_timeout_s
        job.mark(Dirty.SHOWN)

    def on_saved(self, saved: pb.Saved) -> None:
        job, version = self._job, messages.version_from_pb(saved.version)
        if saved.problem:
            if (version, saved.problem) == (self._unsaved, self.problem):
                return  # told again with a connection, or by a gang that tries on: the next try is not put off by it
            self._owed_at, self._unsaved = job.clock() + CHECKPOINT_RETRY_S, version
            self.problem = saved.problem
            if self.failing_since is None:
                self.failing_since = job.clock()
            text = f"checkpoint {version} could not be written, training goes on without it: {saved.problem}"
            job.event("checkpoint-failed", text)
            return
        if job.saved is not None and version <= job.saved[0]:
            return  # told again with a connection: it says nothing of one that failed since
        job.saved, self._owed_at = (version, saved.uri), None
        self._unsaved, self.problem, self.failing_since = None, "", None
        job.event("checkpoint", f"checkpoint {version} is complete", uri=saved.uri)

    def on_report(self, report: pb.Report) -> None:
        """Numbers of one step from one worker; they go out with the next commit."""
        if report.HasField("branch") and report.branch < self._job.ledger.version.branch:
            return  # of a step that is made again
        numbers = self._told_numbers(json.loads(report.metrics_json or "{}"))
        self.metrics.update(self._reported.add(numbers, step=report.step, key=report.key))

    def _told_numbers(self, numbers: Mapping[str, float]) -> Mapping[str, float]:
        """A role that puts a key into each name would fill the driver, and the job's status."""
        had_left_out, found = self.metrics.left_out, self.metrics.known(numbers)
        if self.metrics.left_out and not had_left_out:
            name = next(name for name in numbers if name not in found)
            text = f"number {name[:NAME_CHARS]!r} is left out, the first of them: a job has at most {NUMBERS_KEPT} "
            text += f"names of at most {NAME_CHARS} characters; report what a step adds up to"
            self._job.event("numbers-left-out", text)
        return found

    def on_account(self, wid: WorkerId, account: pb.Account) -> None:
        """Where a worker's time of a step went; goes out with the next commit."""
        self._accounts.setdefault(account.step, {})[wid] = account
        while len(self._accounts) > STEPS_KEPT:
            self._accounts.pop(next(iter(self._accounts)))


def _line(account: pb.Account) -> dict[str, float]:
    """For people. What a worker waited between two steps is in no step's window."""
    line = {kind: round(seconds, 6) for kind, seconds in account.seconds.items() if seconds > 0 and kind != BETWEEN}
    return line | {"window_s": round(account.window_s, 6), "instrument_s": round(account.instrument_s, 6)}
