"""A rank's steps with its driver: where it begins, which of them have committed, what became of their checkpoints.

Every message may come twice and then changes nothing; what was told and not answered is in the next hello, or told
behind it.

| waits | for | unblocked by |
|---|---|---|
| ready | Begin | the driver, when the gang is whole |
| done | StepCommit of the step | the driver, when every rank has done its part |
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_worker.channels import messages
from rlinf_worker.channels.host import Host
from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.roles.protocol import StepCommit
from rlinf_worker.runtime.identity import WorkerIdentity
from rlinf_worker.sums import Batches, End, Moves, Summed
from rlinf_worker.uplink.dialling import Uplink
from rlinf_worker.uplink.outbox import Lasts

_BATCHES: Final = tuple(field.name for field in dataclasses.fields(Batches))
_MOVES: Final = tuple(field.name for field in dataclasses.fields(Moves))
ToDriver = Uplink[pb.WorkerMessage, pb.DriverMessage]

MAX_PROBLEM: Final = 1000  # characters of a sentence for people
SAME_CLOCK_S: Final = 0.1
"""A commit that is heard of within this is taken to have happened when the driver says: one machine, or two whose
clocks are kept together."""
DELAYS_KEPT: Final = 64  # the smallest of them is the difference between clocks that are not


class Steps:
    def __init__(self, identity: WorkerIdentity, host: Host, *, driver: Callable[[], ToDriver]) -> None:
        self._identity, self._host, self._driver = identity, host, driver
        self.news = host.waits.signal()
        self.begun: PolicyVersion | None = None
        self.of_job = 0  # steps that the job goes to, as of what this rank has done; 0: as its Welcome said
        self.kept = 0  # checkpoints that are; likewise
        self._driver_attempt = 0  # the highest that has welcomed us
        self._ready: pb.Ready | None = None  # told, and not answered by Begin
        self._done: dict[int, pb.StepDone] = {}  # told, and not answered by StepCommit
        self._commits: dict[int, pb.StepCommit] = {}
        self._last_commit: pb.StepCommit | None = None
        self._state_json = ""  # driver.json of what this rank began on
        self._accounts = Accounts(host)

    # --- a stream begins ----------------------------------------------------------------------------------------------
    def greet(self, hello: pb.Hello) -> None:
        hello.ready = self.begun is not None
        hello.steps_done.extend(self._fenced(done) for done in self._done.values())
        if self._last_commit is not None:
            hello.last_commit.CopyFrom(self._last_commit)
            hello.committed.CopyFrom(self._last_commit.version)
        elif self.begun is not None:
            hello.state_json = self._state_json
            hello.committed.CopyFrom(messages.version_to_pb(self.begun))

    def on_welcome(self, *, driver_attempt: int) -> None:
        self._driver_attempt = driver_attempt
        if self._ready is not None:
            self._host.tell(pb.WorkerMessage(ready=self._ready))
        self.news.notify()

    def _fenced(self, done: pb.StepDone) -> pb.StepDone:
        done.highest_driver_attempt = self._driver_attempt
        return done

    # --- begin --------------------------------------------------------------------------------------------------------
    async def ready(
        self, *, version: PolicyVersion | None, highest_branch: int = 0, state_json: str = ""
    ) -> PolicyVersion:
        self._state_json = state_json
        self._ready = pb.Ready(
            state_json=state_json,
            version=messages.version_to_pb(version) if version is not None else None,
            restored=version is not None,
            highest_branch=highest_branch,
        )
        self._host.tell(pb.WorkerMessage(ready=self._ready))
        # Not gated: a rank that is taken off its slots here, as idle, wants them back only when it may begin; a gang
        # whose ranks may begin at different moments would never want its turn whole again.
        await self._host.waits.until(
            lambda: self.begun is not None,
            self.news,
            what=f"the driver's Begin for {self._identity.worker}",
            timeout_s=self._host.peer_wait_s,
            missing="a rank of its gang that is not ready, or the driver",
            gated=False,
        )
        assert self.begun is not None
        return self.begun

    def on_begin(self, begin: pb.Begin) -> None:
        if self._ready is None:
            return
        self._ready = None
        self.begun = messages.version_from_pb(begin.version)
        self._learn(begin)
        self.news.notify()

    def _learn(self, told: pb.Begin | pb.StepCommit) -> None:
        """Every rank of the gang of the same step, so that none computes by another schedule than the rest."""
        self.of_job, self.kept = told.steps or self.of_job, told.checkpoint_keep or self.kept

    # --- steps --------------------------------------------------------------------------------------------------------
    async def done(
        self, step: int, *, branch: int, keys: tuple[str, ...], metrics: Mapping[str, float], ended: Iterable[pb.Ended]
    ) -> StepCommit:
        """This rank's part is. `ended`: what filters dropped, as this rank was told."""
        done = pb.StepDone(
            step=step,
            branch=branch,
            rank=self._identity.rank,
            keys=keys,
            metrics_json=_numbers(metrics),
            ended=sorted(ended, key=lambda one: one.key),
        )
        self._done[step] = done
        self._host.tell(pb.WorkerMessage(step_done=self._fenced(done)))
        await self._host.waits.until(
            lambda: step in self._commits,
            self.news,
            what=f"the commit of step {step}",
            timeout_s=self._host.peer_wait_s,
            missing="another rank of the gang, or the driver",
        )
        commit = self._commits.pop(step)
        self._learn(commit)
        return StepCommit(
            step=step,
            version=messages.version_from_pb(commit.version),
            checkpoint=commit.checkpoint,
            state_json=commit.state_json,
            last=commit.last,
        )

    def on_commit(self, commit: pb.StepCommit) -> None:
        self._accounts.close(commit)
        if self._done.pop(commit.step, None) is None:
            return  # told twice, or of another life of this rank
        self._commits[commit.step] = self._last_commit = commit
        self.news.notify()

    # --- what gets no answer ------------------------------------------------------------------------------------------
    def saved(self, version: PolicyVersion, uri: str) -> None:
        """Told to each driver: a new one cannot know."""
        saved = pb.Saved(version=messages.version_to_pb(version), uri=uri)
        self._driver().forget("not saved")
        self._driver().repeat("saved", pb.WorkerMessage(saved=saved))

    def not_saved(self, version: PolicyVersion, problem: str) -> None:
        """Likewise, as a plan may wait for either word."""
        saved = pb.Saved(version=messages.version_to_pb(version), problem=problem[:MAX_PROBLEM])
        self._driver().repeat("not saved", pb.WorkerMessage(saved=saved))

    def report(self, *, step: int, branch: int, metrics: Mapping[str, float], key: str = "") -> None:
        report = pb.Report(metrics_json=_numbers(metrics), step=step, branch=branch, key=key)
        self._driver().tell(pb.WorkerMessage(report=report), lasts=Lasts.JOB)


