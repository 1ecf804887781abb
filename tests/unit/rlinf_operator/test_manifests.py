"""Rendered objects: the pod contract, the template's merge, hashes that survive upgrades."""

import base64
import json
from pathlib import Path

import pytest
import yaml

from rlinf_api import names
from rlinf_api.job import RLJobSpec, SlotsSpec
from rlinf_operator.clients.authority import Authority
from rlinf_operator.manifests import config, network, pods, template
from rlinf_operator.manifests.metadata import JobMeta, inputs, moved
from rlinf_operator.settings import DEFAULTS, DriverTemplate, OperatorSettings
from tests.builders import NOW, UID, make_job, ppo_job

JOB = JobMeta(namespace="team", name="math", uid=UID)
ROOT = Path(__file__).parents[3]
EXAMPLES = sorted(ROOT.glob("examples/**/rljob.yaml"))


def spec(**fields):
    return ppo_job().with_spec(**fields).parsed()


def worker(parsed=None, *, pool="sim"):
    return pods.worker(JOB, parsed or spec(), pool=pool, ordinal=1, attempt=3, life=2, settings=DEFAULTS)


def env(pod):
    return {e["name"]: e.get("value", e.get("valueFrom")) for e in pod["spec"]["containers"][0]["env"]}


def test_a_worker_pod_has_every_variable_of_the_table_that_an_agent_or_worker_reads():
    given = env(worker().manifest)
    for line in names.ENVIRONMENT:
        by_operator = line.set_by in ("manifests", "fieldRef")
        read_here = "agent" in line.read_by or "worker" in line.read_by
        assert (line.name in given) == (by_operator and read_here), line
    assert given[names.ENV_DRIVER_ADDRESS] == "driver.math.team.svc:7070"
    assert (given[names.ENV_POOL], given[names.ENV_ORDINAL], given[names.ENV_SLOTS]) == ("sim", "1", "4")
    assert given[names.ENV_POD_IP] == {"fieldRef": {"fieldPath": "status.podIP"}}


def test_a_driver_pod_has_every_variable_of_the_table_that_a_driver_reads():
    given = env(pods.driver(JOB, spec(), attempt=3, life=2, settings=DEFAULTS).manifest)
    for line in names.ENVIRONMENT:
        if line.set_by in ("manifests", "fieldRef") and "driver" in line.read_by:
            assert line.name in given, line
    assert (given[names.ENV_ATTEMPT], given[names.ENV_LIFE]) == ("3", "2")
    assert given[names.ENV_FIRST_OF_LIFE] == "", "only where that is sure"


@pytest.mark.parametrize("component", ["driver", "agent"])
def test_where_the_cluster_gives_out_ids_a_pod_names_none_and_a_template_may(component):
    """OpenShift's restricted-v2 refuses every number that is not of the namespace's range."""
    ids = {"runAsUser": 1_000_650_000, "fsGroup": 1_000_650_000}
    job = ppo_job()
    job.spec["pools"][0]["template"] = {"spec": {"securityContext": ids}}
    template = DriverTemplate(json.dumps({"spec": {"securityContext": ids}}))

    def rendered(parsed, settings):
        if component == "driver":
            return pods.driver(JOB, parsed, attempt=1, life=1, settings=settings)
        pool = parsed.pools[0].name
        return pods.worker(JOB, parsed, pool=pool, ordinal=0, attempt=1, life=1, settings=settings)

    bare = rendered(spec(), OperatorSettings(pod_fixed_ids=False)).manifest["spec"]["securityContext"]
    assert bare == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    theirs = rendered(job.parsed(), OperatorSettings(pod_fixed_ids=False, driver_template=template))
    assert (theirs.manifest["spec"]["securityContext"], theirs.conflicts) == (bare | ids, ())
    fixed = rendered(job.parsed(), OperatorSettings(driver_template=template))
    group = {"runAsGroup": names.POD_UID}
    assert (fixed.manifest["spec"]["securityContext"], fixed.conflicts) == (bare | group | ids, ())


