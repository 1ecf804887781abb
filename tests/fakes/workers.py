"""Workers in the test's own loop: the real runtime without agent and TLS, running a role that is a function."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from rlinf_api.names import WorkerId
from rlinf_worker.links.settings import LinkSettings
from rlinf_worker.roles.protocol import RoleContext
from rlinf_worker.runtime.identity import WorkerIdentity
from rlinf_worker.runtime.worker import Worker
from rlinf_worker.settings import Settings
from tests.fakes.channels_driver import FakeDriver

Run = Callable[[RoleContext], Awaitable[None]]


class FunctionRole:
    def __init__(self, run: Run) -> None:
        self._run = run

    async def run(self, ctx: RoleContext) -> None:
        await self._run(ctx)


class Pod:
    """Starts workers; ends whatever is left. `separate` pods make them use TCP."""

    def __init__(self, tmp: Path, driver: FakeDriver) -> None:
        self._tmp, self.driver = tmp, driver
        self.tasks: dict[str, asyncio.Task[int]] = {}
        self.workers: dict[str, Worker] = {}
        self.settings = Settings(reconnect_backoff_s=0.02, reconnect_backoff_max_s=0.1, stop_grace_s=2.0)
        self.link_settings = LinkSettings()

    def start(self, worker: str, run: Run, *, attempt: int = 1, world: int = 1) -> Worker:
        role, _, number = worker.rpartition("/")
        (self._tmp / "run").mkdir(exist_ok=True)
        identity = WorkerIdentity(
            worker=WorkerId(worker),
            role=role,
            kind="test",
            rank=int(number),
            world=world,
            attempt=attempt,
            job_uid="job-1",
            pod_uid="pod-1",
            pod_ip="127.0.0.1",
            run_dir=str(self._tmp / "run"),
            shm_dir="/dev/shm",
        )
        made = Worker(
            identity,
            settings=self.settings,
            make_role=lambda: FunctionRole(run),
            dial_driver=lambda: self.driver.dial(),
            with_agent=False,
            link_settings=self.link_settings,
        )
        self.workers[worker] = made
        self.tasks[worker] = asyncio.create_task(made.run(), name=worker)
        return made

    async def kill(self, worker: str) -> None:
        """As near to SIGKILL as it goes in one process: links break, nothing is said."""
        made, task = self.workers.pop(worker), self.tasks.pop(worker)
        for peer in list(made.host.peers._peers.values()):
            if peer.link is not None:
                peer.link.abort("killed")
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    async def end(self, *, timeout_s: float = 20.0) -> dict[str, int | BaseException]:
        for made in self.workers.values():
            made.stop("the test is over")
        if not self.tasks:
            return {}
        _, late = await asyncio.wait(self.tasks.values(), timeout=timeout_s)
        for task in late:
            task.cancel()
        await asyncio.wait(self.tasks.values())
        assert not late, f"workers that did not stop: {[t.get_name() for t in late]}"
        return {name: task.exception() or task.result() for name, task in self.tasks.items()}


@contextlib.asynccontextmanager
async def pod(tmp: Path, channels: list[Any], *, attempt: int = 1) -> AsyncIterator[Pod]:
    driver = await FakeDriver.start(channels, attempt=attempt)
    made = Pod(tmp, driver)
    try:
        yield made
    finally:
        await made.end()
        await made.driver.stop()
