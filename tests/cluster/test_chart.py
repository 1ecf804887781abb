"""The chart on a real cluster: installed from the built image, its rights and policies enforced, upgraded, uninstalled.

A cluster of its own: NetworkPolicies are enforced in it, and CRDs and the admission policy belong to the whole cluster.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import yaml

from rlinf_api import job, names
from rlinf_api.profile import RLProfileSpec, key_of
from rlinf_operator import access
from tests.builders import plan_of, ppo_job
from tests.cluster import bars, chart, growing, worker_image
from tests.cluster.chart import Release
from tests.cluster.conftest import skip_or_fail
from tests.cluster.control_plane import BEGUN_S, cartpole
from tests.cluster.paced import Paced
from tests.cluster.pods import create, phase, pod, wait_ready
from tools import workloads
from tools.chart import images, rendering
from tools.testcluster import binaries
from tools.testcluster.api import ApiError
from tools.testcluster.cluster import REPOSITORY, Cluster
from tools.testcluster.errors import CommandFailed, MissingRequirement, NotBuilt
from tools.testcluster.layout import Options
from tools.testcluster.waiting import until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

JOB: dict[str, Any] = {
    "apiVersion": names.API_VERSION,
    "kind": "RLJob",
    "metadata": {"name": "job"},
    "spec": {
        "flow": {"name": "ppo", "steps": 1, "config": {"env": "CartPole-v1"}},
        "roles": [{"name": n, "kind": k} for n, k in (("env", "gymnasium"), ("rollout", "torch"), ("actor", "fsdp"))],
        "pools": [
            {"name": "cpu", "roles": ["env", "rollout", "actor"], "slots": {"perPod": 3, "cpu": "1", "memory": "1Gi"}}
        ],
        "suspend": True,
    },
}
"""Suspended, so that nothing of it runs."""
POLICIES = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    try:
        made = Cluster.up(
            f"pytest-chart-{os.getpid()}", Options(network_policies=True), report=binaries.say, owner_pid=os.getpid()
        )
    except MissingRequirement as error:
        skip_or_fail(str(error))
    with made:
        yield made


@pytest.fixture(scope="module")
def image(cluster: Cluster) -> str:
    try:
        return chart.load_image(cluster)
    except NotBuilt as error:
        skip_or_fail(str(error))
        raise


@pytest.mark.timeout(1500)  # the first to want the image: without layers of an earlier build pip runs for minutes
def test_the_image_runs_as_a_user_that_it_has_never_heard_of(cluster: Cluster, image: str, namespace: str):
    """Some clusters give every namespace a range of user ids of its own."""
    manifest = pod("help", restartPolicy="Never")
    manifest["spec"]["securityContext"]["runAsUser"] = 1_000_650_000
    container = manifest["spec"]["containers"][0]
    del container["command"]
    container |= {"image": image, "args": ["rlinf_operator", "--help"]}
    create(cluster, namespace, manifest)
    until(lambda: phase(cluster, namespace, "help") in ("Succeeded", "Failed"), what="the pod to end", timeout_s=60)
    assert "--watch-namespaces" in cluster.kubectl("-n", namespace, "logs", "help")


@pytest.fixture(scope="module")
def as_it_comes(cluster: Cluster, image: str) -> Release:
    """Installed without a value; the jobs' images are stand-ins under the names that the operator takes."""
    for name in ("base", "actor-fsdp"):
        worker_image.load(cluster, name=f"docker.io/library/{images.catalogue()[name].name}")
    return chart.install(cluster, "rlinf-system")


def mounts(claim: str, namespace: str) -> list[dict[str, Any]]:
    """A policy that puts torch, which the stand-in for the image lacks, into worker pods of the namespace: neither the
    chart nor the example says anything of it."""
    source = f'persistentVolumeClaim: Object.spec.volumes.persistentVolumeClaim{{claimName: "{claim}", readOnly: true}}'
    mount = f'name: "{claim}", mountPath: "{worker_image.MOUNT}", readOnly: true'
    added = {
        "volumes": f'Object.spec.volumes{{name: "{claim}", {source}}}',
        "containers/0/volumeMounts": f"Object.spec.containers.volumeMounts{{{mount}}}",
        "containers/0/env": f'Object.spec.containers.env{{name: "PYTHONPATH", value: "{worker_image.MOUNT}"}}',
    }
    patches = ", ".join(f'JSONPatch{{op: "add", path: "/spec/{at}/-", value: {it}}}' for at, it in added.items())
    rule = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
    own = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}}}
    own["objectSelector"] = {"matchLabels": {names.LABEL_COMPONENT: names.COMPONENT_WORKER}}
    of = {"apiVersion": "admissionregistration.k8s.io/v1", "metadata": {"name": namespace}}
    spec = {
        "matchConstraints": {"resourceRules": [rule]}, "reinvocationPolicy": "Never",
        "mutations": [{"patchType": "JSONPatch", "jsonPatch": {"expression": f"[{patches}]"}}],
    }  # fmt: skip
    binding = {"policyName": namespace, "matchResources": own}
    return [
        of | {"kind": "MutatingAdmissionPolicy", "spec": spec},
        of | {"kind": "MutatingAdmissionPolicyBinding", "spec": binding},
    ]