def _numbers(metrics: Mapping[str, float]) -> str:
    return json.dumps({name: float(value) for name, value in metrics.items()})


class Accounts:
    """Closes the account of each step at the moment of its commit, and tells the driver. A commit reaches all workers,
    not the gang alone: their steps end together."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._closed = (-1, -1)  # (branch, step)
        self._told: dict[
            End, tuple[int, int]
        ] = {}  # items and bytes of each channel's end, as the last account had them
        self._delays: deque[float] = deque(maxlen=DELAYS_KEPT)

    def close(self, commit: pb.StepCommit) -> None:
        done = (commit.version.branch, commit.step)
        if done <= self._closed or not commit.time:
            return  # told again
        self._closed = done
        recorder = self._host.recorder
        now = recorder.now()
        self._delays.append(now - commit.time)
        apart = min(self._delays)
        at = commit.time if abs(apart) < SAME_CLOCK_S else commit.time + apart
        account = recorder.close_step(
            commit.step, branch=done[0], at=min(at, now), lasted_s=commit.seconds or float("inf")
        )
        began = time.thread_time()
        between = {"between": account.between_s} if account.between_s else {}  # driver/recovery.py reads it
        said = pb.Account(
            step=commit.step,
            branch=done[0],
            window_s=account.window_s,
            seconds={**{str(kind): value for kind, value in account.seconds.items()}, **between},
            instrument_s=account.instrument_s,
            busy_s=account.busy_s,
            busy=[at for stretch in account.busy for at in stretch],
        )
        sums = recorder.sums.take(commit.step, done[0])
        said.traffic.extend(self._traffic(account.waits, sums.went))
        self._add(said, sums)
        recorder.instrument_s += time.thread_time() - began
        self._host.tell(pb.WorkerMessage(account=said))

    def _traffic(self, waits: Mapping[End, float], went: Mapping[End, int]) -> list[pb.Traffic]:
        """Since the last account, of each end at which something was. `went`: of the step alone, whenever."""
        found = {on: pb.Traffic(channel=on.channel, side=on.side, wait_s=waited) for on, waited in waits.items()}
        for account in self._host.accounts:
            items, nbytes = self._told.get(account.end, (0, 0))
            if account.items != items:
                traffic = found.setdefault(account.end, pb.Traffic(channel=account.channel, side=account.side))
                traffic.items, traffic.bytes = account.items - items, account.bytes - nbytes
                self._told[account.end] = account.items, account.bytes
        for on, items in went.items():
            found.setdefault(on, pb.Traffic(channel=on.channel, side=on.side)).of_step = items
        return list(found.values())

    def _add(self, said: pb.Account, sums: Summed) -> None:
        for size, batches in sums.batches.items():
            said.batches.add(size=size, **{name: getattr(batches, name) for name in _BATCHES})
        for what, moves in sums.moves.items():
            said.moves.add(what=what, **{name: getattr(moves, name) for name in _MOVES})
        for channel, releases in sums.releases.items():
            said.releases.add(channel=channel, count=releases.count, seconds=releases.evenly())
        if (memory := self._host.memory()) is not None:
            said.memory.CopyFrom(pb.Memory(**dataclasses.asdict(memory)))
