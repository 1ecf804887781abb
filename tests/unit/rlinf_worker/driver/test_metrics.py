"""The driver's metrics: each name with its labels and, where a number can be set, that number and no other."""

from collections.abc import Iterator
from typing import Any

from rlinf_worker.driver.metrics import DriverMetrics
from tests.builders_driver import Clock, make_job
from tests.fakes.driver_world import World


def samples(driver: Any) -> Iterator[tuple[str, dict[str, str], float]]:
    return ((s.name, s.labels, s.value) for family in DriverMetrics(driver).collect() for s in family.samples)


def test_each_number_stands_under_its_name(monkeypatch):
    driver = make_job().driver(Clock())
    job, recoveries, spares = driver.job, driver.workforce.recoveries, driver.workforce.spares
    for part, name, value in (
        (driver.switch, "given_up", 1), (driver.switch, "count", 2),
        (driver.switch.pause, "seconds", 0.25), (driver.turns, "changes", 3),
        (job.sessions, "heard", 4), (job.sessions, "told", 5), (job.sessions, "refused", {"stale": 6}),
        (recoveries, "count", {"worker": 7}), (recoveries, "seconds", {"worker": 8.5}),
        (recoveries, "lost_s", {"env": 9.5}), (spares, "taken", {"env": 10}),
    ):  # fmt: skip
        is_property = isinstance(getattr(type(part), name, None), property)
        monkeypatch.setattr(type(part) if is_property else part, name, value)
    monkeypatch.setattr(type(spares), "counts", lambda _: {("env", "ready"): 11})
    found = {(name, *labels.items()): value for name, labels, value in samples(driver)}
    expected = {
        ("rlinf_plan_switches_total",): 2.0,
        ("rlinf_plan_steps_given_up_total",): 1.0,
        ("rlinf_plan_switch_pause_seconds",): 0.25,
        ("rlinf_driver_turns_total",): 3.0,
        ("rlinf_driver_messages_total", ("direction", "in")): 4.0,
        ("rlinf_driver_messages_total", ("direction", "out")): 5.0,
        ("rlinf_driver_refused_total", ("reason", "stale")): 6.0,
        ("rlinf_recoveries_total", ("what", "worker")): 7.0,
        ("rlinf_recovery_seconds_total", ("what", "worker")): 8.5,
        ("rlinf_recovery_lost_seconds_total", ("role", "env")): 9.5,
        ("rlinf_driver_spares_taken_total", ("role", "env")): 10.0,
        ("rlinf_driver_spares", ("role", "env"), ("state", "ready")): 11.0,
        ("rlinf_job_step",): 0.0,
        ("rlinf_job_branch",): 0.0,
        ("rlinf_worker_restarts_total",): 0.0,
    }
    assert {key: found.get(key) for key in expected} == expected


async def test_a_job_that_steps_says_so():
    world = World(make_job(steps=8, every_steps=100))
    await world.run_until(lambda: world.driver.job.ledger.committed == 3)
    found = {(name, *labels.items()): value for name, labels, value in samples(world.driver)}
    assert (found["rlinf_job_step",], found["rlinf_job_steps",], found["rlinf_plan_revision",]) == (3.0, 8.0, 1.0)
    ready = {key[1][1]: value for key, value in found.items() if key[0] == "rlinf_worker_ready"}
    assert ready == dict.fromkeys(world.driver.job.members.workers, 1.0)
    waits = {key[1:]: value for key, value in found.items() if key[0] == "rlinf_queue_depth"}
    assert waits.keys() == {(("channel", channel),) for channel in world.driver.exchange.queues}


def test_one_metric_is_told_once():
    names = [family.name for family in DriverMetrics(make_job().driver(Clock())).collect()]
    assert len(names) == len(set(names))