def is_mounted(cluster: Cluster, claim: str, namespace: str) -> bool:
    """The API server reads policies from a copy of its own."""
    probe = pod("probe")
    probe["metadata"]["labels"] = {names.LABEL_COMPONENT: names.COMPONENT_WORKER}
    probe["spec"] |= {"volumes": [{"name": "a", "emptyDir": {}}]}
    probe["spec"]["containers"][0] |= {"volumeMounts": [{"name": "a", "mountPath": "/a"}], "env": [{"name": "A"}]}
    made = cluster.api.request("POST", f"/api/v1/namespaces/{namespace}/pods?dryRun=All", body=probe)
    return any(volume["name"] == claim for volume in made["spec"]["volumes"])


@pytest.mark.timeout(900)
@pytest.mark.usefixtures("as_it_comes")
def test_the_example_as_it_is_completes_on_a_chart_without_a_value(cluster: Cluster, namespace: str, claim: str):
    listed = mounts(claim, namespace)
    cluster.kubectl("apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": listed}))
    try:
        until(lambda: is_mounted(cluster, claim, namespace), what="the policy to be heeded", timeout_s=60)
        cluster.kubectl("-n", namespace, "apply", "-f", str(REPOSITORY / "examples/cartpole/rljob.yaml"))
        words = ("wait", "--for=condition=Complete", "rljob/cartpole", "--timeout=600s")
        cluster.kubectl("-n", namespace, *words, timeout_s=610)
    except CommandFailed as error:
        told = cluster.kubectl("-n", namespace, "describe", "rljob,pods")
        raise AssertionError(f"{error}\n{told[-4000:]}") from error
    finally:
        for kind in ("mutatingadmissionpolicybindings", "mutatingadmissionpolicies"):
            cluster.api.delete(f"/apis/admissionregistration.k8s.io/v1/{kind}/{namespace}")


@pytest.fixture(scope="module")
def release(as_it_comes: Release) -> Release:
    quick = replace(as_it_comes, values={"operator": {"settings": {"progress_interval_s": 1}}})
    quick.upgrade()
    until(lambda: leads(quick), what="an operator to lead", timeout_s=60)
    return quick


def conditions(obj: dict[str, Any]) -> dict[str, str]:
    return {c["type"]: c["status"] for c in obj["status"]["conditions"]}


def test_both_deployments_and_the_crds_are_there_after_an_install(release: Release):
    for component, replicas in (("operator", 2), ("scheduler", 1)):
        found = release.get(f"deployment/rlinf-operator-{component}")
        assert conditions(found)["Available"] == "True"
        assert found["status"]["readyReplicas"] == replicas
    for crd in ("rljobs.rlinf.io", "rlplans.rlinf.io", "rlprofiles.rlinf.io", "rlruntimes.rlinf.io"):
        assert conditions(release.get(f"crd/{crd}"))["Established"] == "True"
    assert release.kubectl("get", "rlruntimes", "-o", "name").split() == [
        "rlruntime.rlinf.io/cpu", "rlruntime.rlinf.io/gpu",
    ]  # fmt: skip


def test_the_replicas_are_on_two_nodes_and_one_of_them_leads(release: Release):
    assert len({pod_["spec"]["nodeName"] for pod_ in release.pods("operator")}) == 2
    assert leads(release)


def leads(release: Release) -> bool:
    """Whether a pod that is there has the Lease."""
    return release.leader() in {pod_["metadata"]["name"] for pod_ in release.pods("operator")}


def test_the_operator_has_made_its_ca_and_the_schedulers_certificate(release: Release):
    for secret in (access.CA_SECRET, access.SCHEDULER_SECRET):
        assert release.get(f"secret/{secret}")["data"]


def test_no_pod_needed_a_second_start(release: Release):
    for pod_ in release.pods("operator") + release.pods("scheduler"):
        assert [status["restartCount"] for status in pod_["status"]["containerStatuses"]] == [0]


def test_helm_test_reaches_both_through_their_services(release: Release):
    assert "Succeeded" in release.helm("test", "--logs")


def test_the_notes_say_what_to_do_next(release: Release):
    notes = release.helm("get notes")
    assert "kubectl get rljobs --all-namespaces" in notes
    assert "must be allowed to create pods" in notes


