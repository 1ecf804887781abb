"""What an agent does when its driver, itself or its pod comes to an end; and with which words it exits."""

import asyncio
import json
import os
import signal
import socket
import time
from pathlib import Path

import psutil
import pytest

from rlinf_api import names
from rlinf_api._pb.rlinf.agents.v1alpha1 import agents_pb2
from tests.fakes import pod as pods
from tests.fakes.pod import pid_of, running, start, until_metric


async def test_workers_go_on_without_a_driver_and_the_next_one_learns_what_is_there(pod):
    one = pod()
    async with one.driver(attempt=1) as first:
        one.start(first)
        assert (await first.wait("hello")).hello.driverless_s == 0, "it never had one"
        await running(first)
        await running(first, worker="env/1")
        pid, other = pid_of(one), pid_of(one, "env/1")
        left_at = time.monotonic()
    os.kill(other, signal.SIGKILL)  # while nobody listens
    await until_metric(one, "rlinf_worker_exits_total", at_least=1.0, worker="env/1")  # the agent knows
    async with one.driver(attempt=2, port=first.port) as second:
        hello = (await second.wait("hello")).hello
        assert [(w.worker, w.attempt) for w in hello.workers] == [("env/0", 1)]
        assert pid_of(one) == pid
        assert hello.workers[0].progress.phase == "step"
        assert hello.highest_driver_attempt == 1
        assert 0 < hello.driverless_s < time.monotonic() - left_at
        exited = (await second.wait("exited")).exited
        assert (exited.worker, exited.exit_code) == ("env/1", 137)
        assert pid_of(one) == pid
        await running(second, worker="env/1", attempt=2)


async def test_an_older_driver_is_not_obeyed_even_when_it_is_alone(pod):
    one = pod()
    async with one.driver(attempt=3) as newer:
        one.start(newer)
        await newer.wait("heartbeat")  # it has read the welcome, and so knows of attempt 3
    async with one.driver(attempt=2, port=newer.port) as older:
        async with asyncio.timeout(20):
            while older.streams < 3:  # it has read two of its welcomes, and left
                await asyncio.sleep(0.02)
        assert all(message.WhichOneof("kind") == "hello" for _, message in older.seen)
    async with one.driver(attempt=3, port=newer.port) as newer:
        await newer.wait("heartbeat")


async def test_a_driver_that_had_nothing_to_say_for_long_is_absent_from_its_loss_on(pod):
    """Between instructions a driver is silent for hours; its death must not be theirs who hear of it."""
    one = pod(driver_absence_timeout_s=4.0)
    async with one.driver(attempt=1) as first:
        one.start(first)
        await first.wait("hello")
        await running(first)
        pid, said_at = pid_of(one), time.monotonic()
        while time.monotonic() - said_at < 4.5:  # what it says is all that keeps the stream busy
            await first.wait("heartbeat", since=len(first.seen))
    async with one.driver(attempt=2, port=first.port) as second:
        hello = (await second.wait("hello")).hello
        assert [(w.worker, w.attempt) for w in hello.workers] == [("env/0", 1)]
        assert pid_of(one) == pid


async def test_a_driver_that_welcomes_nobody_is_given_up_and_tried_again(pod):
    one = pod(welcome_timeout_s=0.5)
    async with one.driver(mute=True) as mute:
        one.start(mute)
        async with asyncio.timeout(20):
            while mute.streams < 3:
                await asyncio.sleep(0.02)
    assert f"the welcome of driver {mute.address} did not happen within 0.5 s" in one.errors()
    async with one.driver(port=mute.port) as driver:
        await driver.wait("hello")


async def test_a_port_that_never_shakes_hands_does_not_hold_the_agent(pod):
    one = pod(connect_timeout_s=0.5, driver_absence_timeout_s=1.5)
    with socket.create_server((one.ip, 0)) as silent:
        one.driver_address = f"{one.ip}:{silent.getsockname()[1]}"
        one.start()
        assert await one.exit_code() == names.EXIT_RETRYABLE


async def test_a_stale_attempt_is_sent_away_for_good(pod):
    one = pod(stop_grace_s=60)  # of which a stale pod has nothing: it would not end in time
    async with one.driver() as driver:
        one.start(driver)
        await driver.wait("hello")
        await running(driver, deaf=True)
        everything = pods.tree(one.pid)
        driver.refuse("pod math-sim-0-a2 has taken this pod's place", exit_code=names.EXIT_STALE)
        assert await one.exit_code() == names.EXIT_STALE
        await pods.gone(everything)
    assert one.termination() == {
        "pod": one.name, "node": "node-1", "exit_code": 76, "reason": "Stale",
        "message": "pod math-sim-0-a2 has taken this pod's place",
    }  # fmt: skip
    assert one.errors().splitlines()[-1] == "pod math-sim-0-a2 has taken this pod's place"


async def test_a_refused_hello_ends_the_agent(pod):
    one = pod()
    refusal = agents_pb2.Refusal(message="pool 'sim' has 1 pod, this is ordinal 4", exit_code=64)
    async with one.driver(refusal=refusal) as driver:
        one.start(driver)
        assert await one.exit_code() == 64
    assert one.termination()["message"] == "pool 'sim' has 1 pod, this is ordinal 4"


