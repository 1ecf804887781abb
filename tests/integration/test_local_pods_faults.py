"""Pods that fail, hang, fork away or lose their backend: what is reported, and that nothing is left."""

import asyncio
import errno
import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest

from rljob.local import kubelet, processes, volumes
from rljob.local.addresses import Addresses
from tests.local_pods import TIMEOUT_S, LocalCluster, condition, main_status, secret, terminated

DOUBLE_FORK = """
import os, sys, time
child = os.fork()
if child == 0:
    os.setsid()
    if os.fork() == 0:
        if sys.argv[1] == "scrub":
            os.execve("/bin/sleep", ["sleep", "61.5"], {})
        time.sleep(600)
    os._exit(0)
os.waitpid(child, 0)
print("forked", flush=True)
time.sleep(float(sys.argv[2]))
"""


@pytest.fixture
async def cluster(tmp_path):
    async with LocalCluster(tmp_path) as cluster:
        yield cluster


def processes_of(pod_uid: str) -> list[int]:
    return [pid for pid, _ in processes.marked(pod_uid)]


def below(pid: int) -> list[int]:
    """Living descendants, also those without a marked environment."""
    try:
        children = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return [p.pid for p in children if p.status() != psutil.STATUS_ZOMBIE]


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def test_a_command_that_does_not_exist_is_a_start_error(cluster):
    await cluster.run("a", "no-such-program", "x")
    done = await cluster.until("a", phase="Failed")
    assert (terminated(done)["exitCode"], terminated(done)["reason"]) == (128, "StartError")
    assert "no-such-program" in terminated(done)["message"]
    assert "executable file not found in $PATH" in terminated(done)["message"]
    await cluster.run("b", "true", container={"workingDir": "/no/such/folder"})
    assert "/no/such/folder" in terminated(await cluster.until("b", phase="Failed"))["message"]


async def test_what_no_program_can_be_started_with_is_a_start_error(cluster):
    """What a Secret holds is known only now, and a variable cannot hold all that a file can."""
    await cluster.store.create(secret("s", t="to\0ken"))
    env = [{"name": "T", "valueFrom": {"secretKeyRef": {"name": "s", "key": "t"}}}]
    await cluster.run("a", "true", container={"env": env})
    done = await cluster.until("a", phase="Failed")
    assert (terminated(done)["exitCode"], terminated(done)["reason"]) == (128, "StartError")
    assert terminated(done)["message"] == "failed to start container 'main': exec: 'sh': embedded null byte"
    await cluster.run("b", "true", container={"workingDir": "/ü" + "\udcff" * 2000})
    message = terminated(await cluster.until("b", phase="Failed"))["message"]
    assert message.startswith("failed to start container 'main': workingDir '/ü\\udcff")


async def test_a_missing_secret_is_waited_for_and_named(cluster):
    env = [{"name": "T", "valueFrom": {"secretKeyRef": {"name": "late", "key": "t"}}}]
    await cluster.run("env", "echo $T", container={"env": env})
    await cluster.run("volume", "true", volumes=[{"name": "v", "secret": {"secretName": "late"}}])
    waiting = await cluster.until("env", lambda pod: main_status(pod)["state"].get("waiting", {}).get("message"))
    assert main_status(waiting)["state"]["waiting"] == {
        "reason": "CreateContainerConfigError",
        "message": 'secret "late" not found',
    }
    waiting = await cluster.until("volume", lambda pod: main_status(pod)["state"].get("waiting", {}).get("message"))
    assert main_status(waiting)["state"]["waiting"]["reason"] == "ContainerCreating"
    await cluster.until_true(lambda: {e["reason"] for e in events(cluster)} == {"Failed", "FailedMount"}, what="events")
    await cluster.store.create(secret("late", t="42"))
    await cluster.until("env", phase="Succeeded")
    await cluster.until("volume", phase="Succeeded")
    assert cluster.log("env") == "42\n"


def events(cluster):
    return [obj for obj in cluster.store.snapshot() if obj["kind"] == "Event"]


async def test_what_local_mode_has_not_is_refused_by_name_before_anything_starts(cluster):
    await cluster.run("a", "echo started", hostNetwork=True, container={"livenessProbe": {}})
    done = await cluster.until("a", phase="Failed")
    assert done["status"]["reason"] == "NotSupportedYet"
    assert "spec.hostNetwork" in done["status"]["message"]
    assert "spec.containers[0] (main).livenessProbe" in done["status"]["message"]
    assert cluster.log("a") == ""


async def test_a_taken_port_is_an_unschedulable_pod_until_it_is_free(cluster):
    with socket.socket() as holder:
        holder.bind(("0.0.0.0", 0))
        holder.listen()
        port = holder.getsockname()[1]
        await cluster.run("a", "true", container={"ports": [{"containerPort": port}]})
        waiting = await cluster.until("a", lambda pod: condition(pod, "PodScheduled"))
        assert (condition(waiting, "PodScheduled")["status"], waiting["status"]["phase"]) == ("False", "Pending")
        assert f":{port}/TCP: Address already in use" in condition(waiting, "PodScheduled")["message"]
    await cluster.until("a", phase="Succeeded")