@pytest.mark.parametrize(
    ("component", "verb", "what", "allowed"),
    [
        ("operator", "get", f"secrets/{access.CA_SECRET}", True),
        ("operator", "get", f"secrets/{access.SCHEDULER_SECRET}", False),
        ("operator", "list", "secrets", False),
        ("operator", "watch", "secrets", False),
        ("operator", "create", "secrets", True),
        ("operator", "create", "pods", True),
        ("operator", "create", "pods --subresource=exec", False),
        ("operator", "update", f"leases.coordination.k8s.io/{access.LEASE}", True),
        ("operator", "update", "leases.coordination.k8s.io/another", False),
        ("operator", "update", "rljobs.rlinf.io", False),
        ("scheduler", "create", "rlplans.rlinf.io", True),
        ("scheduler", "create", "pods", False),
        ("scheduler", "get", "secrets", False),
    ],
)
def test_a_service_account_may_do_what_its_table_says(
    release: Release, component: str, verb: str, what: str, allowed: bool
):
    account = f"system:serviceaccount:{release.namespace}:rlinf-operator-{component}"
    answer = release.kubectl("auth", "can-i", verb, *what.split(), "--as", account, check=False).strip()
    assert answer == ("yes" if allowed else "no")


# ---- network policies


def reaches(cluster: Cluster, namespace: str, name: str, host: str, port: int) -> bool:
    """Whether a TCP connection opens from a pod."""
    said = cluster.kubectl(
        "-n", namespace, "exec", name, "--", "sh", "-c", f"nc -w 3 {host} {port} -e true && echo open", check=False
    )
    return "open" in said


SCRAPER = {"app.kubernetes.io/name": "prometheus"}


def test_only_drivers_reach_the_scheduler_and_only_a_prometheus_its_metrics(release: Release, namespace: str):
    cluster = release.cluster
    driver, prometheus = pod("driver"), pod("prometheus")
    driver["metadata"]["labels"][names.LABEL_COMPONENT] = names.COMPONENT_DRIVER
    prometheus["metadata"]["labels"] |= SCRAPER
    create(cluster, namespace, driver, prometheus, pod("stranger"))
    wait_ready(cluster, namespace, "driver", "prometheus", "stranger")
    scheduler = release.pods("scheduler")[0]["status"]["podIP"]
    operator = release.pods("operator")[0]["status"]["podIP"]
    service = f"rlinf-operator-scheduler.{release.namespace}.svc"
    until(lambda: reaches(cluster, namespace, "driver", service, 7080), what="a driver to be let in", timeout_s=30)
    for ip in (scheduler, operator):
        until(partial(reaches, cluster, namespace, "prometheus", ip, 8080), what="a scraper to be let in", timeout_s=30)
        assert not reaches(cluster, namespace, "stranger", ip, 8080)
    for name in ("stranger", "prometheus"):
        assert not reaches(cluster, namespace, name, scheduler, 7080)
        assert not reaches(cluster, namespace, name, service, 7080)


def test_the_operator_reaches_drivers_on_their_port_and_nobody_else(release: Release, namespace: str):
    cluster = release.cluster
    serve = "httpd -p 7070 -h /tmp; httpd -p 7071 -h /tmp; sleep 600"
    driver = pod("driver", serve)
    driver["metadata"]["labels"][names.LABEL_COMPONENT] = names.COMPONENT_DRIVER
    create(cluster, namespace, driver, pod("stranger", serve))
    wait_ready(cluster, namespace, "driver", "stranger")
    ips = {
        name: cluster.api.get(f"/api/v1/namespaces/{namespace}/pods/{name}")["status"]["podIP"]
        for name in ("driver", "stranger")
    }
    operator = release.pods("operator")[0]["metadata"]["name"]

    def opens(ip: str, port: int) -> bool:
        program = f"import socket; socket.create_connection(({ip!r}, {port}), timeout=3); print('open')"
        return "open" in release.kubectl("exec", operator, "--", "python", "-c", program, check=False)

    until(lambda: opens(ips["driver"], 7070), what="the operator to reach a driver", timeout_s=30)
    assert not opens(ips["driver"], 7071)
    assert not opens(ips["stranger"], 7070)


# ---- who may run jobs


@pytest.fixture
def users(cluster: Cluster, namespace: str) -> str:
    """In the namespace: alice may do everything with RLJobs, and bob may edit everything, pods among it."""
    rights = [
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "Role",
            "metadata": {"name": "jobs-only"},
            "rules": [{"apiGroups": [names.GROUP], "resources": ["rljobs"], "verbs": ["*"]}],
        },
        *(
            {
                "apiVersion": "rbac.authorization.k8s.io/v1",
                "kind": "RoleBinding",
                "metadata": {"name": user},
                "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": role},
                "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": user}],
            }
            for user, kind, role in (("alice", "Role", "jobs-only"), ("bob", "ClusterRole", "edit"))
        ),
    ]
    create(cluster, namespace, *rights)
    for user, what in (("alice", "rljobs.rlinf.io"), ("bob", "rljobs.rlinf.io"), ("bob", "pods")):
        until(partial(may, cluster, namespace, user, what), what=f"{user}'s right to create {what}", timeout_s=30)
    return namespace


