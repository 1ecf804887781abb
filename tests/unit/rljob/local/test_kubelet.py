"""The kubelet of local mode: where a container runs, and what an end of the backend leaves."""

import asyncio
from dataclasses import replace
from unittest.mock import AsyncMock, Mock

import pytest

from rljob.local import processes
from rljob.local.processes import ContainerProcess
from tests.local_pods import TIMEOUT_S, LocalCluster


async def test_a_container_without_a_working_dir_runs_where_rljob_was_called(tmp_path, monkeypatch):
    called = tmp_path / "called"
    called.mkdir()
    monkeypatch.chdir(called)
    async with LocalCluster(tmp_path / "work") as cluster:
        await cluster.run("a", "pwd")
        await cluster.run("b", "pwd", container={"workingDir": "/"})
        await cluster.until("a", phase="Succeeded")
        await cluster.until("b", phase="Succeeded")
        assert (cluster.log("a"), cluster.log("b")) == (f"{called}\n", "/\n")


async def test_at_the_end_each_pod_has_its_own_grace_period_and_no_more_than_15_s(tmp_path):
    lives = {seconds: Mock(pod={"spec": {"terminationGracePeriodSeconds": seconds}}) for seconds in (5, 60)}
    for life in lives.values():
        life.stop = AsyncMock()
    async with LocalCluster(tmp_path) as cluster:
        cluster.kubelet._lives.update({str(seconds): life for seconds, life in lives.items()})
    lives[5].stop.assert_awaited_once_with(5.0)
    lives[60].stop.assert_awaited_once_with(15.0)


async def test_an_end_that_is_broken_off_while_tasks_end_leaves_no_process_and_no_folder(tmp_path):
    cluster, is_ending = LocalCluster(tmp_path), asyncio.Event()

    async def lingers() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            is_ending.set()
            await asyncio.Event().wait()

    await cluster.__aenter__()
    cluster.kubelet.spawn(lingers(), name="a task that takes its time")
    made = await cluster.run("a", "trap '' TERM; echo up; while :; do sleep 0.05; done")
    await cluster.until_log("a", "up")
    memory = cluster.kubelet.memory
    leaving = asyncio.create_task(cluster.__aexit__(None, None, None))
    await asyncio.wait_for(is_ending.wait(), TIMEOUT_S)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert processes.marked(made["metadata"]["uid"]) == []
    assert not memory.exists()


async def test_processes_that_outlive_sigkill_are_told_in_an_event_of_their_pod(tmp_path, monkeypatch):
    wait_exit = ContainerProcess.wait_exit

    async def with_some_left(process):
        return replace(await wait_exit(process), left=(7, 8))

    monkeypatch.setattr(ContainerProcess, "wait_exit", with_some_left)
    async with LocalCluster(tmp_path) as cluster:
        await cluster.run("a", "true")
        await cluster.until("a", phase="Succeeded")
        [told] = (await cluster.store.list("Event")).items
    assert (told["reason"], told["involvedObject"]["name"]) == ("FailedKillPod", "a")
    assert told["message"] == "processes of container 'main' outlive SIGKILL: 7, 8"
