"""Profiles to the scheduler: the driver's one call to anybody, and no part of the job waits for it. A scheduler that is
away costs reports, which are counted, and the next one says more.

For: driver/main.py. What is in a report, and when there is one: profile.py.

| task | consumes | waits for | unblocked by |
|---|---|---|---|
| run | profiles.reports | a report; the answer; a pause before the next try | ProfileBook; report_timeout_s; time |
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Final

import grpc
import grpc.aio

from rlinf_api import names, rpc
from rlinf_api._pb.rlinf.scheduler.v1alpha1 import scheduler_pb2 as pb
from rlinf_api._pb.rlinf.scheduler.v1alpha1 import scheduler_pb2_grpc
from rlinf_api.errors import RLinfError
from rlinf_api.profile import Profile
from rlinf_worker.driver.profile import ACCEPTED, REFUSED, UNANSWERED, Killed, ProfileBook
from rlinf_worker.driver.settings import DriverSettings

logger = logging.getLogger(__name__)
FIRST_PAUSE_S: Final = 1.0
LAST_S: Final = 1.0  # for the last report, while the operator is told of the end
FOR_GOOD: Final = frozenset(
    {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED,
     grpc.StatusCode.UNIMPLEMENTED}
)  # fmt: skip


class Reporter:
    """`async with Reporter(...)`. Without an address nothing is sent, and profiles are for profile.json alone."""

    def __init__(
        self,
        profiles: ProfileBook,
        *,
        address: str,
        tls: rpc.TlsFolder,
        namespace: str,
        job_uid: str,
        settings: DriverSettings,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._profiles, self._address, self._tls, self._settings = profiles, address, tls, settings
        self._namespace, self._job_uid, self._pause = namespace, job_uid, pause
        self._news, self._idle = asyncio.Event(), asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._channel: grpc.aio.Channel | None = None

    async def __aenter__(self) -> Reporter:
        if self._address:
            self._profiles.on_report = self._on_report
            self._task = asyncio.create_task(self._run(), name="profiles to the scheduler")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_S):
                await self._idle.wait()
        self._task.cancel()
        await asyncio.wait([self._task])
        await self._hang_up()

    def _on_report(self) -> None:
        self._idle.clear()
        self._news.set()

    async def _run(self) -> None:
        while True:
            while (report := self._profiles.take()) is not None:
                self._profiles.went(await self._report(report))
            self._idle.set()
            await self._news.wait()
            self._news.clear()

    async def _report(self, report: Profile | Killed) -> str:
        """What became of it."""
        request = pb.ReportProfileRequest(namespace=self._namespace, job_uid=self._job_uid)
        if isinstance(report, Killed):
            request.killed.update(report.of_role)
            request.revision = report.revision
            said = {"scheduler": self._address, "killed": ", ".join(sorted(report.of_role))}
        else:
            request.profile_json = report.to_json()
            said = {"scheduler": self._address, "steps": f"{report.first_step} to {report.last_step}"}
        for number in range(self._settings.report_tries):
            if number:
                await self._pause(FIRST_PAUSE_S * 2 ** (number - 1))
            try:
                answer = await self._call(request)
            except grpc.aio.AioRpcError as error:
                if error.code() in FOR_GOOD:
                    logger.warning("a profile was refused", extra={**said, "error": error.details()})
                    return REFUSED
                why = f"{error.code().name}: {error.details()}"
            except RLinfError as error:  # no address yet, or certificates that are being replaced
                why = str(error)
            else:
                if answer.accepted:
                    return ACCEPTED
                logger.warning("a profile was refused", extra={**said, "error": answer.message})
                return REFUSED
        logger.warning("no scheduler took a profile; the job goes on", extra={**said, "error": why})
        return UNANSWERED

    async def _call(self, request: pb.ReportProfileRequest) -> pb.ReportProfileResponse:
        """By the connection of the report before: of several schedulers one has heard all that there is of this job."""
        if self._channel is None:
            server = names.tls_name("scheduler")
            self._channel = await rpc.dial(self._address, tls=self._tls, server=server, more=rpc.RESTING)
        stub = scheduler_pb2_grpc.SchedulerStub(self._channel)
        try:
            answer: pb.ReportProfileResponse = await stub.ReportProfile(
                request, timeout=self._settings.report_timeout_s
            )
        except grpc.aio.AioRpcError:
            await self._hang_up()  # it may have moved, or certificates been replaced
            raise
        return answer

    async def _hang_up(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()