@pytest.mark.parametrize("component", ["driver", "agent"])
def test_a_pod_runs_restricted_and_is_never_restarted_by_its_kubelet(component):
    rendered = worker() if component == "agent" else pods.driver(JOB, spec(), attempt=1, life=1, settings=DEFAULTS)
    pod = rendered.manifest["spec"]
    container = pod["containers"][0]
    assert container["name"] == component
    assert container["command"] == ["python", "-m", "rlinf_worker", component]
    assert pod["restartPolicy"] == "Never"
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsUser"] == names.POD_UID
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert container["terminationMessagePath"] == names.TERMINATION_LOG
    mounts = {m["mountPath"]: m["name"] for m in container["volumeMounts"]}
    volumes = {v["name"]: v for v in pod["volumes"]}
    assert set(mounts) == {
        names.MOUNT_RUN, names.MOUNT_SHM, names.MOUNT_TMP, names.MOUNT_CACHE, names.MOUNT_TLS, names.MOUNT_JOB,
    }  # fmt: skip
    assert volumes[mounts[names.MOUNT_SHM]]["emptyDir"]["medium"] == "Memory"
    part = "driver" if component == "driver" else "pool:sim"
    assert volumes[mounts[names.MOUNT_TLS]]["secret"]["secretName"] == names.secret_name("math", part, uid=UID)


def test_names_labels_and_dns_follow_the_contract():
    meta, pod = worker().manifest["metadata"], worker().manifest["spec"]
    assert meta["name"] == "math-sim-1-a3"
    assert (pod["hostname"], pod["subdomain"]) == ("sim-1", "math")
    assert meta["labels"][names.LABEL_ATTEMPT] == "3"
    assert meta["labels"][names.LABEL_JOB_UID] == UID
    assert meta["annotations"][names.ANNOTATION_LIFE] == "2"
    assert meta["ownerReferences"][0]["uid"] == UID


def test_slots_become_requests_and_limits():
    assert pods.resources(SlotsSpec(per_pod=4, cpu="500m", memory="2Gi")) == {
        "requests": {"cpu": "2", "memory": "8Gi"},
        "limits": {"cpu": "2", "memory": "8Gi"},
    }
    assert pods.resources(SlotsSpec(per_pod=3, cpu="250m"))["limits"]["cpu"] == "750m"
    assert pods.resources(SlotsSpec(per_pod=8, resource="nvidia.com/gpu", memory="80Gi"))["limits"] == {
        "nvidia.com/gpu": "8"
    }


def test_shm_is_a_share_of_the_pods_memory_as_it_counts_against_it():
    assert pods.shm_bytes(SlotsSpec(per_pod=4, memory="2Gi"), settings=DEFAULTS) == 2 << 30
    assert pods.shm_bytes(SlotsSpec(per_pod=1, memory="100Mi"), settings=DEFAULTS) == 64 << 20


def with_template(value):
    job = ppo_job()
    job.spec["pools"][0]["template"] = value
    return job.parsed()


def test_cpu_and_memory_beside_accelerators_are_asked_for_as_the_page_shows():
    text = (ROOT / "docs/install.md").read_text(encoding="utf-8")
    example = text.partition("<!-- tested: tests/unit/rlinf_operator/test_manifests.py -->\n")[2].partition("\n\n")[0]
    job = ppo_job().with_spec(**yaml.safe_load(example))
    rendered = worker(RLJobSpec.model_validate(job.spec), pool="gpu")
    assert rendered.conflicts == ()
    spec = rendered.manifest["spec"]
    assert spec["containers"][0]["resources"] == {
        "requests": {"nvidia.com/gpu": "8", "cpu": "48", "memory": "384Gi"},
        "limits": {"nvidia.com/gpu": "8", "cpu": "48", "memory": "384Gi"},
    }
    shm = next(v["emptyDir"]["sizeLimit"] for v in spec["volumes"] if v["name"] == "rlinf-shm")
    assert shm == "96Gi"
    assert spec["nodeSelector"] == {"kubernetes.io/arch": "amd64"}
    assert "nvidia.com/gpu" in [t["key"] for t in spec["tolerations"]]


def test_a_template_adds_to_accelerators_what_their_slots_do_not_ask_for():
    job = ppo_job()
    job.spec["pools"][0]["slots"] = {"resource": "a.com/x", "hostMemory": "8Gi", "memory": "80Gi"}
    job.spec["pools"][0]["template"] = {
        "spec": {"containers": [{"name": "agent", "resources": {"requests": {"cpu": "2", "memory": "1Gi"}}}]}
    }
    rendered = worker(job.parsed())
    assert rendered.manifest["spec"]["containers"][0]["resources"] == {
        "requests": {"a.com/x": "1", "cpu": "2", "memory": "8Gi"}, "limits": {"a.com/x": "1", "memory": "8Gi"},
    }  # fmt: skip
    (told,) = rendered.conflicts
    assert told.endswith("resources.requests.memory is '1Gi'; the operator sets '8Gi'")


