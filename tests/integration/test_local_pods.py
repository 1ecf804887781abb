"""What a pod's containers get and what its status says: the process backend against the pod contract."""

import json
import sys
from pathlib import Path

import pytest

from rljob.local import processes
from tests.local_pods import LocalCluster, condition, config_map, encoded, main_status, secret, terminated


@pytest.fixture
async def cluster(tmp_path):
    async with LocalCluster(tmp_path) as cluster:
        yield cluster


async def test_a_pod_runs_and_succeeds_with_the_statuses_of_a_kubelet(cluster):
    await cluster.run("a", "echo hello; exit 0")
    done = await cluster.until("a", phase="Succeeded")
    assert cluster.log("a") == "hello\n"
    assert done["spec"]["nodeName"] == "local"
    assert done["status"]["podIP"].startswith("127.1.")
    assert done["status"]["startTime"]
    assert terminated(done) | {"startedAt": 0, "finishedAt": 0, "containerID": 0} == {
        "exitCode": 0,
        "reason": "Completed",
        "startedAt": 0,
        "finishedAt": 0,
        "containerID": 0,
    }
    assert condition(done, "Ready")["reason"] == "PodCompleted"
    assert condition(done, "PodScheduled")["status"] == "True"


async def test_a_running_pod_is_ready(cluster):
    await cluster.run("a", "sleep 60")
    running = await cluster.until("a", phase="Running")
    assert condition(running, "Ready")["status"] == condition(running, "ContainersReady")["status"] == "True"
    assert main_status(running)["state"]["running"]["startedAt"]
    assert main_status(running)["started"] is True


@pytest.mark.parametrize(("line", "code", "reason"), [("exit 7", 7, "Error"), ("kill -9 $$$$", 137, "Error")])
async def test_exit_codes_and_signals_are_reported(cluster, line, code, reason):
    await cluster.run("a", line)
    done = await cluster.until("a", phase="Failed")
    assert (terminated(done)["exitCode"], terminated(done)["reason"]) == (code, reason)


async def test_python_is_the_interpreter_that_runs_rljob(cluster):
    await cluster.run("a", "python", "-c", "import sys; print(sys.executable)")
    await cluster.until("a", phase="Succeeded")
    assert cluster.log("a").strip() == sys.executable


async def test_the_environment_comes_from_every_source(cluster):
    await cluster.store.create(secret("s", token="t0k"))
    await cluster.store.create(config_map("c", mode="fast", other="x"))
    env = [
        {"name": "PLAIN", "value": "1"},
        {"name": "NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "UID", "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}},
        {"name": "ROLE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['role']"}}},
        {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "s", "key": "token"}}},
        {"name": "MODE", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "mode"}}},
        {"name": "ABSENT", "valueFrom": {"configMapKeyRef": {"name": "none", "key": "k", "optional": True}}},
        {"name": "BOTH", "value": "$(PLAIN)-$(NAME)-$(NOPE)-$$(PLAIN)"},
    ]
    container = {"env": env, "envFrom": [{"prefix": "C_", "configMapRef": {"name": "c"}}], "args": ["$(BOTH)"]}
    script = "import json, os, sys; print(json.dumps([dict(os.environ), sys.argv]))"
    created = await cluster.run("a", "python", "-c", script, container=container, labels={"role": "x"})
    done = await cluster.until("a", phase="Succeeded")
    seen, argv = json.loads(cluster.log("a"))
    wanted = {
        "PLAIN": "1",
        "NAME": "a",
        "UID": created["metadata"]["uid"],
        "ROLE": "x",
        "IP": done["status"]["podIP"],
        "NODE": "local",
        "TOKEN": "t0k",
        "MODE": "fast",
        "BOTH": "1-a-$(NOPE)-$(PLAIN)",
        "C_mode": "fast",
        "C_other": "x",
        "RLINF_POD_UID": created["metadata"]["uid"],
    }
    assert {name: seen.get(name) for name in wanted} == wanted
    assert "ABSENT" not in seen
    assert argv[1] == wanted["BOTH"]


