"""Exit code 64, what only the user can help: it ends a job that begins, and one that has begun where it is sure."""

import sys

import pytest

from rlinf_api import names
from rlinf_api.errors import RetryableError, UserError
from rlinf_api.names import WorkerId
from rlinf_api.report import DriverState
from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.driver.main import flow_settings
from rlinf_worker.driver.members import WorkerState
from tests.builders_driver import Clock, make_job
from tests.fakes.driver_world import World
from tests.unit.rlinf_worker.driver.test_workforce import SIM, Site, started, told

ENV = WorkerId("env/0")
NO_CARD = "role kind 'theirs:Role' cannot be made: got RuntimeError: CUDA error: out of memory"


def begun(**job: object) -> Site:
    """env/0 has died and is started anew, as attempt 2, of a job that has begun."""
    site, _ = started(**job)
    site.job.began = True
    site.exit("env/0", 1, 137)
    site.later(0.2)
    return site


@pytest.mark.parametrize("reason", ["LoadFailed", "UserError", "InvalidManifest"])
def test_a_role_that_was_made_before_and_cannot_be_made_again_is_tried_again(reason):
    site = begun()
    site.exit("env/0", 2, names.EXIT_USER_ERROR, message=NO_CARD, reason=reason)
    assert site.failed == []
    assert site.gone[-1] == ("env/0", NO_CARD)
    site.later(1.0)
    assert (site.record("env/0").state, site.record("env/0").attempt) == (WorkerState.STARTING, 3)


def test_it_is_tried_again_within_the_jobs_bound_and_named_at_its_end():
    site = begun(max_restarts=3)
    for attempt in (2, 3, 4):
        assert site.failed == []
        site.exit("env/0", attempt, names.EXIT_USER_ERROR, message=NO_CARD, reason="LoadFailed")
        site.later(10.0)
    [(reason, message, failure)] = site.failed
    assert reason == "TooManyRestarts"
    assert message.endswith(f"maxRestarts=3 allows; the last was env/0: {NO_CARD}")
    assert failure is site.force.toll.first_failure


@pytest.mark.parametrize("reason", ["CheckpointUnreadable", "CheckpointUnwritable"])
def test_checkpoints_that_cannot_be_used_end_a_job_at_once_at_a_restart_too(reason):
    site = begun()
    site.exit("env/0", 2, names.EXIT_USER_ERROR, message="no", reason=reason)
    assert [(r, m) for r, m, _ in site.failed] == [(reason, "worker env/0: no")]


@pytest.mark.parametrize("reason", ["UserError", "MessageTooLarge", "SchemaChanged"])
def test_what_a_worker_says_at_its_work_ends_the_job_at_once(reason):
    site = begun()
    site.record("env/0").state = WorkerState.READY
    site.exit("env/0", 2, names.EXIT_USER_ERROR, message="a picture of 3 GB", reason=reason)
    assert [(r, m) for r, m, _ in site.failed] == [("UserError", "worker env/0: a picture of 3 GB")]


def test_code_that_is_loaded_at_work_is_tried_again_as_at_the_start():
    """Environments of a slice that comes from a worker that is away."""
    site = begun()
    site.record("env/0").state = WorkerState.READY
    site.exit("env/0", 2, names.EXIT_USER_ERROR, message="no display", reason="LoadFailed")
    assert site.failed == []


def test_a_bug_of_ours_ends_the_job_at_once_at_a_restart_too():
    site = begun()
    site.exit("env/0", 2, names.EXIT_BUG, message="two owners of one unit")
    assert [r for r, _, _ in site.failed] == ["InternalError"]


def test_a_driver_that_is_not_the_first_takes_the_job_for_begun():
    assert not make_job().driver(Clock()).job.has_begun
    assert make_job().driver(Clock(), attempt=2).job.has_begun, "nobody may be left who could tell it"


async def test_an_exit_before_all_workers_were_ready_once_ends_the_job_and_a_later_one_does_not():
    world = World(make_job(envs=1))
    await world.run_until(lambda: "env/0" in world.workers)
    world.kill("env/0", exit_code=names.EXIT_USER_ERROR)
    assert (world.driver.job.standing.state, world.driver.job.standing.reason) == (DriverState.FAILED, "UserError")

    world = World(make_job(envs=1), checkpoints=False)
    driver = world.driver
    await world.run_until(lambda: driver.job.ledger.committed == 1)
    world.kill("actor/0")  # and all is made again, from step 0 on
    world.kill("env/0")
    env = driver.job.members.workers[ENV]
    await world.run_until(lambda: env.state is WorkerState.STARTING and "env/0" in world.workers)
    world.kill("env/0", exit_code=names.EXIT_USER_ERROR)
    await world.run()
    assert driver.job.standing.state is DriverState.COMPLETE
    assert driver.workforce.restarts == 3