def test_the_template_is_merged_under_what_the_operator_owns():
    parsed = with_template(
        {
            "metadata": {"labels": {"team": "rl"}, "annotations": {"a": "b"}},
            "spec": {
                "nodeSelector": {"gpu": "h100"},
                "tolerations": [{"key": "spot", "operator": "Exists"}],
                "containers": [
                    {
                        "name": "agent",
                        "image": "mine:7",
                        "env": [{"name": "FOO", "value": "1"}],
                        "volumeMounts": [{"name": "data", "mountPath": "/data"}],
                        "resources": {"limits": {"ephemeral-storage": "1Gi"}},
                    },
                    {"name": "side", "image": "s:1"},
                ],
                "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}],
            },
        }
    )
    rendered = worker(parsed)
    pod = rendered.manifest
    assert rendered.conflicts == ()
    assert pod["metadata"]["labels"]["team"] == "rl"
    assert pod["metadata"]["labels"][names.LABEL_POOL] == "sim"
    agent = pod["spec"]["containers"][0]
    assert agent["image"] == "mine:7"
    assert env(pod)["FOO"] == "1"
    assert agent["resources"]["limits"] == {"cpu": "4", "memory": "8Gi", "ephemeral-storage": "1Gi"}
    assert {m["mountPath"] for m in agent["volumeMounts"]} >= {"/data", names.MOUNT_RUN}
    assert [c["name"] for c in pod["spec"]["containers"]] == ["agent", "side"]
    assert "data" in {v["name"] for v in pod["spec"]["volumes"]}
    assert {t["key"] for t in pod["spec"]["tolerations"]} >= {"spot", "node.kubernetes.io/unreachable"}


def test_owned_fields_win_and_the_conflict_is_told():
    parsed = with_template(
        {
            "spec": {
                "restartPolicy": "Always",
                "containers": [
                    {"name": "agent", "command": ["sh"], "env": [{"name": names.ENV_POOL, "value": "evil"}]},
                ],
            }
        }
    )
    rendered = worker(parsed)
    assert rendered.manifest["spec"]["restartPolicy"] == "Never"
    assert env(rendered.manifest)[names.ENV_POOL] == "sim"
    text = " | ".join(rendered.conflicts)
    assert "spec.pools[sim].template.spec.restartPolicy is 'Always'; the operator sets 'Never'" in text
    assert "containers[agent].command" in text
    assert f"env[{names.ENV_POOL}]" in text


def test_merging_changes_neither_side():
    owned = {"a": {"b": 1}, "env": [{"name": "X", "value": "1"}]}
    given = {"a": {"c": 2}, "env": [{"name": "Y", "value": "2"}]}
    template.merge(owned, given, path="")
    assert owned == {"a": {"b": 1}, "env": [{"name": "X", "value": "1"}]}
    assert given == {"a": {"c": 2}, "env": [{"name": "Y", "value": "2"}]}


def test_a_flow_of_the_users_own_runs_in_the_users_image():
    job = make_job("mine.flows:train").role("a", "mine:A").pool("cpu", ["a"])
    job.spec["pools"][0]["template"] = {"spec": {"containers": [{"name": "agent", "image": "mine:7"}]}}
    pod = pods.driver(JOB, job.parsed(), attempt=1, life=1, settings=DEFAULTS).manifest
    assert pod["spec"]["containers"][0]["image"] == "mine:7"


def test_the_default_checkpoint_place_is_filled_in_and_the_jobs_own_wins():
    settings = OperatorSettings(default_checkpoint_uri="file:///c/{namespace}/{job}-{uid}")
    assert pods.checkpoint_uri(JOB, spec(), settings=settings) == f"file:///c/team/math-{UID}"
    assert pods.checkpoint_uri(JOB, spec(checkpoint={"uri": "/own"}), settings=settings) == "/own"


def test_the_service_gives_the_driver_a_name_before_it_is_ready_and_its_workers_none():
    service = network.headless(JOB)
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    driver = pods.driver(JOB, spec(), attempt=2, life=1, settings=OperatorSettings()).manifest
    worker = pods.worker(JOB, spec(), pool="sim", ordinal=0, attempt=2, life=1, settings=OperatorSettings()).manifest
    selected = [service["spec"]["selector"].items() <= p["metadata"]["labels"].items() for p in (driver, worker)]
    assert selected == [True, False]
    assert driver["spec"]["subdomain"] == service["metadata"]["name"]