async def test_volumes_are_folders_and_paths_of_the_pod_contract_lead_to_them(cluster, tmp_path):
    await cluster.store.create(secret("s", **{"tls.key": "k3y"}))
    await cluster.store.create(config_map("c", **{"job.json": "{}"}))
    volumes = [
        {"name": "run", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "16Mi"}},
        {"name": "tls", "secret": {"secretName": "s", "defaultMode": 0o600}},
        {
            "name": "job",
            "projected": {
                "sources": [
                    {"configMap": {"name": "c", "items": [{"key": "job.json", "path": "deep/job.json"}]}},
                    {
                        "downwardAPI": {
                            "items": [{"path": "role", "fieldRef": {"fieldPath": "metadata.labels['role']"}}]
                        }
                    },
                ]
            },
        },
        {"name": "data", "persistentVolumeClaim": {"claimName": "data"}},
    ]
    mounts = [
        {"name": "run", "mountPath": "/run/rlinf"},
        {"name": "shm", "mountPath": "/dev/shm"},
        {"name": "tls", "mountPath": "/etc/tls", "readOnly": True},
        {"name": "job", "mountPath": "/etc/job"},
        {"name": "data", "mountPath": "/data"},
        {"name": "data", "mountPath": "/ckpt", "subPath": "checkpoints"},
    ]
    env = [
        {"name": name, "value": value}
        for name, value in (
            ("RUN", "/run/rlinf/x"),
            ("SHM", "/dev/shm"),
            ("TLS", "/etc/tls"),
            ("JOB", "/etc/job"),
            ("CKPT", "/ckpt"),
        )
    ]
    line = 'echo 1 >$RUN; echo 1 >$SHM/x; cat $TLS/tls.key $JOB/deep/job.json $JOB/role; echo; echo $RUN $SHM "$1"; '
    line += "echo kept >$CKPT/f; stat -Lc %a $TLS/tls.key"
    container = {"env": env, "volumeMounts": mounts, "args": ["_", "/data/in"]}
    await cluster.run("a", line, container=container, volumes=volumes, labels={"role": "actor"})
    done = await cluster.until("a", lambda pod: pod["status"]["phase"] in ("Succeeded", "Failed"))
    assert done["status"]["phase"] == "Succeeded", cluster.log("a")
    contents, paths, mode = cluster.log("a").splitlines()
    assert contents == "k3y{}actor"
    run, shm, data = paths.split()
    assert shm.startswith("/dev/shm/rlj-")
    assert data == str(tmp_path / "claims" / "data" / "in")
    assert mode == "600"
    assert (tmp_path / "claims/data/checkpoints/f").read_text() == "kept\n"
    assert len(run) < 80, "unix sockets lie here and may have 107 bytes"
    await cluster.until_true(lambda: not Path(run).exists() and not Path(shm).exists(), what="removal of its folders")


async def test_a_changed_secret_reaches_the_files_of_a_running_pod(cluster):
    await cluster.store.create(secret("s", cert="one"))
    mounts = {"volumeMounts": [{"name": "tls", "mountPath": "/tls"}], "env": [{"name": "TLS", "value": "/tls"}]}
    line = "cat $TLS/cert; echo; until grep -q two $TLS/cert; do sleep 0.02; done; echo renewed"
    await cluster.run("a", line, container=mounts, volumes=[{"name": "tls", "secret": {"secretName": "s"}}])
    await cluster.until_log("a", "one")
    await cluster.store.patch("Secret", "s", patch={"data": encoded({"cert": "two"})})
    await cluster.until_log("a", "renewed")


async def test_the_termination_message_is_the_file_even_inside_a_volume(cluster):
    container = {
        "env": [{"name": "LAST", "value": "/run/rlinf/last.json"}, {"name": "RUN", "value": "/run/rlinf"}],
        "terminationMessagePath": "/run/rlinf/last.json",
        "volumeMounts": [{"name": "run", "mountPath": "/run/rlinf"}],
    }
    line = "printf '%05000d' 0 >$LAST; test -e $RUN/last.json && exit 3"
    await cluster.run("a", line, container=container, volumes=[{"name": "run", "emptyDir": {}}])
    done = await cluster.until("a", phase="Failed")
    assert terminated(done)["exitCode"] == 3
    assert terminated(done)["message"] == "0" * 4096


async def test_without_a_message_the_end_of_the_log_is_it_if_asked_for(cluster):
    container = {"terminationMessagePolicy": "FallbackToLogsOnError"}
    await cluster.run("a", "seq 1 300; exit 1", container=container)
    await cluster.run("b", "seq 1 300; exit 0", container=container)
    failed, succeeded = await cluster.until("a", phase="Failed"), await cluster.until("b", phase="Succeeded")
    assert terminated(failed)["message"].split() == [str(n) for n in range(221, 301)]
    assert "message" not in terminated(succeeded)


async def test_init_containers_run_in_order_before_the_others(cluster, tmp_path):
    gate = tmp_path / "gate"
    spec = {
        "initContainers": [
            {
                "name": n,
                "command": ["sh", "-c", f"until test -e {gate}; do sleep 0.02; done; echo {n} >>$D/f"],
                "env": [{"name": "D", "value": "/d"}],
                "volumeMounts": [{"name": "d", "mountPath": "/d"}],
            }
            for n in ("one", "two")
        ],
        "volumes": [{"name": "d", "emptyDir": {}}],
    }
    container = {"env": [{"name": "D", "value": "/d"}], "volumeMounts": [{"name": "d", "mountPath": "/d"}]}
    await cluster.run("a", "cat $D/f", container=container, **spec)
    waiting = await cluster.until("a", lambda pod: condition(pod, "Initialized").get("status") == "False")
    assert condition(waiting, "Initialized")["message"] == "containers with incomplete status: [one two]"
    assert main_status(waiting)["state"]["waiting"]["reason"] == "PodInitializing"
    gate.touch()
    done = await cluster.until("a", phase="Succeeded")
    assert cluster.log("a") == "one\ntwo\n"
    assert [c["state"]["terminated"]["exitCode"] for c in done["status"]["initContainerStatuses"]] == [0, 0]


