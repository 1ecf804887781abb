"""A rank's steps with its driver: where it begins, which of them have committed, what became of their checkpoints.

For: runtime.session, which passes on the driver's words, and runtime.context. Every message may come twice and then
changes nothing; what was told and not answered is in the next hello, or told behind it.

| waits | for | unblocked by |
|---|---|---|
| ready | Begin | the driver, when the gang is whole |
| done | StepCommit of the step | the driver, when every rank has done its part |
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Final, Protocol

from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_worker.channels import messages
from rlinf_worker.channels.host import PEER_WAIT_S, Host
from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.roles.protocol import StepCommit
from rlinf_worker.runtime.accounts import Accounts
from rlinf_worker.runtime.identity import WorkerIdentity
from rlinf_worker.uplink.kept import Lasts

COMMITS_KEPT: Final = 16
MAX_PROBLEM: Final = 1000  # characters of a sentence for people


class DriverEnd(Protocol):
    """The uplink, as steps need it."""

    def tell(self, message: pb.WorkerMessage, *, lasts: Lasts = Lasts.STREAM) -> None: ...

    def repeat(self, key: str, message: pb.WorkerMessage) -> None: ...

    def forget(self, key: str) -> None: ...


class Steps:
    def __init__(self, identity: WorkerIdentity, host: Host, *, driver: Callable[[], DriverEnd]) -> None:
        self._identity, self._host, self._driver = identity, host, driver
        self.news = host.waits.signal()
        self.begun: PolicyVersion | None = None
        self._driver_attempt = 0  # the highest that has welcomed us
        self._ready: pb.Ready | None = None  # told, and not answered by Begin
        self._done: dict[int, pb.StepDone] = {}  # told, and not answered by StepCommit
        self._commits: dict[int, pb.StepCommit] = {}
        self._committed: PolicyVersion | None = None
        self._last_commit: pb.StepCommit | None = None
        self._accounts = Accounts(host)

    # --- a stream begins ----------------------------------------------------------------------------------------------
    def greet(self, hello: pb.Hello) -> None:
        hello.ready = self.begun is not None
        hello.steps_done.extend(self._fenced(done) for done in self._done.values())
        if self._committed is not None:
            hello.committed.CopyFrom(messages.version_to_pb(self._committed))
        if self._last_commit is not None:
            hello.last_commit.CopyFrom(self._last_commit)

    def on_welcome(self, *, driver_attempt: int) -> None:
        self._driver_attempt = driver_attempt
        if self._ready is not None:
            self._host.tell(pb.WorkerMessage(ready=self._ready))
        self.news.notify()

    def _fenced(self, done: pb.StepDone) -> pb.StepDone:
        done.highest_driver_attempt = self._driver_attempt
        return done

    # --- begin --------------------------------------------------------------------------------------------------------
    async def ready(self, *, version: PolicyVersion | None, highest_branch: int = 0) -> PolicyVersion:
        self._ready = pb.Ready(
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
            timeout_s=PEER_WAIT_S,
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
        if self._committed is None:
            self._committed = self.begun
        self.news.notify()

    # --- steps --------------------------------------------------------------------------------------------------------
    async def done(
        self, step: int, *, branch: int, keys: tuple[str, ...], metrics: Mapping[str, float], ended: Iterable[str]
    ) -> StepCommit:
        """This rank's part is. `ended`: units that filters dropped, as this rank was told."""
        done = pb.StepDone(
            step=step,
            branch=branch,
            rank=self._identity.rank,
            keys=keys,
            metrics_json=_numbers(metrics),
            ended=sorted(ended),
        )
        self._done[step] = done
        self._host.tell(pb.WorkerMessage(step_done=self._fenced(done)))
        await self._host.waits.until(
            lambda: step in self._commits,
            self.news,
            what=f"the commit of step {step}",
            timeout_s=PEER_WAIT_S,
            missing="another rank of the gang, or the driver",
        )
        commit = self._commits.pop(step)
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
        self._committed = messages.version_from_pb(commit.version)
        while len(self._commits) > COMMITS_KEPT:
            self._commits.pop(next(iter(self._commits)))
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