async def test_deletion_sends_sigterm_and_takes_the_object_away_at_the_end(cluster):
    seen = []
    script = "trap 'echo term; exit 143' TERM; echo up; while :; do sleep 0.02; done"
    await cluster.run("a", script)
    await cluster.until_log("a", "up")

    async def follow() -> None:
        async for event in cluster.store.watch("Pod"):
            seen.append(event)
            if event.type == "DELETED":
                return

    follower = asyncio.create_task(follow())
    await cluster.store.delete("Pod", "a")
    await asyncio.wait_for(follower, TIMEOUT_S)
    assert cluster.log("a").splitlines() == ["up", "term"]
    last = seen[-1].object
    assert last["metadata"]["deletionTimestamp"]
    assert (last["status"]["phase"], terminated(last)["exitCode"]) == ("Failed", 143)


async def test_who_ignores_sigterm_is_killed_after_the_grace_period_with_all_its_children(cluster):
    pod = await cluster.run(
        "a", "trap '' TERM; sleep 600 & sleep 600 & echo up; wait; wait", terminationGracePeriodSeconds=1
    )
    await cluster.until_log("a", "up")
    await cluster.until_true(lambda: len(processes_of(pod["metadata"]["uid"])) == 3, what="a shell and two sleeps")
    t0 = time.monotonic()
    await cluster.store.delete("Pod", "a")
    await cluster.until_gone("a")
    assert time.monotonic() - t0 > 0.9
    assert processes_of(pod["metadata"]["uid"]) == []


async def test_a_second_deletion_without_grace_kills_at_once(cluster):
    pod = await cluster.run(
        "a", "trap '' TERM; echo up; while :; do sleep 0.05; done", terminationGracePeriodSeconds=600
    )
    await cluster.until_log("a", "up")
    await cluster.store.delete("Pod", "a")
    await cluster.store.delete("Pod", "a", grace_period_s=0)
    await cluster.until_true(lambda: not processes_of(pod["metadata"]["uid"]), what="death of a force-deleted pod")


@pytest.mark.parametrize("marker", ["keep", "scrub"])
async def test_grandchildren_that_left_session_and_environment_die_with_their_container(cluster, marker):
    before = set(below(os.getpid()))
    await cluster.run("a", "python", "-c", DOUBLE_FORK, container={"args": [marker, "0.2"]})
    await cluster.until_log("a", "forked")
    await cluster.until("a", phase="Succeeded")
    assert set(below(os.getpid())) - before == set()


async def test_a_container_whose_shim_is_killed_is_lost_and_leaves_nothing(cluster):
    pod = await cluster.run("a", "python", "-c", DOUBLE_FORK, container={"args": ["keep", "600"]})
    await cluster.until_log("a", "forked")
    main = int(main_status(await cluster.until("a", phase="Running"))["containerID"].removeprefix("process://"))
    os.kill(psutil.Process(main).ppid(), signal.SIGKILL)
    done = await cluster.until("a", phase="Failed")
    assert (terminated(done)["exitCode"], terminated(done)["reason"]) == (255, "Unknown")
    await cluster.until_true(lambda: not processes_of(pod["metadata"]["uid"]), what="sweep")
    assert not alive(main)


BACKEND = """
import asyncio, sys
from pathlib import Path
from unittest.mock import Mock
from tests.local_pods import LocalCluster
async def main():
    async with LocalCluster(Path(sys.argv[1])) as cluster:
        vol = {"volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
               "container": {"args": ["keep", "600"], "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}]}}
        for name in ("a", "b"):
            pod = await cluster.run(name, "python", "-c", sys.argv[2], **vol)
            await cluster.until_log(name, "forked")
            print(pod["metadata"]["uid"], flush=True)
        print(cluster.kubelet._scratch.memory, cluster.kubelet._scratch.disk, flush=True)
        await asyncio.sleep(600)
asyncio.run(main())
"""


async def test_kill_9_of_the_backend_takes_everything_down(tmp_path, cluster):
    root = Path(__file__).parents[2]
    backend = subprocess.Popen(  # noqa: ASYNC220 - forks in milliseconds
        [sys.executable, "-c", BACKEND, str(tmp_path / "other"), DOUBLE_FORK],
        stdout=subprocess.PIPE,
        text=True,
        cwd=root,
    )
    with backend:
        assert backend.stdout is not None
        uids = [(await asyncio.to_thread(backend.stdout.readline)).strip() for _ in range(2)]
        folders = [Path(word) for word in (await asyncio.to_thread(backend.stdout.readline)).split()]
        await cluster.until_true(lambda: all(len(processes_of(uid)) == 2 for uid in uids), what="both, of each pod")
        running = below(backend.pid)
        assert all(folder.is_dir() for folder in folders)
        backend.kill()
        await cluster.until_true(lambda: not any(alive(pid) for pid in running), what="end of all pods")
        assert [processes_of(uid) for uid in uids] == [[], []]
        await cluster.until_true(lambda: not folders[0].exists(), what="removal of the memory folder")
        # The disk folder also holds the hosts file, so it waits for the next backend.
        async with LocalCluster(tmp_path / "third"):
            assert not folders[1].exists()