async def test_a_failed_init_container_fails_the_pod_that_never_restarts(cluster):
    await cluster.run("a", "echo never", initContainers=[{"name": "i", "command": ["false"]}])
    await cluster.until("a", phase="Failed")
    assert cluster.log("a") == ""


async def test_a_pod_of_two_containers_is_over_when_both_are(cluster, tmp_path):
    gate = tmp_path / "gate"
    lines = (("x", "exit 0"), ("y", f"until test -e {gate}; do sleep 0.02; done; exit 4"))
    await cluster.run("a", "", containers=[{"name": n, "command": ["sh", "-c", line]} for n, line in lines])
    half = await cluster.until(
        "a", lambda pod: "terminated" in main_status(pod)["state"] and pod["status"]["containerStatuses"][1]["ready"]
    )
    assert half["status"]["phase"] == "Running"
    assert condition(half, "Ready")["message"] == "containers with unready status: [x]"
    gate.touch()
    await cluster.until("a", phase="Failed")


async def test_readiness_follows_the_probe(cluster):
    script = "from http.server import *; import os; "
    script += "HTTPServer((os.environ['IP'], 8080), SimpleHTTPRequestHandler).serve_forever()"
    http = {
        "env": [{"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
        "ports": [{"name": "web", "containerPort": 8080}],
        "readinessProbe": {"httpGet": {"port": "web", "path": "/"}, "periodSeconds": 0.05},
    }
    marker = {
        "env": [{"name": "D", "value": "/d"}],
        "volumeMounts": [{"name": "d", "mountPath": "/d"}],
        "readinessProbe": {
            "exec": {"command": ["sh", "-c", "test -e $D/ready"]},
            "periodSeconds": 0.05,
            "failureThreshold": 1,
            "timeoutSeconds": 5,
        },
    }
    tcp = http | {"readinessProbe": {"tcpSocket": {"port": 8080}, "periodSeconds": 0.05}}
    await cluster.run("http", "python", "-c", script, container=http)
    await cluster.run("tcp", "python", "-c", script, container=tcp)
    line = "echo $D; sleep 60"
    await cluster.run("exec", line, container=marker, volumes=[{"name": "d", "emptyDir": {}}])
    ready = Path((await cluster.until_log("exec", "\n")).strip()) / "ready"
    await cluster.until("exec", lambda pod: pod["status"]["phase"] == "Running" and not main_status(pod)["ready"])
    ready.touch()
    for name in ("exec", "http", "tcp"):
        await cluster.until(name, lambda pod: condition(pod, "Ready").get("status") == "True")
    ready.unlink()
    await cluster.until("exec", lambda pod: condition(pod, "Ready").get("status") == "False")


async def test_a_log_keeps_its_bound(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "LOG_LIMIT_BYTES", 20_000)
    async with LocalCluster(tmp_path) as cluster:
        await cluster.run("a", "seq 1 20000")
        await cluster.until("a", phase="Succeeded")
        logs = list((tmp_path / "logs" / "a").iterdir())
        assert {path.name for path in logs} == {"main.log", "main.log.1"}
        assert sum(path.stat().st_size for path in logs) <= 20_000
        assert cluster.log("a").endswith("20000\n")


async def test_hosts_file_names_pods_and_services(cluster):
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "math"},
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"job": "math"}},
    }
    await cluster.store.create(service)
    line = "cat $RLINF_HOSTS_FILE; sleep 60"
    await cluster.run("math-gpu-0-a1", line, labels={"job": "math"}, hostname="gpu-0", subdomain="math")
    pod = await cluster.until("math-gpu-0-a1", phase="Running")
    ip, hosts_file = pod["status"]["podIP"], cluster.kubelet.hosts_file("default")
    for names in (
        "gpu-0.math.default.svc gpu-0.math.default.svc.cluster.local gpu-0.math.default gpu-0.math",
        "math.default.svc math.default.svc.cluster.local math.default math",
    ):
        await cluster.until_log("math-gpu-0-a1", f"{ip} {names}\n")
    await cluster.store.delete("Pod", "math-gpu-0-a1", grace_period_s=0)
    await cluster.until_gone("math-gpu-0-a1")
    await cluster.until_true(lambda: ip not in hosts_file.read_text(), what="a hosts file without the dead pod")
