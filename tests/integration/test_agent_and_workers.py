"""An agent process, real worker processes and a driver over mTLS: how workers start, stop, die and hang."""

import asyncio
import json
import os
import signal

import psutil

from rlinf_api._pb.rlinf.agents.v1alpha1 import agents_pb2
from tests.fakes import pod as pods
from tests.fakes.pod import pid_of, running, samples, scrape, start

ENDS = ("spare.env/0", "env/0")


def at_work(worker):
    """It has joined and marked."""
    return lambda m: any(p.worker == worker and p.phase == "step" for p in m.heartbeat.progress)


async def test_a_hello_says_who_the_pod_is_and_heartbeats_follow(pod):
    one = pod()
    async with one.driver() as driver:
        one.start(driver)
        hello = (await driver.wait("hello")).hello
        assert (hello.pod, hello.pool, hello.attempt) == (one.name, "sim", 1)
        await driver.wait("heartbeat", lambda m: m.heartbeat.sequence >= 3)


async def test_a_killed_worker_is_told_at_once_and_starts_again(pod):
    one = pod(watch_interval_s=600)  # nothing but the signal of its death can tell of it
    async with one.driver() as driver:
        one.start(driver)
        await driver.wait("hello")
        await running(driver)
        os.kill(pid_of(one), signal.SIGKILL)
        said = await driver.wait("exited")
        assert (said.exited.exit_code, said.exited.asked, said.exited.failure.reason) == (137, False, "Killed")
        assert "SIGKILL" in said.exited.failure.message
        await running(driver, attempt=2)


async def test_all_that_a_dead_worker_started_ends_before_its_exit_is_told(pod):
    one = pod()
    async with one.driver() as driver:
        one.start(driver)
        await driver.wait("hello")
        await running(driver, children=True)
        tree = pods.tree(pid_of(one))
        everything = [p for p in pods.tree(one.pid)[1:] if "watchdog" not in " ".join(p.cmdline())]
        assert len(everything) == 3, "the worker, its child, and its daemon, which the agent adopted"
        assert len(tree) == 2
        os.kill(pid_of(one), signal.SIGKILL)
        await driver.wait("exited")
        assert not pods.alive(everything)


async def test_a_frozen_worker_is_called_hung_at_its_deadline_and_killed(pod):
    one = pod()
    async with one.driver() as driver:
        one.start(driver)
        await driver.wait("hello")
        await running(driver, deadline_s=2.0)
        os.kill(pid_of(one), signal.SIGSTOP)
        hung = await driver.wait("hung")
        assert hung.hung.silent_s > 2.0
        assert hung.hung.phase == "step"
        assert "stopped by a signal (SIGSTOP)" in hung.hung.stacks
        exited = (await driver.wait("exited")).exited
        assert (exited.failure.reason, exited.exit_code) == ("Hung", 137)
        assert "deadline is 2 s" in exited.failure.message


async def test_a_worker_that_hangs_shows_its_stacks_first(pod):
    one = pod(stacks_timeout_s=10)
    async with one.driver() as driver:
        one.start(driver)
        await driver.wait("hello")
        assert (await driver.instruct(start=start(do="silent", deadline_s=0.5))).ok
        hung = (await driver.wait("hung")).hung
        assert "most recent call first" in hung.stacks
        assert "in main" in hung.stacks
        await driver.wait("exited")


async def test_a_worker_that_never_joins_is_hung_in_start(pod):
    one = pod(start_deadline_s=1.0)
    async with one.driver() as driver:
        one.start(driver)
        await driver.wait("hello")
        assert (await driver.instruct(start=start(do="nothing"))).ok
        assert (await driver.wait("hung")).hung.phase == "start"
        await driver.wait("exited")