async def test_leaving_the_backend_stops_pods_in_order(tmp_path):
    async with LocalCluster(tmp_path) as cluster:
        pod = await cluster.run("a", "trap 'echo bye; exit 143' TERM; echo up; while :; do sleep 0.02; done")
        await cluster.until_log("a", "up")
    assert cluster.log("a").splitlines() == ["up", "bye"]
    assert processes_of(pod["metadata"]["uid"]) == []
    final = await cluster.store.get("Pod", "a")
    assert (final["status"]["phase"], terminated(final)["exitCode"]) == ("Failed", 143)


async def test_two_backends_at_once_share_no_address(tmp_path):
    async with LocalCluster(tmp_path / "x") as x, LocalCluster(tmp_path / "y") as y:
        addresses = []
        for cluster in (x, y):
            for name in ("a", "b"):
                await cluster.run(name, "sleep 60")
                addresses.append((await cluster.until(name, phase="Running"))["status"]["podIP"])
        assert len(set(addresses)) == 4


def test_a_released_address_is_not_the_next_one_handed_out():
    addresses = Addresses()
    first, holder = addresses.claim()
    holder.close()
    second, holder = addresses.claim()
    holder.close()
    assert first != second


async def test_a_pod_recreated_under_its_name_is_another_pod(cluster):
    old = await cluster.run("a", "trap '' TERM; echo old; while :; do sleep 0.05; done")
    await cluster.until_log("a", "old")
    await cluster.store.delete("Pod", "a", grace_period_s=0)
    new = await cluster.run("a", "echo new")
    done = await cluster.until("a", phase="Succeeded")
    assert done["metadata"]["uid"] == new["metadata"]["uid"]
    await cluster.until_true(lambda: not processes_of(old["metadata"]["uid"]), what="end of the old pod")


async def test_a_volume_without_room_is_a_failed_mount_that_heals(cluster, monkeypatch):
    tries = itertools.count()

    def no_room(*_):
        raise OSError(errno.ENOSPC, "No space left on device", f"/dev/shm/x{next(tries)}")

    with monkeypatch.context() as patched:
        patched.setattr(volumes, "replace_files", no_room)
        await cluster.store.create(secret("s", k="v"))
        await cluster.run("a", "true", volumes=[{"name": "tls", "secret": {"secretName": "s"}}])
        await cluster.until_true(lambda: any(e["count"] > 3 for e in events(cluster)), what="a fourth try")
        waiting = await cluster.until("a", lambda pod: main_status(pod)["state"].get("waiting", {}).get("message"))
    (told,) = events(cluster)
    message = main_status(waiting)["state"]["waiting"]["message"]
    wanted = r'volume "tls": No space left on device \(/dev/shm/x\d+, \d+ of \d+ bytes free\); make room'
    for said in (message, told["message"], cluster.kubelet.held_up.removeprefix("a: ")):
        assert re.search(wanted, said), said
    await cluster.until("a", phase="Succeeded")
    assert cluster.kubelet.held_up == ""


async def test_a_missing_secret_is_nothing_that_this_machine_lacks(cluster):
    await cluster.run("a", "true", volumes=[{"name": "v", "secret": {"secretName": "late"}}])
    await cluster.until("a", lambda pod: main_status(pod)["state"].get("waiting", {}).get("message"))
    assert cluster.kubelet.held_up == ""


async def test_names_that_find_no_room_are_written_once_there_is_some(cluster, monkeypatch):
    hosts = cluster.kubelet.hosts_file("default")
    with monkeypatch.context() as patched:
        no_room = OSError(errno.ENOSPC, "No space left on device", str(hosts))
        patched.setattr(kubelet, "write_atomically", Mock(side_effect=no_room))
        await cluster.run("a", "sleep 60", hostname="here", subdomain="net")
        await cluster.until_true(lambda: "names of pods" in cluster.kubelet.held_up, what="word of the names")
        await cluster.until("a", phase="Failed")
        await cluster.store.delete("Pod", "a")
    await cluster.until_true(lambda: hosts.exists() and not cluster.kubelet.held_up, what="the file of names")
    assert cluster.kubelet.failure is None


async def test_a_log_that_cannot_be_written_fails_the_pod_with_its_reason(cluster, tmp_path):
    (tmp_path / "logs").write_text("not a folder")
    await cluster.run("a", "true")
    done = await cluster.until("a", phase="Failed")
    assert done["status"]["reason"] == "LocalMachine"
    assert f"Not a directory ({tmp_path}/logs/a); make room, or choose another --work-dir" in done["status"]["message"]
    assert cluster.kubelet.held_up == f"a: {done['status']['message']}"
    await cluster.store.delete("Pod", "a")
    await cluster.until_true(lambda: cluster.kubelet.held_up == "", what="word that nobody wants the pod any more")
    (tmp_path / "logs").unlink()
    (tmp_path / "logs" / "b" / "main.log").mkdir(parents=True)
    await cluster.run("b", "true")
    assert "Is a directory" in terminated(await cluster.until("b", phase="Failed"))["message"]