def may(cluster: Cluster, namespace: str, user: str, what: str) -> bool:
    words = ("auth", "can-i", "create", what, "--as", user)
    return cluster.kubectl("-n", namespace, *words, check=False).strip() == "yes"


def apply_as(cluster: Cluster, namespace: str, user: str, job: dict[str, Any]) -> str:
    return cluster.kubectl("-n", namespace, "apply", "-f", "-", "--as", user, stdin=json.dumps(job))


def patch_as(cluster: Cluster, namespace: str, user: str, patch: dict[str, Any]) -> str:
    words = ("-n", namespace, "patch", "rljob", "job", "--type=merge", "-p", json.dumps(patch), "--as", user)
    return cluster.kubectl(*words)


@pytest.mark.usefixtures("release")
def test_who_may_not_create_pods_may_not_create_jobs(cluster: Cluster, users: str):
    with pytest.raises(CommandFailed, match=f"alice may not create pods in namespace {users}"):
        apply_as(cluster, users, "alice", JOB)
    assert "created" in apply_as(cluster, users, "bob", JOB)


@pytest.mark.usefixtures("release")
def test_who_may_not_create_pods_may_suspend_a_job_but_not_change_what_it_runs(cluster: Cluster, users: str):
    apply_as(cluster, users, "bob", JOB)
    assert "patched" in patch_as(cluster, users, "alice", {"metadata": {"labels": {"team": "a"}}})
    assert "patched" in patch_as(cluster, users, "alice", {"spec": {"suspend": False}})
    assert "patched" in patch_as(cluster, users, "alice", {"spec": {"suspend": True}})
    template = {"spec": {"containers": [{"name": "agent", "image": "evil:1"}]}}
    pools = [{**JOB["spec"]["pools"][0], "template": template}]
    with pytest.raises(CommandFailed, match="alice may not create pods"):
        patch_as(cluster, users, "alice", {"spec": {"pools": pools}})


@pytest.mark.usefixtures("release")
@pytest.mark.parametrize("source", [{}, {"source": "Scheduler"}])
def test_who_is_not_the_scheduler_may_write_plans_of_a_user_alone(cluster: Cluster, users: str, source: dict[str, str]):
    spec = {k: v for k, v in job.dump(plan_of(ppo_job())).items() if k != "source"}
    plan = {"apiVersion": names.API_VERSION, "kind": "RLPlan", "metadata": {"name": "job-p1"}, "spec": spec | source}
    with pytest.raises(CommandFailed, match=r"only the scheduler writes an RLPlan .* got bob; write spec.source"):
        apply_as(cluster, users, "bob", plan)
    scheduler = "system:serviceaccount:rlinf-system:rlinf-operator-scheduler"
    assert "created" in apply_as(cluster, users, scheduler, plan)
    own = plan | {"metadata": {"name": "job-p2"}, "spec": spec | {"source": "User"}}
    assert "created" in apply_as(cluster, users, "bob", own)


@pytest.mark.usefixtures("release")
@pytest.mark.parametrize("rule", ["may-create-pods", "only-the-scheduler-plans", "operator-keeps-to-jobs"])
def test_the_api_server_has_nothing_to_say_against_the_policy(cluster: Cluster, rule: str):
    path = f"{POLICIES}/rlinf-operator-rlinf-system-{rule}"

    def checked() -> dict[str, Any] | None:
        found = cluster.api.get(path)
        status = found.get("status", {})
        return status if status.get("observedGeneration") == found["metadata"]["generation"] else None

    until(lambda: checked() is not None, what="the policy to be type-checked", timeout_s=30)
    assert not (checked() or {}).get("typeChecking", {}).get("expressionWarnings")


# ---- a job, under all of that


def status(cluster: Cluster, namespace: str) -> dict[str, Any]:
    found: dict[str, Any] = cluster.api.get(f"/apis/{names.API_VERSION}/namespaces/{namespace}/rljobs/cartpole")
    return found.get("status") or {}


@pytest.mark.usefixtures("release", "users")
def test_the_example_of_a_user_completes_under_all_of_that(cluster: Cluster, namespace: str, claim: str):
    """Pod Security restricted everywhere, policies enforced, and bob is no administrator."""
    apply_as(cluster, namespace, "bob", cartpole(claim=claim))
    words = ("wait", "--for=condition=Complete", "rljob/cartpole", f"--timeout={BEGUN_S:g}s", "--as", "bob")
    try:
        cluster.kubectl("-n", namespace, *words, timeout_s=BEGUN_S + 10)
    except CommandFailed as error:
        told = cluster.kubectl("-n", namespace, "describe", "rljob,pods")
        raise AssertionError(f"{error}\n{told[-4000:]}") from error
    assert status(cluster, namespace)["step"] == 6
    # No handle that only the operator could take off again, and no trace of Kopf.
    meta = cluster.api.get(f"/apis/{names.API_VERSION}/namespaces/{namespace}/rljobs/cartpole")["metadata"]
    assert "finalizers" not in meta
    assert not [name for name in meta.get("annotations", {}) if "kopf" in name]