async def test_a_worker_stops_when_told_and_one_that_is_deaf_is_killed(pod):
    one = pod()
    async with one.driver() as driver:
        one.start(driver)
        await driver.wait("hello")
        await running(driver)
        await running(driver, worker="env/1", deaf=True)
        results = await asyncio.gather(
            driver.instruct(stop=agents_pb2.Stop(worker="env/0", grace_s=60.0)),
            driver.instruct(stop=agents_pb2.Stop(worker="env/1", grace_s=0.5)),
            driver.instruct(stop=agents_pb2.Stop(worker="env/7", grace_s=0.5)),
        )
        assert all(result.ok for result in results)
        good = (await driver.wait("exited", lambda m: m.exited.worker == "env/0")).exited
        deaf = (await driver.wait("exited", lambda m: m.exited.worker == "env/1")).exited
        assert (good.asked, good.exit_code) == (True, 0)
        assert (deaf.asked, deaf.exit_code) == (True, 137)


async def test_the_last_words_of_a_worker_come_whole_and_without_any_its_stderr_does(pod):
    one = pod()
    async with one.driver() as driver:
        one.start(driver)
        await driver.wait("hello")
        assert (await driver.instruct(start=start(do="fail"))).ok
        assert (await driver.instruct(start=start(worker="env/1", do="raise"))).ok
        spoke = (await driver.wait("exited", lambda m: m.exited.worker == "env/0")).exited
        silent = (await driver.wait("exited", lambda m: m.exited.worker == "env/1")).exited
        assert (spoke.failure.reason, spoke.failure.message) == ("EnvironmentBroken", "the robot fell over")
        assert (spoke.exit_code, spoke.failure.pod, spoke.failure.node) == (3, one.name, "node-1")
        assert silent.failure.message.endswith("ValueError: the simulator has no floor")


async def test_a_worker_that_cannot_be_started_is_an_error_that_names_the_remedy(pod):
    one = pod()
    async with one.driver() as driver:
        one.start(driver)
        await driver.wait("hello")
        bad = start()
        bad.slots[:] = [9]
        result = await driver.instruct(start=bad)
        assert not result.ok
        assert "slots that pod" in result.error
        assert "wanted 0 to 3" in result.error


async def test_instructions_are_obeyed_once_and_only_of_the_newest_driver(pod):
    one = pod()
    async with one.driver(attempt=2) as driver:
        one.start(driver)
        await driver.wait("hello")
        await running(driver)
        pid = pid_of(one)
        first = await driver.instruct(id=70, stop=agents_pb2.Stop(worker="env/9", grace_s=0))
        again = await driver.instruct(id=70, stop=agents_pb2.Stop(worker="env/0", grace_s=0))
        assert first == again
        same = await driver.instruct(start=start())  # that attempt runs: nothing to do
        assert same.ok
        assert pid_of(one) == pid
        old = await driver.instruct(driver_attempt=1, stop=agents_pb2.Stop(worker="env/0", grace_s=0))
        assert not old.ok
        assert "older driver" in old.error
        assert pid_of(one) == pid


async def test_instructions_that_are_refused_are_told_and_counted_once_and_the_next_one_is_obeyed(pod):
    one = pod()
    async with one.driver(attempt=2) as driver:
        one.start(driver)
        await driver.wait("hello")
        await running(driver, attempt=3)
        stale = await driver.instruct(id=80, start=start(attempt=2))
        assert "cannot start: got attempt 2, wanted more than 3" in stale.error
        assert await driver.instruct(id=80, start=start(attempt=2)) == stale
        old = await driver.instruct(driver_attempt=1, stop=agents_pb2.Stop(worker="env/0", grace_s=0))
        assert "older driver" in old.error
        assert sample(await scrape(one.ip), "rlinf_agent_instructions_refused_total") == 2.0
        assert (await driver.instruct(stop=agents_pb2.Stop(worker="env/0", grace_s=0))).ok
        await driver.wait("exited")


async def test_a_later_attempt_takes_over_from_one_that_lives(pod):
    one = pod()
    async with one.driver() as driver:
        one.start(driver)
        await driver.wait("hello")
        await running(driver)
        before = pid_of(one)
        await running(driver, attempt=2)
        assert pid_of(one) != before
        old = await driver.instruct(start=start(attempt=1))
        assert not old.ok
        assert "wanted more than 2" in old.error


