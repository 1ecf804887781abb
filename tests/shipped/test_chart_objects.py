"""What the chart makes, read from the committed snapshots, without helm. test_chart_rendering.py keeps them current."""

import dataclasses
import functools

import pytest

from rlinf_api import names, runtimes, supported
from rlinf_operator import access, process
from rlinf_operator.manifests import pods as pod_manifests
from rlinf_operator.manifests.metadata import JobMeta
from rlinf_operator.settings import OperatorSettings
from tests.builders import ppo_job
from tools.chart import rendering

CASES = sorted(rendering.cases())
BUILT_FOR = {"kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64"}
CLUSTER_WIDE = {
    "ClusterRole", "ClusterRoleBinding", "RLRuntime", "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding",
}  # fmt: skip


@functools.cache
def snapshot(case):
    return rendering.manifests(rendering.snapshot_file(case).read_text(encoding="utf-8"))


def objects(case, kind=None):
    return [obj for obj in snapshot(case) if kind in (None, obj["kind"])]


def one(case, kind, suffix):
    (found,) = [obj for obj in objects(case, kind) if obj["metadata"]["name"].endswith(suffix)]
    return found


def pods(case):
    """Name and spec of everything that becomes a pod."""
    return [(o["metadata"]["name"], o["spec"]["template"]) for o in objects(case, "Deployment")] + [
        (o["metadata"]["name"], {"metadata": o["metadata"], "spec": o["spec"]}) for o in objects(case, "Pod")
    ]


def operator_environment(case):
    (container,) = one(case, "Deployment", "-operator")["spec"]["template"]["spec"]["containers"]
    return {e["name"]: e.get("value", "a-field") for e in container["env"] if e["name"].startswith(process.PREFIX)}


def granted(role):
    """(group, resource, verb, name) of a Role; a name of "" is any."""
    return {
        (group, resource, verb, name)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
        for name in rule.get("resourceNames", [""])
    }


def wanted(rules, scope, *, gangs="kubernetes"):
    return {
        (rule.group, rule.resource, verb, name)
        for rule in rules
        if rule.scope == scope and rule.gang_scheduler in ("", gangs)
        for verb in rule.verbs
        for name in rule.names or ("",)
    }


TABLES = [("operator", access.OPERATOR), ("scheduler", access.SCHEDULER)]


@pytest.mark.parametrize(("component", "rules"), TABLES)
def test_rights_over_the_whole_cluster_are_those_of_the_table(component, rules):
    assert granted(one("default", "ClusterRole", f"rlinf-system-{component}")) == wanted(rules, "jobs")


@pytest.mark.parametrize("case", ["default", "small"])
def test_rights_over_kinds_without_namespaces_are_those_of_the_table(case):
    named = {r["metadata"]["name"]: granted(r) for r in objects(case, "ClusterRole")}
    (found,) = (rights for name, rights in named.items() if name.endswith("-operator-cluster"))
    assert found == wanted(access.OPERATOR, "cluster")
    assert wanted(access.SCHEDULER, "cluster") == set()
    assert all(verb == "get" for _, _, verb, _ in found)


@pytest.mark.parametrize(
    ("case", "name", "pods", "group"),
    [
        ("default", "kubernetes", "", "scheduling.k8s.io"),
        ("small", "coscheduling", "", "scheduling.x-k8s.io"),
        ("everything", "volcano", "volcano-of-ours", "scheduling.volcano.sh"),
    ],
)
def test_the_operator_has_rights_on_the_podgroups_of_the_scheduler_that_it_is_told(case, name, pods, group):
    _, operator = process.read({}, operator_environment(case))
    assert (operator.gang_scheduler, operator.gang_scheduler_pods) == (name, pods)
    roles = [*objects(case, "ClusterRole"), *objects(case, "Role")]
    rights = {right for role in roles for right in granted(role) if right[1] == "podgroups"}
    assert rights == {r for r in wanted(access.OPERATOR, "jobs", gangs=name) if r[1] == "podgroups"}
    assert {right[0] for right in rights} == {group}