@pytest.mark.usefixtures("release", "users")
def test_a_job_is_profiled_and_gets_a_further_plan_by_itself(cluster: Cluster, namespace: str, claim: str):
    """A probe of sizes, in place: its gang has no checkpoint to begin elsewhere on, and stays on its slot."""
    wanted = workloads.job(workloads.entries()["drawn-14"], steps=60, time_scale=0.2)
    wanted["metadata"]["name"] = "cartpole"
    slots = wanted["spec"]["pools"][0]["slots"]
    slots |= {"cpu": "100m", "memory": "300Mi"}
    for role in wanted["spec"]["roles"]:  # a slot of this machine holds no 60 GiB, and 1 in 1,000 of it says the same
        role["config"]["memory"] = {name: mib / 1000 for name, mib in role["config"]["memory"].items()}
    wanted["spec"]["pools"][0]["template"] = worker_image.template(claim)
    apply_as(cluster, namespace, "bob", wanted)
    where = f"/apis/{names.API_VERSION}/namespaces/{namespace}"

    def plans() -> dict[str, Any]:
        return {p["metadata"]["name"]: p for p in cluster.api.get(f"{where}/rlplans")["items"]}

    try:
        cluster.kubectl(
            "-n", namespace, "wait", "--for=condition=Complete", "rljob/cartpole", "--timeout=180s", timeout_s=190
        )
    except CommandFailed as error:
        told = cluster.kubectl("-n", namespace, "describe", "rljob,rlplan")
        raise AssertionError(f"{error}\n{told[-6000:]}") from error
    found, current = plans(), status(cluster, namespace)["plan"]["current"]
    reasons = {n: (p["spec"]["reason"]["code"], p["spec"]["reason"]["message"]) for n, p in sorted(found.items())}
    assert [code for code, _ in reasons.values()][:2] == ["Initial", "Probe"], reasons
    conditions = [c for p in found.values() for c in (p.get("status") or {}).get("conditions", ())]
    assert not [c["message"] for c in conditions if (c["type"], c["status"]) == ("Failed", "True")]
    said = {c["type"]: (c["status"], c["reason"]) for c in status(cluster, namespace)["conditions"]}
    assert said["Profiled"] == ("True", "Profiled")
    # Written behind the job's own status, with the last word of its driver.
    until(lambda: "measured" in (plans()[current].get("status") or {}), what="what its steps took", timeout_s=30)
    # What was measured outlives scheduler and job, and says who fed whom to whoever may read it.
    key = key_of(job.RLJobSpec.model_validate(cluster.api.get(f"{where}/rljobs/cartpole")["spec"]))
    kept = cluster.api.get(f"{where}/rlprofiles/{names.profile_name(key)}")["spec"]
    RLProfileSpec.model_validate(kept)  # the API server pruned nothing of it
    assert kept["job"]["name"] == "cartpole"
    words = [sys.executable, "-m", "rljob", "graph", "cartpole", "-n", namespace]
    drawn = subprocess.run(
        words, env=os.environ | {"KUBECONFIG": str(cluster.kubeconfig)}, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert drawn.returncode == 0, drawn.stderr
    assert "rollout --" in drawn.stdout
    events = cluster.api.get(f"/api/v1/namespaces/{namespace}/events")["items"]
    told_of = {e["reason"]: e.get("message", "") for e in events}
    assert "cartpole-p2 is in force instead of cartpole-p1" in told_of["PlanProbe"]


@pytest.mark.usefixtures("users")
def test_a_job_that_nobody_touches_grows_and_shrinks_though_each_part_dies_once(
    release: Release, namespace: str, claim: str
):
    """The scheduler when it has measured, all operators while the plan's pod starts, that pod as it works."""
    cluster = release.cluster
    where = f"/apis/{names.API_VERSION}/namespaces/{namespace}"
    job = f"{where}/rljobs/{growing.NAME}"

    def kill(*what: str, of: str = release.namespace) -> None:
        cluster.kubectl("-n", of, "delete", "pod", *what, "--grace-period=0", "--force", "--wait=false")

    def workers() -> dict[str, str]:
        """Those that nobody has told to end, name to uid."""
        found = [pod["metadata"] for pod in cluster.api.get(f"/api/v1/namespaces/{namespace}/pods")["items"]]
        component = names.LABEL_COMPONENT
        return {
            m["name"]: m["uid"] for m in found
            if m["labels"].get(component) == names.COMPONENT_WORKER and "deletionTimestamp" not in m
        }  # fmt: skip

    def plans() -> dict[str, dict[str, Any]]:
        return {p["metadata"]["name"]: p for p in cluster.api.get(f"{where}/rlplans")["items"]}

    def says(condition: str) -> bool:
        now = cluster.api.get(job)
        return "status" in now and conditions(now).get(condition) == "True"

    def in_force() -> dict[str, Any] | None:
        current = cluster.api.get(job)["status"]["plan"]["current"]
        return plans().get(current) if says("PlanApplied") else None

    def has(generators: int) -> bool:
        plan = in_force()
        return plan is not None and growing.generators(plan) == generators

    def measured(plan: str) -> dict[str, Any]:
        return dict((plans()[plan].get("status") or {}).get("measured", {"steps": 0}))

    def wait(holds: Callable[[], Any], what: str, timeout_s: float = 120) -> Any:
        """What it saw."""
        try:
            return until(holds, what=what, timeout_s=timeout_s, every_s=0.2)
        except Exception as error:
            told = [
                cluster.api.get(job).get("status"),
                {n: (p["spec"]["reason"], p.get("status")) for n, p in plans().items()},
            ]
            raise AssertionError(f"{error}\n{yaml.safe_dump(told)}") from error

    began = bars.look()
    apply_as(cluster, namespace, "bob", growing.manifest(claim))
    wait(lambda: len(workers()) == 2, "its first pods")
    before = workers()
    wait(lambda: says("Profiled"), "its measures")
    assert growing.generators(plans()[f"{growing.NAME}-p1"]) == 2, "it begins with the fewest pods"
    kill("-l", "app.kubernetes.io/component=scheduler")
    wait(lambda: len(workers()) == 3, "a third pod")
    kill("-l", "app.kubernetes.io/component=operator")
    wait(lambda: has(4), "four generators")
    (new,) = workers().keys() - before.keys()

    def took_ten_steps() -> dict[str, Any] | None:
        plan = in_force()
        return plan if plan is not None and measured(plan["metadata"]["name"])["steps"] >= 10 else None

    grown = wait(took_ten_steps, "what ten steps of a plan took")
    assert growing.generators(grown) == 4
    assert grown["spec"]["reason"]["code"] == "Profiled", grown["spec"]["reason"]
    assert {name: uid for name, uid in workers().items() if name in before} == before, "who stays is not touched"
    promised_s = grown["spec"]["predicted"]["periodSeconds"]
    assert growing.ideal_s(2) <= promised_s < bars.by_load(1.4 * growing.ideal_s(2), since=began)
    name = grown["metadata"]["name"]
    print(f"promised {promised_s:.3f} s, took {measured(name)}")
    assert measured(name)["periodSeconds"] < bars.by_load(0.8 * growing.ideal_s(1), since=began)

    kill(new, of=namespace)
    wait(lambda: len(workers()) == 3 and new not in workers(), "its successor")
    # 80 s of steps until the drift, one report of 30 s in which old and new steps are mixed, and one of new ones alone.
    wait(lambda: has(2), "two generators again", 300)
    wait(lambda: workers() == before, "the end of the third pod")
    assert cluster.api.get(job)["status"]["step"] >= growing.DRIFT_STEP
    every = [(n, c) for n, p in plans().items() for c in (p.get("status") or {}).get("conditions", ())]
    assert not [(n, c["message"]) for n, c in every if (c["type"], c["status"]) == ("Failed", "True")]

    def reasons() -> set[str]:
        return {e["reason"] for e in cluster.api.get(f"/api/v1/namespaces/{namespace}/events")["items"]}

    wait(lambda: {"PlanProfiled", "PlanDrift"} <= reasons(), "events of both plans: a pass tells them last")


@pytest.mark.usefixtures("users")
def test_a_job_goes_on_in_fewer_pods_when_a_node_goes_and_in_more_once_there_is_one(
    release: Release, namespace: str, paced: Paced
):
    """The pod that goes has a rank of its gang, so that the open step can never end."""
    cluster = release.cluster
    where = f"/apis/{names.API_VERSION}/namespaces/{namespace}"

    def look() -> dict[str, Any]:
        return dict(cluster.api.get(f"{where}/rljobs/{growing.NAME}"))

    def plans() -> dict[str, dict[str, Any]]:
        return {p["metadata"]["name"]: p for p in cluster.api.get(f"{where}/rlplans")["items"]}

    def pods_of(component: str) -> list[dict[str, Any]]:
        found = cluster.api.get(f"/api/v1/namespaces/{namespace}/pods")["items"]
        return [pod for pod in found if pod["metadata"]["labels"].get(names.LABEL_COMPONENT) == component]

    def in_force() -> dict[str, Any]:
        return dict(plans()[look()["status"]["plan"]["current"]]["spec"])

    def has(pods: int) -> bool:
        (pool,) = in_force()["pools"]
        return bool(pool["pods"] == pods) and conditions(look()).get("PlanApplied") == "True"

    def step() -> int:
        return int((look().get("status") or {}).get("step") or 0)

    def wait(holds: Callable[[], bool], what: str, timeout_s: float = BEGUN_S) -> None:
        try:
            until(holds, what=what, timeout_s=timeout_s, every_s=0.5)
        except Exception as error:
            told = [look().get("status"), {n: (p["spec"]["reason"], p.get("status")) for n, p in plans().items()}]
            raise AssertionError(f"{error}\n{yaml.safe_dump(told)}") from error

    apply_as(cluster, namespace, "bob", growing.beside_a_gang(paced))
    wait(lambda: step() >= 1, "a first step")
    wait(lambda: has(2), "a second pod")
    before = step()
    wait(lambda: step() > before + 10, "steps in two pods")
    ordinal = next(w["slots"] for w in in_force()["workers"] if w["role"] == "train").split(",")[0].split("/")[1]
    worker, (driver,) = names.COMPONENT_WORKER, pods_of(names.COMPONENT_DRIVER)
    (lost,) = [p for p in pods_of(worker) if p["metadata"]["labels"][names.LABEL_ORDINAL] == ordinal]
    node = lost["spec"]["nodeName"]
    cluster.kubectl("cordon", node)
    try:
        before, name = step(), lost["metadata"]["name"]
        cluster.kubectl("-n", namespace, "delete", "pod", name, "--grace-period=0", "--force", "--wait=false")
        wait(lambda: has(1), "a plan for one pod")
        assert in_force()["reason"]["code"] == "CapacityChanged"
        wait(lambda: step() > before, "further steps")
        wait(lambda: len(pods_of(worker)) == 1, "the end of the pod that finds no node")
    finally:
        cluster.kubectl("uncordon", node)
    log = cluster.kubectl("-n", namespace, "logs", driver["metadata"]["name"])
    told = [json.loads(line) for line in log.splitlines() if '"event": ' in line]
    given_up = [line["message"] for line in told if line["event"] == "steps-given-up"]
    print(*given_up, *(line["message"] for line in told if line["event"] == "branch"), sep="\n")
    said = f"pod main-{ordinal} has been absent for more than {growing.ABSENT_S:g} s"
    assert any(said in message for message in given_up), given_up
    wait(lambda: has(2), "two pods again", 2 * BEGUN_S)
    before = step()
    wait(lambda: step() > before + 5, "steps in two pods")


@pytest.mark.usefixtures("users")
def test_strangers_reach_neither_driver_nor_workers_of_a_job(release: Release, namespace: str, claim: str):
    cluster = release.cluster
    apply_as(cluster, namespace, "bob", cartpole(claim=claim, steps=100_000))
    until(lambda: (status(cluster, namespace).get("step") or 0) >= 1, what="a first step", timeout_s=BEGUN_S)
    uid = cluster.api.get(f"/apis/{names.API_VERSION}/namespaces/{namespace}/rljobs/cartpole")["metadata"]["uid"]
    found = cluster.api.get(f"/api/v1/namespaces/{namespace}/pods")["items"]
    ips = {p["metadata"]["labels"][names.LABEL_COMPONENT]: p["status"]["podIP"] for p in found}
    listening = [
        (ips["driver"], names.PORT_DRIVER_GRPC), (ips["driver"], names.PORT_METRICS),
        (ips["worker"], names.PORT_DATA_BASE), (ips["worker"], names.PORT_METRICS),
    ]  # fmt: skip
    callers = {
        "own": {names.LABEL_JOB_UID: uid}, "another-job": {names.LABEL_JOB_UID: "another-uid"}, "stranger": {},
        "prometheus": SCRAPER,
    }  # fmt: skip
    for name, labels in callers.items():
        caller = pod(name)
        caller["metadata"]["labels"] |= labels
        create(cluster, namespace, caller)
    wait_ready(cluster, namespace, *callers)

    def reached(name: str) -> list[int]:
        return [port for ip, port in listening if reaches(cluster, namespace, name, ip, port)]

    everything = [port for _, port in listening]
    until(lambda: reached("own") == everything, what="a pod of the job to be let in", timeout_s=30)
    assert reached("prometheus") == [names.PORT_METRICS] * 2
    assert reached("another-job") == reached("stranger") == []
    step = status(cluster, namespace)["step"]
    until(
        lambda: status(cluster, namespace)["step"] > step, what="the operator to hear of a further step", timeout_s=60
    )
    cluster.kubectl("-n", namespace, "delete", "rljob", "cartpole", "--wait=false", "--as", "bob")


@pytest.mark.usefixtures("users")
def test_an_upgrade_of_the_operator_and_the_way_back_restart_no_pod_of_a_running_job(
    release: Release, namespace: str, claim: str
):
    cluster = release.cluster

    def pods() -> dict[str, int]:
        """Uid to number of restarts."""
        found = cluster.api.get(f"/api/v1/namespaces/{namespace}/pods")["items"]
        return {
            pod_["metadata"]["uid"]: sum(c["restartCount"] for c in pod_["status"].get("containerStatuses", []))
            for pod_ in found
        }

    def step() -> int:
        return int(status(cluster, namespace).get("step") or 0)

    apply_as(cluster, namespace, "bob", cartpole(claim=claim, steps=100_000))
    until(lambda: step() >= 1, what="a first step", timeout_s=BEGUN_S)

    def changed() -> str:
        return str(release.get("deployment/rlinf-operator-operator")["metadata"]["labels"].get("changed"))

    others = {"commonLabels": {"changed": "label"}, "jobImages": {"driver": "another:1", "worker": "another:1"}}
    before = pods()

    def another_leads(old: str) -> None:
        until(lambda: leads(release) and release.leader() != old, what="another pod to lead", timeout_s=60)
        reached = step()
        until(lambda: step() > reached, what="the new leader to hear of a further step", timeout_s=60)
        assert pods() == before

    leader = release.leader()
    release.upgrade(**others)
    another_leads(leader)
    assert changed() == "label"
    leader = release.leader()
    release.roll_back()
    another_leads(leader)
    assert changed() == "None"
    cluster.kubectl("-n", namespace, "delete", "rljob", "cartpole", "--wait=false", "--as", "bob")
    until(lambda: not pods(), what="the job's pods to be gone", timeout_s=60)


# ---- the release's life; last, as it changes the release


def ready_operators(release: Release) -> int:
    return [conditions(pod_).get("Ready") for pod_ in release.pods("operator")].count("True")


def test_a_drain_never_takes_both_replicas(release: Release):
    def may_take_one() -> bool:
        status = release.get("poddisruptionbudget/rlinf-operator-operator").get("status") or {}
        return (status.get("expectedPods"), status.get("disruptionsAllowed")) == (2, 1)

    until(may_take_one, what="the budget to have counted both replicas", timeout_s=60)
    codes = []
    for pod_ in release.pods("operator"):
        name = pod_["metadata"]["name"]
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name}}
        path = f"/api/v1/namespaces/{release.namespace}/pods/{name}/eviction"
        try:
            release.cluster.api.request("POST", path, body=body)
            codes.append(201)
        except ApiError as error:
            codes.append(error.status)
    assert codes == [201, 429]
    until(lambda: ready_operators(release) == 2, what="two replicas again", timeout_s=60)