async def test_a_driver_that_says_to_come_again_costs_no_worker(pod):
    one = pod(driver_absence_timeout_s=5.0)  # in which it must have come twice
    async with one.driver() as driver:
        one.start(driver)
        await driver.wait("hello")
        await running(driver)
        pid = pid_of(one)
    refusal = agents_pb2.Refusal(message="no plan is in force yet", exit_code=names.EXIT_RETRYABLE)
    async with one.driver(port=driver.port, refusal=refusal) as not_yet:
        async with asyncio.timeout(20):
            while not_yet.streams < 2:
                await asyncio.sleep(0.02)
        hellos = [message.hello for _, message in not_yet.seen if message.WhichOneof("kind") == "hello"]
        held = [(worker.worker, worker.attempt) for hello in hellos for worker in hello.workers]
        assert held == [("env/0", 1)] * len(hellos)
        assert pid_of(one) == pid
        assert await one.exit_code() == names.EXIT_RETRYABLE
    assert "no plan is in force yet" in one.termination()["message"]


async def test_a_new_driver_that_counts_from_one_gets_a_worker_with_the_next_number(pod):
    one = pod()
    async with one.driver(attempt=1) as first:
        one.start(first)
        await first.wait("hello")
        await running(first, attempt=3)
        assert (await first.instruct(stop=agents_pb2.Stop(worker="env/0", grace_s=5))).ok
        assert not (await first.instruct(start=start(attempt=2))).ok, "the same driver must know better"
    async with one.driver(attempt=2, port=first.port) as second:
        await second.wait("hello")
        assert (await second.instruct(start=start(attempt=1))).ok
        await second.wait("heartbeat", lambda m: any(p.phase == "step" for p in m.heartbeat.progress))
    async with one.driver(attempt=3, port=first.port) as third:
        assert (await third.wait("hello")).hello.workers[0].attempt == 4


async def test_an_agent_whose_job_is_done_exits_with_zero_and_without_a_termination_message(pod, tmp_path):
    one = pod()
    async with one.driver() as driver:
        one.start(driver)
        await driver.wait("hello")
        await running(driver)
        driver.refuse("job math is complete", exit_code=names.EXIT_OK)
        assert await one.exit_code() == 0
    assert not (tmp_path / "termination.json").exists()


async def test_the_termination_message_names_the_worker_that_failed(pod):
    one = pod()
    async with one.driver() as driver:
        one.start(driver)
        await driver.wait("hello")
        await driver.instruct(start=start(do="fail"))
        await driver.wait("exited")
        driver.refuse("worker env/0 failed 3 times", exit_code=names.EXIT_USER_ERROR)
        assert await one.exit_code() == names.EXIT_USER_ERROR
    assert one.termination() == {
        "role": "env", "worker": 0, "pod": one.name, "node": "node-1", "exit_code": 64, "reason": "Refused",
        "message": "worker env/0 failed 3 times; the robot fell over",
    }  # fmt: skip


async def test_a_driver_of_another_protocol_is_a_sentence(pod):
    one = pod()
    async with one.driver(protocol=9) as driver:
        one.start(driver)
        assert await one.exit_code() == names.EXIT_USER_ERROR
    assert "got 9, wanted 1; run driver and worker pods from images of the same version" in one.errors()


async def test_a_certificate_that_may_not_attach_is_a_sentence(pod, tmp_path):
    one = pod()
    one.authority.folder(tmp_path / "tls", part="operator", job_uid="5f2c")
    async with one.driver() as driver:
        one.start(driver)
        assert await one.exit_code() == names.EXIT_USER_ERROR
    assert "may not be called by part 'operator'" in one.termination()["message"]


async def test_without_a_driver_for_long_the_agent_ends_its_workers_and_itself(pod):
    one = pod(driver_absence_timeout_s=1.0, stop_grace_s=2.0)
    async with one.driver() as driver:
        one.start(driver)
        await driver.wait("hello")
        await running(driver)
        everything = pods.tree(one.pid)
    assert await one.exit_code() == names.EXIT_RETRYABLE
    await pods.gone(everything)
    assert "no driver for 1 s at" in one.termination()["message"]


async def test_sigterm_stops_the_workers_with_grace_and_exits_143(pod):
    one = pod(stop_grace_s=3.0)
    async with one.driver() as driver:
        one.start(driver)
        await driver.wait("hello")
        await running(driver)
        await running(driver, worker="env/1", deaf=True, children=True)
        everything = pods.tree(one.pid)
        os.kill(one.pid, signal.SIGTERM)
        good = (await driver.wait("exited", lambda m: m.exited.worker == "env/0")).exited
        deaf = (await driver.wait("exited", lambda m: m.exited.worker == "env/1")).exited
        assert (good.asked, good.exit_code, deaf.asked, deaf.exit_code) == (True, 0, True, 137)
        assert await one.exit_code() == names.EXIT_TERMINATED
        await pods.gone(everything)
    assert one.termination()["reason"] == "Terminated"