def test_job_json_reads_back_as_the_spec():
    parsed = spec(seed=7)
    manifest = config.config_map(JOB, parsed, certificates_expire=None)
    assert RLJobSpec.model_validate_json(manifest["data"][names.JOB_FILE]) == parsed


@pytest.mark.parametrize("path", EXAMPLES, ids=[path.parent.name for path in EXAMPLES])
def test_job_json_names_no_field_at_its_default_so_that_an_image_from_before_the_field_reads_it(path):
    parsed = RLJobSpec.model_validate(yaml.safe_load(path.read_text(encoding="utf-8"))["spec"])
    text = config.job_json(parsed)
    assert RLJobSpec.model_validate_json(text) == parsed
    assert not json.loads(text).keys() & {"objective", "minGainPerSlot", "suspend", "failurePolicy", "allOrNothing"}
    assert json.loads(config.job_json(spec(suspend=True)))["suspend"] is True


def test_the_inputs_of_a_pod_are_not_defaults_counts_goals_and_policies():
    base = inputs(spec(), "sim")
    assert inputs(spec(checkpoint={"everySteps": 9, "keep": 9}, flow={"name": "ppo", "steps": 7}), "sim") == base
    assert inputs(spec(suspend=True, failurePolicy={"maxRestarts": 3}, activeDeadlineSeconds=5), "sim") == base
    assert inputs(spec(placement={"mode": "Disaggregated"}), "sim") == base
    assert inputs(spec(objective="CostPerStep", minGainPerSlot=0.1), "sim") == base
    roles = spec().model_dump(mode="json", by_alias=True, exclude_defaults=True)["roles"]
    assert inputs(spec(roles=[role | {"spares": 1} for role in roles]), "sim") == base
    assert inputs(spec(roles=roles[::-1]), "sim") == base


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"seed": 8}, "seed"),
        ({"checkpoint": {"uri": "/c"}}, "checkpoint.uri"),
        ({"flow": {"name": "ppo", "config": {"env": "X"}}}, "flow.config"),
        ({"flow": {"name": "ppo", "maxStaleness": 1}}, "flow.maxStaleness"),
    ],
)
def test_the_field_that_makes_a_pods_inputs_others_is_named(change, field):
    assert moved(inputs(spec(), "sim"), inputs(spec(**change), "sim")) == f"spec.{field} changed"


def test_of_a_template_its_spec_counts_and_of_other_pools_nothing():
    def with_template(name, **template):
        pools = spec().model_dump(mode="json", by_alias=True, exclude_defaults=True)["pools"]
        return spec(pools=[p | ({"template": template} if p["name"] == name else {}) for p in pools])

    base = inputs(spec(), "sim")
    assert inputs(with_template("sim", metadata={"labels": {"a": "b"}}), "sim") == base
    assert inputs(with_template("train", spec={"priorityClassName": "high"}), "sim") == base
    changed = inputs(with_template("sim", spec={"priorityClassName": "high"}), "sim")
    assert moved(base, changed) == "spec.pools[sim].template.spec changed"


def test_the_inputs_of_a_known_job_never_move():
    """Pinned: a change of this value would restart every running job at the operator's upgrade."""
    assert inputs(spec(), "sim") == PINNED


PINNED = (
    "flow.name=213a5f7e,pools[sim].roles=e9bc673e,pools[sim].slots=215e00fc,roles[actor].kind=cc081ba8,"
    "roles[env].kind=a7b0b4d0,roles[rollout].kind=b88e3adb"
)


def test_secret_data_is_base64():
    secret, _ = Authority.new(clock=lambda: NOW).secret(JOB, "driver")
    assert base64.b64decode(secret["data"]["tls.crt"]).startswith(b"-----BEGIN CERTIFICATE")
    assert set(secret["data"]) == {"ca.crt", "tls.crt", "tls.key"}


def test_a_driver_that_starts_later_reads_what_the_spec_allows_by_then():
    """Without pods being replaced: more pods for a job that did not fit, other bounds for the next driver."""
    base = config.inputs_hash(spec())
    assert config.inputs_hash(spec(failurePolicy={"maxRestarts": 3})) != base
    assert config.inputs_hash(spec(checkpoint={"everySteps": 20})) == base
    assert config.inputs_hash(spec(suspend=True, activeDeadlineSeconds=5, ttlSecondsAfterFinished=1)) == base