def test_labels_may_change_in_an_upgrade_and_the_ca_stays(release: Release):
    before = release.get(f"secret/{access.CA_SECRET}")["data"]
    release.upgrade(commonLabels={"team": "ml"}, operator={"podLabels": {"cost": "42"}})
    assert {pod_["metadata"]["labels"]["cost"] for pod_ in release.pods("operator")} == {"42"}
    assert release.get("deployment/rlinf-operator-scheduler")["metadata"]["labels"]["team"] == "ml"
    assert release.get(f"secret/{access.CA_SECRET}")["data"] == before
    release.upgrade()


def test_an_uninstall_keeps_crds_and_jobs_and_an_install_takes_them_over(release: Release, namespace: str):
    create(release.cluster, namespace, JOB)
    uid = job_uid(release.cluster, namespace)
    ca = release.get(f"secret/{access.CA_SECRET}")["data"]
    said = release.helm("uninstall", "--cascade", "foreground", "--wait")
    assert "rljobs.rlinf.io" in said, "helm names what it keeps"
    assert release.get("deployments")["items"] == []
    assert job_uid(release.cluster, namespace) == uid
    release.upgrade()
    until(lambda: leads(release), what="an operator to lead", timeout_s=60)
    assert job_uid(release.cluster, namespace) == uid
    assert release.get(f"secret/{access.CA_SECRET}")["data"] == ca


def job_uid(cluster: Cluster, namespace: str) -> str:
    path = f"/apis/{names.API_VERSION}/namespaces/{namespace}/rljobs/{JOB['metadata']['name']}"
    return str(cluster.api.get(path)["metadata"]["uid"])


def test_a_release_for_listed_namespaces_runs_beside_without_rights_over_the_cluster(release: Release, namespace: str):
    values = yaml.safe_load((rendering.CASES / "namespaced.yaml").read_text(encoding="utf-8"))
    other = chart.install(release.cluster, f"{namespace}-rl", values={**values, "watchNamespaces": [namespace]})
    account = f"system:serviceaccount:{other.namespace}:rlinf-operator-operator"

    def can(where: str) -> str:
        words = ("auth", "can-i", "create", "pods", "--as", account, "-n", where)
        return release.cluster.kubectl(*words, check=False).strip()

    assert can(namespace) == "yes"
    assert can("default") == "no"
    assert conditions(other.get("deployment/rlinf-operator-operator"))["Available"] == "True"
    other.helm("uninstall", "--wait")