def test_namespaces_by_their_labels_are_said_to_the_operator_and_its_policies():
    labels = {
        "matchLabels": {"rlinf": "yes"},
        "matchExpressions": [
            {"key": "stage", "operator": "NotIn", "values": ["old", "gone"]},
            {"key": "team", "operator": "Exists"},
            {"key": "frozen", "operator": "DoesNotExist"},
        ],
    }
    said = operator_environment("selected")["RLINF_OPERATOR_WATCH_NAMESPACE_SELECTOR"]
    assert said == "rlinf=yes,stage notin (old,gone),team,!frozen"
    operator, scheduler = (one("selected", "NetworkPolicy", f"-{part}")["spec"] for part in ("operator", "scheduler"))
    for rules, side in ((operator["egress"], "to"), (scheduler["ingress"], "from")):
        drivers = [p for rule in rules for p in rule.get(side, ()) if "rlinf.io/component" in str(p)]
        assert [peer["namespaceSelector"] for peer in drivers] == [labels]
    plans = one("selected", "ValidatingAdmissionPolicyBinding", "-only-the-scheduler-plans")["spec"]
    assert plans["matchResources"] == {"namespaceSelector": labels}
    jobs = one("selected", "ValidatingAdmissionPolicyBinding", "-may-create-pods")["spec"]
    assert "matchResources" not in jobs, "its namespace may get the labels later"
    of_jobs = granted(one("selected", "ClusterRole", "rlinf-system-operator"))
    assert of_jobs == wanted(access.OPERATOR, "jobs")
    of_cluster = granted(one("selected", "ClusterRole", "-operator-cluster"))
    assert of_cluster == wanted(access.OPERATOR, "cluster") | wanted(access.OPERATOR, "selected")
    assert wanted(access.SCHEDULER, "selected") == set()


@pytest.mark.parametrize(("component", "rules"), TABLES)
@pytest.mark.parametrize("namespace", ["team-a", "team-b"])
def test_rights_in_listed_namespaces_are_those_of_the_table(component, rules, namespace):
    roles = [
        role
        for role in objects("namespaced", "Role")
        if role["metadata"]["namespace"] == namespace and role["metadata"]["name"].endswith(f"-{component}-jobs")
    ]
    assert [granted(role) for role in roles] == [wanted(rules, "jobs")]


@pytest.mark.parametrize("case", ["default", "namespaced"])
@pytest.mark.parametrize(("component", "rules"), TABLES)
def test_rights_in_the_releases_own_namespace_are_those_of_the_table(case, component, rules):
    roles = [
        role
        for role in objects(case, "Role")
        if role["metadata"]["namespace"] == rendering.NAMESPACE and role["metadata"]["name"].endswith(f"-{component}")
    ]
    found = {right for role in roles for right in granted(role)}
    assert found == wanted(rules, "own")


def test_nobody_may_read_the_secrets_of_jobs():
    for case in CASES:
        for role in [*objects(case, "ClusterRole"), *objects(case, "Role")]:
            for group, resource, verb, name in granted(role):
                if resource in ("secrets", "*") and group in ("", "*"):
                    assert verb in ("create", "patch", "delete") or (verb, name) == ("get", access.CA_SECRET), role


@pytest.mark.parametrize("case", CASES)
def test_every_binding_binds_a_role_that_is_there_to_an_account_of_the_release(case):
    roles = {(o["kind"], o["metadata"].get("namespace"), o["metadata"]["name"]) for o in objects(case)}
    accounts = {template["spec"].get("serviceAccountName") for _, template in pods(case)}
    for binding in [*objects(case, "ClusterRoleBinding"), *objects(case, "RoleBinding")]:
        ref, (subject,) = binding["roleRef"], binding["subjects"]
        assert (ref["kind"], binding["metadata"].get("namespace"), ref["name"]) in roles
        assert subject["namespace"] == rendering.NAMESPACE
        assert subject["name"] in accounts