async def test_logs_are_bounded_and_belong_to_one_worker(pod, tmp_path):
    one = pod(worker_log_bytes=50_000)
    async with one.driver() as driver:
        one.start(driver)
        await driver.wait("hello")
        await running(driver, shout_bytes=200_000)
        assert (await driver.instruct(stop=agents_pb2.Stop(worker="env/0", grace_s=5.0))).ok
        folder = tmp_path / "logs"
        assert sorted(p.name for p in folder.iterdir()) == ["env-0.log", "env-0.log.1"]
        assert sum(p.stat().st_size for p in folder.iterdir()) <= 50_000 + 2 * 65_536
        assert (folder / "env-0.log").read_text().endswith("loaded\n")


async def test_metrics_and_spans_of_workers_outlive_their_attempts(pod, tmp_path):
    one = pod()
    async with one.driver() as driver:
        one.start(driver)
        await driver.wait("hello")
        await running(driver)
        os.kill(pid_of(one), signal.SIGKILL)
        await driver.wait("exited")
        await running(driver, attempt=2)
        text = await scrape(one.ip)
        assert sample(text, "rlinf_channel_items_total", role="env", worker="env/0", channel="samples") == 21.0
        assert sample(text, "rlinf_worker_restarts_total", worker="env/0") == 1.0
        assert sample(text, "rlinf_worker_exits_total", worker="env/0", reason="Killed") == 1.0
        assert sample(text, "rlinf_agent_driver_connected") == 1.0
        lines = (tmp_path / "out" / "spans" / f"{one.name}.jsonl").read_text().splitlines()
        assert [json.loads(line)["slot"] for line in lines] == ["sim/0/0", "sim/0/0"]


def sample(text, name, **labels):
    found = samples(text, name, **labels)
    assert len(found) == 1, f"{len(found)} samples of {name} {labels}"
    return found[0]


async def test_a_start_from_a_spare_that_is_not_there_or_is_dead_is_a_start_from_nothing(pod):
    one = pod()
    async with one.driver() as driver:
        one.start(driver)
        await driver.wait("hello")
        place = start()
        place.from_spare = "spare.env/0"
        assert (await driver.instruct(start=place)).ok
        await driver.wait("heartbeat", at_work("env/0"))
        spare = start(worker="spare.env/0")
        spare.role, spare.spare = "env", True
        del spare.slots[:]
        assert (await driver.instruct(start=spare)).ok
        await driver.wait("heartbeat", at_work("spare.env/0"))
        first, waiting = pid_of(one), pid_of(one, "spare.env/0")
        os.kill(waiting, signal.SIGKILL)
        os.kill(first, signal.SIGKILL)
        for ended in ENDS:  # one that is dying may still be promoted: the worker's exit says so, as of any worker
            await driver.wait("exited", lambda m, ended=ended: m.exited.worker == ended)
        place.attempt, since = 2, len(driver.seen)
        assert (await driver.instruct(start=place)).ok
        await driver.wait("heartbeat", at_work("env/0"), since=since)
        assert pid_of(one) not in (first, waiting)


async def test_a_promoted_spare_is_the_workers_process_in_log_and_exit_and_no_stranger_to_its_successor(pod):
    one = pod()
    async with one.driver() as driver:
        one.start(driver)
        await driver.wait("hello")
        spare = start(worker="spare.env/0")
        spare.role, spare.spare = "env", True
        assert (await driver.instruct(start=spare)).ok

        await driver.wait("heartbeat", at_work("spare.env/0"))
        pid, place = pid_of(one, "spare.env/0"), start(attempt=5)
        place.from_spare = "spare.env/0"
        since = len(driver.seen)
        assert (await driver.instruct(start=place)).ok
        await driver.wait("heartbeat", at_work("env/0"), since=since)
        spare.attempt = 2
        assert (await driver.instruct(start=spare)).ok
        # /proc shows the environment of its start, with the name that its successor has now.
        assert (await driver.instruct(stop=agents_pb2.Stop(worker="spare.env/0", reason="no place for it"))).ok
        assert psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        os.kill(pid, signal.SIGKILL)
        first, second = [(await driver.wait("exited", lambda m, n=n: m.exited.worker == n)).exited for n in ENDS]
        assert (first.attempt, first.asked) == (2, True)
        assert (second.attempt, second.asked, second.exit_code) == (5, False, 137)
        assert "promoted" in (one.folder / "logs" / "env-0.log").read_text()
