"""Names of pods and Services in the hosts file."""

from rljob.local import hosts


def pod(name, ip, *, hostname="", ready=True, phase="Running", **labels):
    conditions = [{"type": "Ready", "status": "True" if ready else "False"}]
    spec = {"hostname": hostname, "subdomain": "math"} if hostname else {}
    return {"metadata": {"name": name, "labels": labels}, "spec": spec,
            "status": {"phase": phase, "podIP": ip, "conditions": conditions}}  # fmt: skip


def service(name="math", **spec):
    return {"metadata": {"name": name}, "spec": {"clusterIP": "None", "selector": {"job": "math"}} | spec}


def lines(*pods, services=None):
    return hosts.text(pods, services or [service()], namespace="team").splitlines()[1:]


def test_a_pod_is_known_by_hostname_and_by_its_service():
    assert lines(pod("p", "127.1.0.1", hostname="gpu-0", job="math")) == [
        "127.1.0.1 gpu-0.math.team.svc gpu-0.math.team.svc.cluster.local gpu-0.math.team gpu-0.math",
        "127.1.0.1 p",
        "127.1.0.1 math.team.svc math.team.svc.cluster.local math.team math",
    ]


def test_a_pod_that_is_not_ready_has_no_name_unless_its_service_publishes_it():
    waiting = pod("p", "127.1.0.1", hostname="gpu-0", ready=False, job="math")
    assert lines(waiting) == ["127.1.0.1 p"]
    assert len(lines(waiting, services=[service(publishNotReadyAddresses=True)])) == 3


def test_dead_pods_and_pods_of_no_service_have_no_service_name():
    assert lines(pod("p", "127.1.0.1", phase="Failed", job="math")) == []
    assert lines(pod("p", "127.1.0.1", hostname="x", job="other")) == ["127.1.0.1 p"]


def test_two_pods_of_one_hostname_are_two_addresses_of_one_name():
    found = lines(*(pod(n, f"127.1.0.{i}", hostname="gpu-0", job="math") for i, n in ((1, "a1"), (2, "a2"))))
    assert [line.split()[0] for line in found if " gpu-0.math " in f"{line} "] == ["127.1.0.1", "127.1.0.2"]


def test_a_service_that_maps_ports_gets_no_name():
    mapped = service(clusterIP="", ports=[{"port": 80, "targetPort": 8080}])
    plain = service(clusterIP="", ports=[{"port": 80}])
    one = pod("p", "127.1.0.1", job="math")
    assert lines(one, services=[mapped]) == ["127.1.0.1 p"]
    assert len(lines(one, services=[plain])) == 2