@pytest.mark.parametrize("case", [case for case in CASES if objects(case, "ValidatingAdmissionPolicy")])
def test_the_policy_of_plans_names_the_account_that_the_scheduler_runs_under(case):
    policy = one(case, "ValidatingAdmissionPolicy", "-only-the-scheduler-plans")
    account = dict(pods(case))[one(case, "Deployment", "-scheduler")["metadata"]["name"]]["spec"]["serviceAccountName"]
    (rule,) = policy["spec"]["validations"]
    assert f"== 'system:serviceaccount:{rendering.NAMESPACE}:{account}'" in rule["expression"]
    binding = one(case, "ValidatingAdmissionPolicyBinding", "-only-the-scheduler-plans")
    assert binding["spec"]["policyName"] == policy["metadata"]["name"]


def test_the_policy_of_the_operators_account_can_be_left_out():
    assert [case for case in CASES if len(objects(case, "ValidatingAdmissionPolicy")) == 2] == ["small"]


@pytest.mark.parametrize("case", [case for case in CASES if len(objects(case, "ValidatingAdmissionPolicy")) == 3])
def test_the_policy_of_the_operator_holds_its_account_in_all_that_its_role_lets_it_write(case):
    """What is of the operator's own kinds, and events, which belong to nobody, are RBAC's alone."""
    policy = one(case, "ValidatingAdmissionPolicy", "-operator-keeps-to-jobs")
    account = dict(pods(case))[one(case, "Deployment", "-operator")["metadata"]["name"]]["spec"]["serviceAccountName"]
    is_operator, is_none_of_two = (condition["expression"] for condition in policy["spec"]["matchConditions"])
    assert is_operator == f"request.userInfo.username == 'system:serviceaccount:{rendering.NAMESPACE}:{account}'"
    assert f"in ['{access.CA_SECRET}', '{access.SCHEDULER_SECRET}'])" in is_none_of_two
    rules = policy["spec"]["matchConstraints"]["resourceRules"]
    held = {(group, resource) for rule in rules for group in rule["apiGroups"] for resource in rule["resources"]}
    written = {
        (rule.group, rule.resource) for rule in access.OPERATOR
        if rule.scope == "jobs" and rule.group != names.GROUP and rule.resource != "events"
        and {"create", "patch", "update", "delete"} & {*rule.verbs}
    }  # fmt: skip
    assert written <= held
    actions = one(case, "ValidatingAdmissionPolicyBinding", "-may-create-pods")["spec"]["validationActions"]
    binding = one(case, "ValidatingAdmissionPolicyBinding", "-operator-keeps-to-jobs")
    assert binding["spec"] == {"policyName": policy["metadata"]["name"], "validationActions": actions}


def test_listed_namespaces_need_no_rights_over_the_cluster():
    for obj in objects("namespaced"):
        assert obj["kind"] not in CLUSTER_WIDE
        assert obj["metadata"]["namespace"] in ("team-a", "team-b", rendering.NAMESPACE)


def test_the_runtimes_that_the_chart_makes_are_right_and_each_fits_a_job():
    made = {obj["metadata"]["name"]: obj for obj in objects("default", "RLRuntime")}
    assert sorted(made) == ["cpu", "gpu"]
    slots = {}
    for name, runtime in made.items():
        spec, problems = runtimes.examine(runtime)
        assert problems == []
        assert spec is not None
        job = ppo_job().build()
        job["spec"] |= {"runtime": name, "pools": [{"name": "one", "pods": 16}]}
        found = supported.examine(runtimes.with_runtime(job, spec))
        assert found.wrong == found.later == ()
        assert found.spec is not None
        slots[name] = found.spec.pools[0].slots
        pod = pod_manifests.worker(
            JobMeta(namespace="team", name="math", uid="u"), found.spec, pool="one", ordinal=0, attempt=1, life=1,
            settings=OperatorSettings(),
        )  # fmt: skip
        assert pod.conflicts == ()
        assert {"cpu", "memory"} <= pod.manifest["spec"]["containers"][0]["resources"]["requests"].keys()
    assert (slots["cpu"].cpu, slots["gpu"].resource, slots["gpu"].per_pod) == ("1", "nvidia.com/gpu", 1)


def test_runtimes_come_after_their_crd_and_only_with_it():
    for runtime in objects("default", "RLRuntime"):
        assert "post-install" in runtime["metadata"]["annotations"]["helm.sh/hook"]
    assert objects("namespaced", "RLRuntime") == []


