"""Numbers that roles report of a step: each unit's once, however often it was made."""

import json
from typing import Any

import pytest

from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_api.names import WorkerId
from rlinf_worker.driver.commits import KEYS_KEPT, NUMBERS_KEPT, STEPS_KEPT, Reported
from tests.builders_driver import make_job
from tests.fakes.driver_world import World


def test_sums_add_up_and_of_others_the_last_word_counts():
    reported = Reported()
    reported.add({"seen_count": 2.0, "reward": 1.0}, step=3)
    assert reported.add({"seen_count": 3.0, "reward": 4.0}, step=3) == {"seen_count": 5.0, "reward": 4.0}
    reported.add({"seen_count": 9.0}, step=4)
    assert reported.take(3) == {"seen_count": 5.0, "reward": 4.0}
    assert reported.take(3) == {}


def test_a_unit_that_is_made_again_is_counted_once():
    reported = Reported()
    for return_sum in (7.0, 3.0, 5.0):
        reported.add({"return_sum": return_sum, "episodes_count": 1.0}, step=3, key="env:0/3")
    reported.add({"return_sum": 1.0, "episodes_count": 1.0}, step=3, key="env:1/3")
    reported.add({"drops_count": 2.0}, step=3, key="env:1/3")
    reported.add({"return_sum": 10.0}, step=3)
    assert reported.take(3) == {"return_sum": 16.0, "episodes_count": 2.0, "drops_count": 2.0}


def test_what_nobody_takes_is_bounded():
    reported = Reported()
    for step in range(100):
        reported.add({"seen_count": 1.0}, step=step)
    assert [bool(reported.take(step)) for step in range(100)].count(True) == STEPS_KEPT
    for n in range(KEYS_KEPT + 5):
        reported.add({"seen_count": 1.0}, step=1, key=f"k{n}")
    assert len(reported._steps[1].sums) == KEYS_KEPT
    assert reported.take(1) == {"seen_count": KEYS_KEPT + 5.0}


async def test_a_job_has_so_many_numbers_and_no_more():
    """They stand in its status, which the API server refuses above 1.5 MB."""
    world = World(make_job(steps=4))
    await world.run_until(lambda: world.driver.job.ledger.committed == 1)
    driver, told = world.driver, list[tuple[str, str]]()
    driver.job.event = lambda kind, text, **more: told.append((kind, text))  # type: ignore[method-assign]
    for n in range(3 * NUMBERS_KEPT):
        report = pb.Report(metrics_json=json.dumps({f"of_unit_{n}_sum": 1.0, "x" * 201: 2.0, "seen": float(n)}), step=2)
        driver.on_worker_message(WorkerId("env/0"), pb.WorkerMessage(report=report))
    metrics = driver.commits.metrics
    assert (len(metrics), metrics["of_unit_0_sum"], metrics["seen"]) == (NUMBERS_KEPT, 1.0, 3 * NUMBERS_KEPT - 1.0)
    assert [text for kind, text in told if kind == "numbers-left-out"] == [
        f"number '{'x' * 200}' is left out, the first of them: a job has at most 512 names of at most 200 characters; "
        "report what a step adds up to"
    ]
    assert len(driver.commits._reported.take(2)) <= NUMBERS_KEPT
    await world.run()
    assert (metrics["step_s"] > 0, len(metrics)) == (True, NUMBERS_KEPT)


class Reporting(World):
    """env/0 says of each step, as it opens on a branch, that it has seen ten of something."""

    def __init__(self, *, stated: bool) -> None:
        super().__init__(make_job(steps=12, every_steps=4))
        self.stated, self.told = stated, set[tuple[int, int]]()
        self.lines: list[tuple[int, int, float]] = []
        write = self.driver.job.output.step

        def line(done: Any, *, parts: Any, **more: Any) -> None:
            self.lines.append((done.version.branch, done.step, parts.get("seen_count", 0.0)))
            write(done, parts=parts, **more)

        self.driver.job.output.step = line  # type: ignore[method-assign]

    async def until(self, number: int, *, branch: int) -> None:
        ledger = self.driver.job.ledger
        while not (ledger.committed >= number and ledger.version.branch == branch):
            for step in ledger.open_steps:
                if (step.branch, step.number) not in self.told:
                    self.told.add((step.branch, step.number))
                    self.report(step.number, branch=step.branch)
            if not await self.step():
                await self.pass_time(0.2)

    def report(self, step: int, *, branch: int) -> None:
        report = pb.Report(step=step, metrics_json=json.dumps({"seen_count": 10.0}))
        if self.stated:
            report.branch = branch
        self.driver.on_worker_message(WorkerId("env/0"), pb.WorkerMessage(report=report))


@pytest.mark.parametrize("stated", [True, False], ids=["says its branch", "of an older image"])
async def test_steps_that_are_made_again_are_reported_of_once(stated):
    world = Reporting(stated=stated)
    await world.until(6, branch=0)
    world.kill("actor/0")
    await world.until(6, branch=1)
    if stated:
        world.report(7, branch=0)  # late, from a worker that has not heard of the loss
    await world.until(9, branch=1)
    seen = {(branch, step): count for branch, step, count in world.lines if step > 1}
    assert seen.pop((1, 5)) == 0.0, "what was said of step 4 is in the line of b0-5"
    assert set(seen) >= {(0, 5), (0, 6), (1, 6), (1, 7), (1, 8), (1, 9)}
    assert set(seen.values()) == {10.0}
