"""A phase that stands in a worker's file alone, as its loop blocked at once: when it began on the agent's clock."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rlinf_api._pb.rlinf.slots.v1alpha1 import slots_pb2
from rlinf_worker import phases
from rlinf_worker.agent.identity import PodIdentity
from rlinf_worker.agent.lifecycle import Start
from rlinf_worker.agent.supervisor import Supervisor
from rlinf_worker.clock import Clock
from rlinf_worker.settings import Settings


class Pod:
    """`sleep` in the place of a worker; hears what its supervisor has to say. Its clock goes by hand."""

    def __init__(self, folder: Path) -> None:
        self.now, self.ended = 1000.0, list[str]()
        self.clock = Clock(notice_s=1.0, raw=lambda: self.now)
        values: dict[str, Any] = dict.fromkeys(("job_uid", "pod", "pod_ip", "node", "driver_address", "tls_dir"), "")
        values |= {"output_dir": "", "worker_log_dir": str(folder), "termination_log": ""}
        identity = PodIdentity(**values, pool="sim", ordinal=0, attempt=1, slots=1, run_dir=str(folder))
        settings = Settings(watch_interval_s=0.005, stacks_timeout_s=0.05)
        self.folder, self.supervisor = (
            folder / "env-0-a1",
            Supervisor(
                identity,
                settings,
                listener=self,
                order=lambda *_: False,
                environ={},
                mark="m",
                command=("sleep", "60"),
                clock=self.clock,
            ),
        )

    def started(self, worker, attempt): ...
    def hung(self, worker, said): ...

    def exited(self, worker, said, failure):
        self.ended.append(failure.message)

    def pass_by(self, seconds: float) -> None:
        """Time that the agent lives through, looking at the clock all the while."""
        for _ in range(int(seconds / 0.5)):
            self.now += 0.5
            self.clock()

    @property
    def worker(self):
        return self.supervisor.held()[0]


@pytest.fixture
async def pod(tmp_path):
    made = Pod(tmp_path)
    await made.supervisor.start(Start(worker="env/0", role="env", kind="fake", attempt=1))
    made.supervisor.join("env/0", attempt=1, pid=made.worker.pid)
    watch = asyncio.create_task(made.supervisor.watch())
    yield made
    made.supervisor.kill_all()
    await made.supervisor.stop_all(reason="the test ends", grace_s=0.0)
    watch.cancel()


async def until(condition, *, what):
    try:
        async with asyncio.timeout(20.0):
            while not condition():
                await asyncio.sleep(0.002)
    except TimeoutError:
        raise AssertionError(f"not within 20 s: {what}") from None


async def test_it_is_placed_on_the_agents_clock_and_not_on_the_machines(pod):
    pod.now += 300.0  # the agent stood still
    pod.supervisor.mark("env/0", attempt=1, said=slots_pb2.Progress(phase="load", deadline_s=10.0))
    pod.pass_by(9.0)
    writer = phases.MarkWriter(str(pod.folder))
    writer.write(phases.Mark("step", 20.0, pod.now))
    writer.close()
    pod.pass_by(2.0)  # the deadline of `load` is over: the agent looks into the file
    await until(lambda: pod.worker.phase == "step", what="a look into the file")
    assert (pod.clock() - pod.worker.marked_at, pod.ended) == (2.0, [])
    pod.pass_by(18.5)
    await until(lambda: pod.ended, what="its end")
    assert "hung and was killed: no progress mark for 20.5 s in phase 'step', whose deadline is 20 s" in pod.ended[0]


async def test_a_phase_that_ends_sooner_is_seen_before_the_deadline_of_the_one_that_was_heard(pod):
    """A loop that blocks a moment after its load has said nothing of it: 300 s would pass."""
    pod.supervisor.mark("env/0", attempt=1, said=slots_pb2.Progress(phase="load", deadline_s=300.0))
    writer = phases.MarkWriter(str(pod.folder))
    pod.pass_by(0.5)
    writer.write(phases.Mark("ready", 20.0, pod.now))
    writer.close()
    pod.pass_by(1.5)
    await asyncio.sleep(0.05)
    assert pod.worker.phase == "load", "marks come each second, and nobody looks for less"
    pod.pass_by(1.0)
    await until(lambda: pod.worker.phase == "ready", what="a look into the file")
    pod.pass_by(18.0)
    await until(lambda: pod.ended, what="its end")
    assert "no progress mark for 20.5 s in phase 'ready', whose deadline is 20 s" in pod.ended[0]
