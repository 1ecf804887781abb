"""What the operator's benchmark makes of its samples."""

import os
import time

import pytest

from tools.bench import operator
from tools.bench.operator_parts.field import cpu_clock
from tools.bench.operator_parts.jobsets import LABEL_NAME, LABEL_PART, JobSetPods, manifest
from tools.bench.operator_parts.queued import LATE_S, Admissions, Passage, overtaken, summary
from tools.bench.operator_parts.scale import Curve


@pytest.mark.parametrize(
    ("points", "rate"),
    [
        ([(0, 0), (1, 0), (2, 100), (3, 200), (4, 950), (5, 1000)], 425),
        ([(0, 0), (1, 5), (2, 5), (3, 10)], 10 / 3),
        ([(0, 0), (2, 10)], 5),
        ([(0, 900), (1, 900), (2, 1000), (3, 1100), (4, 1850), (5, 1900)], 425),
    ],
    ids=["between the first and the last tenth", "few pods, between two looks", "all at once", "others' pods before"],
)
def test_pods_a_second_are_never_none_where_there_were_pods(points, rate):
    assert Curve(points).rate() == pytest.approx(rate)


def test_cpu_of_a_process_is_finer_than_a_tick():
    clock = cpu_clock(os.getpid())
    before = time.clock_gettime(clock)
    while (used := time.clock_gettime(clock) - before) == 0:  # each turn takes some
        pass
    assert 0 < used < 0.01  # s, a tick of the kernel


@pytest.mark.parametrize(
    ("times", "count"),
    [
        ([], 0),
        ([(0.0, 1.0), (10.0, 11.0), (20.0, 30.0)], 0),
        ([(0.0, 1.0), (10.0, 30.0), (20.0, 22.0), (21.0, 23.0)], 2),
        ([(0.0, 30.0), (LATE_S, 20.0)], 0),
        ([(0.0, 20.0 + LATE_S), (10.0, 20.0)], 0),
    ],
    ids=["none", "in order", "two before the second", "made at about the same time", "admitted at about the same time"],
)
def test_a_job_that_is_admitted_before_one_that_has_waited_longer_is_counted(times, count):
    assert overtaken(times) == count


def pod(number: int, phase: str, *, of: str = "a", part: str = "workers") -> dict[str, object]:
    labels = {LABEL_NAME: of, LABEL_PART: part}
    return {"metadata": {"name": f"{of}-{part}-{number}", "labels": labels}, "status": {"phase": phase}}


async def test_a_jobset_runs_once_each_of_its_pods_was_seen_to_run():
    pods = JobSetPods(each=3)
    running, other = pods.all_run("a"), pods.all_run("b")
    for seen in (
        pod(0, "Running", part="driver"),
        pod(0, "Running"),
        pod(0, "Running"),
        pod(1, "Pending"),
        pod(0, "Running", of="b"),
    ):
        pods.seen(seen)
    assert not running.done()
    pods.seen(pod(1, "Running"))
    assert running.done()
    assert not other.done()
    assert pods.driver("a") == "a-driver-0"
    assert pods.described("b") == "1 of the 3 pods of b have run"
    assert pods.most == 4
    pods.seen(pod(0, "Succeeded", part="driver"))
    assert len(pods.live) == 3


async def test_a_job_is_admitted_when_the_workload_that_it_owns_is():
    def workload(kind: str, status: str) -> dict[str, object]:
        owner = {"kind": kind, "name": "a"}
        listed = [{"type": "Admitted", "status": status}]
        return {"metadata": {"name": "w", "ownerReferences": [owner]}, "status": {"conditions": listed}}

    admissions = Admissions("JobSet")
    moment = admissions.first("a")
    for seen in (workload("JobSet", "False"), workload("RLJob", "True")):
        admissions.seen(seen)
    assert not moment.done()
    admissions.seen(workload("JobSet", "True"))
    assert moment.done()


def test_a_jobset_has_the_pods_of_a_job_and_is_complete_with_its_driver():
    made = manifest("a", namespace="n", workers=9)["spec"]
    assert made["successPolicy"]["targetReplicatedJobs"] == ["driver"]
    pods = {part["name"]: part["template"]["spec"]["completions"] for part in made["replicatedJobs"]}
    assert pods == {"driver": 1, "workers": 9}


def test_pods_beyond_the_quota_and_jobs_out_of_order_are_both_violations():
    passages = [Passage(made=0.0, admitted=30.0, running=32.0), Passage(made=10.0, admitted=12.0, running=20.0)]
    said: list[str] = []
    made = summary("jobs", passages, quota=10, most=13, say=said.append)
    assert made == {"queue_violations": 4.0, "admitted_to_running_p50": 5.0, "queued_jobs_per_s": 2 / 32}
    assert "13 were there at most" in said[0]


def test_jobs_in_a_queue_are_compared_with_jobsets_in_the_same_one():
    found = {row.name: row.reference.name for row in operator.rows() if row.reference is not None}
    assert set(found) == {"queue_violations", "admitted_to_running_p50", "queued_jobs_per_s"}
    assert all(name.startswith("JobSet v0.") for name in found.values())