def test_a_flow_that_a_driver_before_has_loaded_is_tried_again_by_the_next(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "theirs.py").write_text("raise RuntimeError('no licence')")
    spec = make_job().spec
    spec = spec.model_copy(update={"flow": spec.flow.model_copy(update={"name": "theirs:flow"})})
    with pytest.raises(UserError, match="flow 'theirs:flow' cannot be imported: got RuntimeError: no licence"):
        flow_settings(spec, attempt=1)
    with pytest.raises(RetryableError, match=r"imported: got RuntimeError: no licence .*; a driver before") as raised:
        flow_settings(spec, attempt=2)
    assert isinstance(raised.value.__cause__, RuntimeError), "its stack belongs into the log"
    (tmp_path / "theirs.py").write_text("def check_config(config): raise KeyError('lr')\nasync def flow(flow): ...")
    with pytest.raises(UserError, match="KeyError: 'lr'"):
        flow_settings(spec, attempt=2)
    sys.modules.pop("theirs", None)


def test_a_worker_that_was_to_be_ready_for_the_next_plan_costs_that_plan_alone():
    site, outbox = started()
    told(outbox)
    site.members.prepared = {site.record("env/0").placed.id: site.members.workers.pop(site.record("env/0").placed.id)}
    site.exit("env/0", 1, names.EXIT_USER_ERROR, message=NO_CARD, reason="LoadFailed")
    [gone] = site.force.take_gone()
    assert (gone.why, gone.placed.id in site.members.prepared, site.failed) == (NO_CARD, True, [])
    assert SIM in site.members.pods


# --- the same death again ---------------------------------------------------------------------------------------------
BUG = "KeyError: 'obs' (/jobs/my_role.py, line 12), in unit {n}"


def dies(site: Site, *deaths: tuple[str, str], before=lambda n: None, between=lambda n: None) -> list[tuple[str, str]]:
    """env/0 dies of these reasons, in these words; how the job failed, if it did."""
    for attempt, (reason, message) in enumerate(deaths, start=site.record("env/0").attempt):
        assert site.failed == []
        before(attempt)
        site.exit("env/0", attempt, names.EXIT_RETRYABLE, message=message, reason=reason)
        between(attempt)
        site.later(30.0)
    return [(reason, message) for reason, message, _ in site.failed]


def test_a_role_that_dies_three_times_in_the_same_way_before_a_step_ends_its_job_with_its_words():
    site, _ = started()
    [(reason, message)] = dies(site, *(("KeyError", BUG.format(n=n)) for n in (3, 18, 4)))
    assert reason == "UserError"
    assert message == f"role 'env' died 3 times in the same way, and no step ended between: {BUG.format(n=4)}"
    site, _ = started()
    [(reason, _)] = dies(site, *[("RoleReturned", "role 'env' returned")] * 3)
    assert reason == "UserError"


def test_other_words_or_a_step_between_begin_the_count_anew():
    site, _ = started()
    assert dies(site, ("KeyError", "'a'"), ("KeyError", "'a'"), ("KeyError", "'b'"), ("KeyError", "'a'")) == []
    site, _ = started()

    def commit(n):
        site.job.ledger.version = PolicyVersion(0, n)

    assert dies(site, *[("KeyError", "'a'")] * 5, between=commit) == []


@pytest.mark.parametrize(
    "reason", ["OSError", "ConnectionResetError", "MemoryError", "WorkerUnreachable", "Hung", "print"]
)
def test_what_the_machine_did_is_tried_as_often_as_the_job_allows(reason):
    site, _ = started()
    assert dies(site, *[(reason, "the same")] * 5) == []


def test_one_accident_that_meets_all_workers_of_a_role_counts_once():
    site = Site(envs=3)
    site.attach()
    site.force.start_workers()
    for attempt in (1, 2, 3):
        assert site.failed == []
        for worker in ("env/0", "env/1", "env/2"):
            site.exit(worker, attempt, names.EXIT_RETRYABLE, message="no simulator at port 7", reason="RuntimeError")
        site.later(30.0)
    assert len(site.failed) == 1, "each of them has died three times by now"


def test_a_rank_that_another_one_takes_along_dies_of_no_bug():
    site = Site(envs=2)
    site.attach()
    site.force.start_workers()

    def join(_):
        site.record("env/0").joined = True

    assert dies(site, *[("RuntimeError", "Connection closed by peer [127.0.0.1]:3")] * 4, before=join) == []
    site.record("env/0").joined = False
    assert dies(site, *[("RuntimeError", "Connection closed by peer [127.0.0.1]:3")] * 3) != []