async def test_the_last_words_of_an_agent_reach_a_driver_that_is_busy(pod):
    one = pod(stop_grace_s=3.0, final_flush_s=20.0)
    async with one.driver() as driver:
        one.start(driver)
        await driver.wait("hello")
        for number in range(4):
            await running(driver, worker=f"env/{number}")
        driver.pause_s = 0.05
        os.kill(one.pid, signal.SIGTERM)
        for number in range(4):
            await driver.wait("exited", lambda m, number=number: m.exited.worker == f"env/{number}")
        assert await one.exit_code() == names.EXIT_TERMINATED


async def test_a_later_second_sigterm_does_not_wait(pod):
    one = pod(stop_grace_s=60, hurry_after_s=0.1)
    async with one.driver() as driver:
        one.start(driver)
        await driver.wait("hello")
        await running(driver, deaf=True)
        os.kill(one.pid, signal.SIGTERM)
        async with asyncio.timeout(20):
            while "signal received" not in one.errors():  # two that are pending at once are one
                await asyncio.sleep(0.02)
        await asyncio.sleep(0.2)  # what makes the next one a later one
        os.kill(one.pid, signal.SIGTERM)
        assert await one.exit_code() == names.EXIT_TERMINATED


async def test_sigterm_said_twice_at_once_takes_no_grace_away(pod):
    one = pod()
    async with one.driver() as driver:
        one.start(driver)
        await driver.wait("hello")
        await running(driver)
        os.kill(one.pid, signal.SIGTERM)
        await asyncio.sleep(0.005)
        os.kill(one.pid, signal.SIGTERM)
        assert (await driver.wait("exited")).exited.exit_code == 0
        assert await one.exit_code() == names.EXIT_TERMINATED


async def test_a_killed_agent_leaves_no_process(pod):
    one = pod()
    async with one.driver() as driver:
        one.start(driver)
        await driver.wait("hello")
        await running(driver, children=True)
        everything = pods.tree(one.pid)
        assert len(everything) == 5, "agent, watchdog, worker, its child, its daemon"
        os.kill(one.pid, signal.SIGKILL)
        await pods.gone(everything)


async def test_a_pod_that_is_told_to_end_works_on_until_its_driver_lets_it_go(pod):
    one = pod(environ={names.ENV_GRACE: "60"})
    async with one.driver() as driver:
        one.start(driver)
        await driver.wait("hello")
        await running(driver)
        os.kill(one.pid, signal.SIGTERM)
        said = await driver.wait("leaving")
        assert 40 < said.leaving.within_s <= 60 - 10 - 3
        assert (await driver.instruct(leave=agents_pb2.Leave())).ok
        exited = await driver.wait("exited")
        assert exited.exited.asked
        assert await one.exit_code() == names.EXIT_TERMINATED


async def test_a_taken_metrics_port_is_a_sentence_and_worth_a_restart(pod):
    one = pod()
    with socket.create_server((one.ip, names.PORT_METRICS)):
        one.start()
        assert await one.exit_code() == names.EXIT_RETRYABLE
    assert one.termination()["reason"] == "PortTaken"
    assert one.errors().splitlines()[-1].startswith(f"port 7072 of {one.ip}, where /metrics is to be, is taken;")


@pytest.mark.parametrize(
    ("environ", "sentence"),
    [
        ({names.ENV_POOL: ""}, "got no RLINF_POOL"),
        ({names.ENV_SLOTS: "four"}, "RLINF_SLOTS is not a number: got 'four'"),
        ({names.ENV_RUN_DIR: "/tmp/" + "d" * 100}, "too long for Linux"),
        ({names.ENV_RUN_DIR: "/proc/nowhere"}, "run directory /proc/nowhere cannot be used"),
        ({names.ENV_TLS_DIR: "/nowhere"}, "certificates cannot be read from /nowhere"),
        ({names.ENV_SETTINGS: '{"grace": 1}'}, "a setting that does not exist: got 'grace'"),
        ({names.ENV_POD_IP: "192.0.2.1"}, "/metrics cannot listen on 192.0.2.1:7072"),
    ],
)
async def test_a_broken_pod_contract_is_one_sentence(pod, environ, sentence):
    one = pod(environ=environ)
    one.start(module="rlinf_worker")
    assert await one.exit_code() == names.EXIT_USER_ERROR
    last = one.errors().splitlines()[-1]
    assert sentence in last
    assert one.termination()["message"] == last
    assert "Traceback" not in "".join(line for line in one.errors().splitlines() if not line.startswith("{"))


async def test_an_agent_is_light(pod):
    one = pod()
    async with one.driver() as driver:
        one.start(driver)
        await driver.wait("heartbeat")
        agent = psutil.Process(one.pid)
        cpu, rss = sum(agent.cpu_times()[:2]), agent.memory_info().rss / 2**20
        print(json.dumps({"cpu_s": cpu, "rss_mib": round(rss, 1)}))
        libraries = Path(f"/proc/{one.pid}/maps").read_text()
        assert not [heavy for heavy in ("pydantic", "torch", "numpy", "psutil") if heavy in libraries]
        assert rss <= 60