@pytest.mark.parametrize("case", CASES)
def test_pods_pass_pod_security_restricted_with_a_root_that_nobody_can_write(case):
    for name, template in pods(case):
        spec = template["spec"]
        assert spec["securityContext"]["runAsNonRoot"], name
        ids = {field: spec["securityContext"].get(field) for field in ("runAsUser", "runAsGroup", "fsGroup")}
        assert set(ids.values()) == {None if case == "small" else names.POD_UID}, name
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
        assert all({"emptyDir", "secret"} & volume.keys() for volume in spec.get("volumes", []))
        for container in spec["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert "cpu" not in container["resources"]["limits"], "a throttled leader misses its Lease"
            assert container["resources"]["requests"].keys() == {"cpu", "memory"}


@pytest.mark.parametrize("case", CASES)
def test_both_deployments_have_all_three_probes_on_a_port_that_they_name(case):
    for deployment in objects(case, "Deployment"):
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        ports = {port["name"] for port in container["ports"]}
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert container[probe]["httpGet"]["port"] in ports


@pytest.mark.parametrize("case", CASES)
def test_the_operator_understands_the_environment_that_it_is_given(case):
    found, _ = process.read({}, operator_environment(case))
    (container,) = one(case, "Deployment", "-operator")["spec"]["template"]["spec"]["containers"]
    assert [port["containerPort"] for port in container["ports"]] == [found.http_port]
    grace_s = one(case, "Deployment", "-operator")["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace_s >= found.stop_timeout_s + 10


def test_settings_arrive_as_they_were_written():
    found, operator = process.read({}, operator_environment("everything"))
    assert found.lease_s == 20
    assert found.log_level == "DEBUG"
    assert operator.certificate_life_s == 2592000
    assert operator.drain_deadline_s == 300
    assert operator.image_pull_policy == "Always"
    assert operator.shm_share == 0.5
    found, operator = process.read({}, operator_environment("locked-down"))
    assert process.namespaces(found) == ("research",)
    assert operator.worker_image == "registry.example.com/rl/worker:1"


def test_the_template_of_drivers_arrives_as_it_was_written():
    _, operator = process.read({}, operator_environment("everything"))
    spec = operator.driver_template.parsed()["spec"]
    assert (spec["nodeSelector"], spec["priorityClassName"]) == ({"pool": "cpu", **BUILT_FOR}, "training")
    assert spec["containers"][0]["resources"]["limits"] == {"memory": "4Gi"}
    assert operator.driver_template.parsed()["metadata"] == {"labels": {"cost-centre": "42"}}


def test_without_values_every_setting_of_jobs_keeps_its_default():
    _, operator = process.read({}, operator_environment("default"))
    assert operator == OperatorSettings(
        scheduler_address="rlinf-operator-scheduler.rlinf-system.svc:7080",
        network_policy_callers=operator.network_policy_callers,
        network_policy_scrapers=operator.network_policy_scrapers,
        driver_template=operator.driver_template,
    )
    assert operator.driver_template.parsed() == {"spec": {"nodeSelector": BUILT_FOR}}


@pytest.mark.parametrize("case", CASES)
def test_no_pod_of_ours_goes_to_a_node_that_its_image_is_not_built_for(case):
    """Clouds mix architectures, and Windows; worker pods go where the user's template says."""
    _, operator = process.read({}, operator_environment(case))
    specs = [*(pod["spec"] for _, pod in pods(case)), operator.driver_template.parsed()["spec"]]
    assert len(specs) >= 3
    for spec in specs:
        assert BUILT_FOR.items() <= spec["nodeSelector"].items()


def test_without_values_every_setting_of_the_process_keeps_its_default():
    """A default that the chart states as well could differ from the code's: people would meet another than tests do."""
    found, _ = process.read({}, operator_environment("default"))
    assert found == dataclasses.replace(process.ProcessSettings(), namespace="a-field", identity="a-field")


@pytest.mark.parametrize("case", ["default", "locked-down", "namespaced"])
def test_jobs_let_in_the_pods_of_this_releases_operator(case):
    _, operator = process.read({}, operator_environment(case))
    (peer,) = operator.network_policy_callers.listed()
    assert peer["namespaceSelector"] == {"matchLabels": {"kubernetes.io/metadata.name": rendering.NAMESPACE}}
    template = one(case, "Deployment", "-operator")["spec"]["template"]
    assert peer["podSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    assert len(peer["podSelector"]["matchLabels"]) == 3, "not every pod of the release"


@pytest.mark.parametrize("case", ["default", "locked-down", "namespaced"])
def test_jobs_are_scraped_by_whom_the_chart_lets_scrape(case):
    """Without a list by what the charts of Prometheus call so, of any namespace, and by nobody else."""
    wanted = one(case, "NetworkPolicy", "-operator")["spec"]["ingress"][0]["from"][0]
    prometheus = {"namespaceSelector": {}, "podSelector": {"matchLabels": {"app.kubernetes.io/name": "prometheus"}}}
    assert (wanted == prometheus) == (case != "locked-down")
    _, operator = process.read({}, operator_environment(case))
    assert operator.network_policy_scrapers.listed() == [wanted]


@pytest.mark.parametrize("case", CASES)
def test_pods_of_jobs_have_the_ids_that_the_charts_own_have(case):
    _, operator = process.read({}, operator_environment(case))
    assert operator.pod_fixed_ids == (case != "small")


@pytest.mark.parametrize("case", ["small", "everything"])
def test_jobs_get_no_policies_where_the_chart_says_so(case):
    _, operator = process.read({}, operator_environment(case))
    assert not operator.network_policy


@pytest.mark.parametrize("case", CASES)
def test_the_schedulers_address_is_a_service_that_finds_its_pods(case):
    host, _, port = operator_environment(case)[f"{process.PREFIX}SCHEDULER_ADDRESS"].partition(":")
    service = one(case, "Service", host.split(".")[0])
    assert host == f"{service['metadata']['name']}.{rendering.NAMESPACE}.svc"
    assert [p["port"] for p in service["spec"]["ports"]] == [int(port)]
    pod = one(case, "Deployment", "-scheduler")["spec"]["template"]
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert {"name": "grpc", "containerPort": int(port)} in pod["spec"]["containers"][0]["ports"]


@pytest.mark.parametrize("case", CASES)
def test_the_scheduler_mounts_the_certificate_that_the_operator_makes(case):
    spec = one(case, "Deployment", "-scheduler")["spec"]["template"]["spec"]
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    mounts = {mount["mountPath"]: mount["name"] for mount in spec["containers"][0]["volumeMounts"]}
    assert volumes[mounts[names.MOUNT_TLS]]["secret"]["secretName"] == access.SCHEDULER_SECRET


@pytest.mark.parametrize("case", CASES)
def test_selectors_are_free_of_what_an_upgrade_may_change(case):
    """A Deployment's selector can never be changed."""
    for deployment in objects(case, "Deployment"):
        selector = deployment["spec"]["selector"]["matchLabels"]
        assert selector.keys() == {f"app.kubernetes.io/{key}" for key in ("name", "instance", "component")}
        labels = deployment["spec"]["template"]["metadata"]["labels"]
        assert selector.items() <= labels.items()
        assert not {"helm.sh/chart", "app.kubernetes.io/version"} & labels.keys(), "an upgrade would restart the pods"


def test_common_labels_are_on_everything():
    for obj in objects("everything"):
        assert obj["metadata"]["labels"]["team"] == "ml", obj["metadata"]["name"]
    for _, template in pods("everything"):
        assert template["metadata"]["labels"]["team"] == "ml"


def test_network_policies_let_the_operator_call_drivers_and_the_scheduler():
    policy = one("default", "NetworkPolicy", "-operator")["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    drivers, scheduler = policy["egress"][-2:]
    assert drivers["ports"] == [{"protocol": "TCP", "port": names.PORT_DRIVER_GRPC}]
    (peer,) = drivers["to"]
    assert peer["podSelector"]["matchLabels"] == {names.LABEL_COMPONENT: names.COMPONENT_DRIVER}
    assert peer["namespaceSelector"] == {}
    pod = one("default", "Deployment", "-scheduler")["spec"]["template"]["metadata"]["labels"]
    assert scheduler["to"][0]["podSelector"]["matchLabels"].items() <= pod.items()


@pytest.mark.parametrize(("component", "away"), [("operator", "50%"), ("scheduler", 1)])
def test_a_drain_never_takes_all_replicas_of_a_part(component, away):
    budget = one("everything", "PodDisruptionBudget", f"-{component}")["spec"]
    assert (budget["maxUnavailable"], budget["unhealthyPodEvictionPolicy"]) == (away, "AlwaysAllow")
    pod = one("everything", "Deployment", f"-{component}")["spec"]["template"]
    assert budget["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    assert len(budget["selector"]["matchLabels"]) == 3
    assert objects("small", "PodDisruptionBudget") == []


@pytest.mark.parametrize("component", ["operator", "scheduler"])
def test_what_a_proxy_needs_is_opened_to_whoever_asks_the_api_server(component):
    proxy = {"to": [{"ipBlock": {"cidr": "10.9.0.0/16"}}], "ports": [{"protocol": "TCP", "port": 3128}]}
    assert one("locked-down", "NetworkPolicy", f"-{component}")["spec"]["egress"][-1] == proxy


def test_only_the_operator_and_drivers_reach_the_scheduler():
    scrapes, calls = one("default", "NetworkPolicy", "-scheduler")["spec"]["ingress"]
    assert [port["port"] for port in scrapes["ports"]] == [8080]
    assert [port["port"] for port in calls["ports"]] == [7080]
    operator = one("default", "Deployment", "-operator")["spec"]["template"]["metadata"]["labels"]
    own, drivers = calls["from"]
    assert own["podSelector"]["matchLabels"].items() <= operator.items()
    assert "namespaceSelector" not in own
    assert drivers["podSelector"]["matchLabels"] == {names.LABEL_COMPONENT: names.COMPONENT_DRIVER}


@pytest.mark.parametrize(("case", "values"), [("namespaced", ["team-a", "team-b"]), ("locked-down", ["research"])])
def test_network_policies_know_the_listed_namespaces(case, values):
    wanted = {"key": "kubernetes.io/metadata.name", "operator": "In", "values": values}
    drivers = one(case, "NetworkPolicy", "-scheduler")["spec"]["ingress"][1]["from"][1]
    assert drivers["namespaceSelector"] == {"matchExpressions": [wanted]}


@pytest.mark.parametrize("case", CASES)
def test_every_port_of_a_pod_is_open_to_somebody(case):
    policies = {policy["metadata"]["name"]: policy["spec"] for policy in objects(case, "NetworkPolicy")}
    for deployment in objects(case, "Deployment") if policies else []:
        opened = {
            port["port"] for rule in policies[deployment["metadata"]["name"]]["ingress"] for port in rule["ports"]
        }
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        assert opened == {port["containerPort"] for port in container["ports"]}


@pytest.mark.parametrize("case", CASES)
def test_monitors_and_services_find_the_pods_that_they_mean(case):
    labels = {
        o["metadata"]["labels"]["app.kubernetes.io/component"]: o["spec"]["template"]["metadata"]["labels"]
        for o in objects(case, "Deployment")
    }
    for service in objects(case, "Service"):
        component = service["metadata"]["labels"]["app.kubernetes.io/component"]
        assert service["spec"]["selector"].items() <= labels[component].items()
    for monitor in objects(case, "ServiceMonitor"):
        services = [
            s
            for s in objects(case, "Service")
            if monitor["spec"]["selector"]["matchLabels"].items() <= s["metadata"]["labels"].items()
        ]
        ports = [p["name"] for s in services for p in s["spec"]["ports"] if p["name"] == "http"]
        assert ports == ["http"], "one service with the port: else every pod is scraped twice"


def test_images_carry_no_registry_unless_one_is_given():
    for _, template in pods("default"):
        for container in template["spec"]["containers"]:
            assert "/" not in container["image"]
    for _, template in pods("locked-down"):
        assert "@sha256:" in template["spec"]["containers"][0]["image"]
        assert template["spec"]["imagePullSecrets"] == [{"name": "registry"}]


def test_names_are_short_enough_for_every_suffix():
    for case in CASES:
        for obj in objects(case):
            assert len(obj["metadata"]["name"]) <= 63, obj["metadata"]["name"]
