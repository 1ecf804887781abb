"""The chart as helm renders it: snapshots are current, and values that mean nothing are refused with their name.

Needs helm and kubeconform from the test cluster's cache; a machine that has not built them skips this with a sentence.
`make test-cluster` builds them, and runs this too.
"""

import json
import os
from pathlib import Path

import pytest
import yaml

from rlinf_api import __version__, names
from rlinf_operator.process import ProcessSettings
from rlinf_operator.settings import DEFAULTS
from tools.chart import __main__ as chart
from tools.chart import rendering
from tools.testcluster import binaries
from tools.testcluster.errors import ClusterError, CommandFailed

pytestmark = pytest.mark.programs
OPERATORS_PODS = Path(__file__).parents[1] / "unit" / "rlinf_operator" / "rendered"


@pytest.fixture(scope="module", autouse=True)
def programs(pytestconfig):
    try:
        return binaries.ready()
    except ClusterError as error:
        if os.environ.get("CI") == "true" and pytestconfig.getoption("cluster"):  # they may be being built beside us
            pytest.fail(f"under CI=true the chart must be rendered: {error}", pytrace=False)
        pytest.skip(str(error))


def render(tmp_path, **values):
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump(values), encoding="utf-8")
    return rendering.render(file)


@pytest.mark.parametrize("case", sorted(rendering.cases()))
def test_the_committed_snapshot_is_what_helm_renders(case):
    rendered = rendering.snapshot(rendering.render(rendering.cases()[case]))
    assert rendered == rendering.snapshot_file(case).read_text(encoding="utf-8"), "make chart-snapshots, read the diff"


def test_the_crds_come_with_the_chart_unless_they_are_left_out(tmp_path):
    def crds(text):
        found = [o for o in rendering.manifests(text) if o["kind"] == "CustomResourceDefinition"]
        return {o["metadata"]["name"]: o["metadata"]["annotations"] for o in found}

    kept = {"helm.sh/resource-policy": "keep"}
    plurals = ("rljobs", "rlplans", "rlprofiles", "rlruntimes")
    assert crds(render(tmp_path)) == {f"{plural}.rlinf.io": kept for plural in plurals}
    assert crds(render(tmp_path, crds={"install": False})) == {}


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"watchNamespace": ["a"]}, "watchNamespace"),
        ({"runtimes": {"gpu": {"poolDefault": {}}}}, "poolDefault"),
        ({"runtimes": {"gpu": {"poolDefaults": {"slots": {"perPod": 65}}}}}, "perPod"),
        ({"operator": {"replica": 2}}, "replica"),
        ({"operator": {"settings": {"drain_deadline": 3}}}, "drain_deadline"),
        ({"operator": {"settings": {"namespace": "x"}}}, "namespace"),
        ({"operator": {"settings": {"resync_s": "soon"}}}, "resync_s"),
        ({"operator": {"settings": {"driver_memory": "1GB"}}}, "driver_memory"),
        ({"operator": {"settings": {"image_pull_policy": "always"}}}, "image_pull_policy"),
        ({"operator": {"settings": {"default_checkpoint_uri": "az://bucket/x"}}}, "default_checkpoint_uri"),
        ({"operator": {"settings": {"default_checkpoint_uri": "/data/{team}"}}}, "default_checkpoint_uri"),
        ({"operator": {"driverTemplate": {"nodeSelector": {}}}}, "nodeSelector"),
        ({"operator": {"driverTemplate": {"spec": {"hostNetwork": True}}}}, "hostNetwork"),
        ({"operator": {"driverTemplate": {"spec": {"containers": [{"image": "x"}]}}}}, "containers"),
        ({"operator": {"logLevel": "info"}}, "logLevel"),
        ({"operator": {"replicas": "two"}}, "replicas"),
        ({"image": {"digest": "sha256:12"}}, "digest"),
        ({"global": {"imageRegistry": "https://registry.example.com"}}, "imageRegistry"),
        ({"global": {"imageRegistry": "registry.example.com/"}}, "imageRegistry"),
        ({"watchNamespaces": ["Team_A"]}, "watchNamespaces"),
        ({"watchNamespaceSelector": {"matchLabel": {}}}, "matchLabel"),
        ({"watchNamespaceSelector": {"matchExpressions": [{"key": "a", "operator": "In"}]}}, "matchExpressions"),
        (
            {"watchNamespaces": ["a"], "watchNamespaceSelector": {"matchLabels": {"rlinf": "yes"}}},
            "watchNamespaces and watchNamespaceSelector are both set; remove one",
        ),
        (
            {"operator": {"settings": {"stop_timeout_s": 30}}},
            "terminationGracePeriodSeconds is 20, and a stop may take 30 s",
        ),
        (
            {"operator": {"terminationGracePeriodSeconds": int(ProcessSettings().stop_timeout_s)}},
            "terminationGracePeriodSeconds is 8, and a stop may take 8 s",
        ),
        ({"admissionPolicy": {"validationActions": []}}, "validationActions"),
        ({"commonLabels": {"team": "not a label"}}, "commonLabels"),
        ({"networkPolicies": {"apiServer": {"ports": [0]}}}, "ports"),
        ({"serviceAccounts": {"operator": {"create": False}}}, "serviceAccounts.operator.create is false"),
    ],
)
def test_a_value_that_means_nothing_is_refused_by_name(tmp_path, values, named):
    with pytest.raises(CommandFailed, match=named):
        render(tmp_path, **values)


def texts_that_are_none(value, path=""):
    """Of a manifest's names, labels and selectors."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value if isinstance(value, list) else ()):
        where = f"{path}.{key}"
        is_text = key in ("name", "namespace", "serviceAccountName", "priorityClassName") or where.split(".")[-2] in (
            "labels", "matchLabels", "annotations", "selector", "data",
        )  # fmt: skip
        if is_text and not isinstance(inner, str | dict | list):
            yield where
        yield from texts_that_are_none(inner, where)


def test_names_of_digits_and_of_words_that_yaml_knows_stay_texts(tmp_path):
    values = tmp_path / "values.yaml"
    account = {"create": True, "name": "1e3"}
    values.write_text(json.dumps({
        "watchNamespaces": ["2024", "on"], "nameOverride": "42", "image": {"pullSecrets": ["7", "null"]},
        "operator": {"priorityClassName": "100"}, "scheduler": {"priorityClassName": "true"},
        "runtimes": {"0": {}, "cpu": None, "gpu": {"queue": "a"}},
        "metrics": {"serviceMonitor": {"enabled": True}, "podMonitor": {"enabled": True}},
        "serviceAccounts": {"operator": account, "scheduler": {**account, "name": "0x1"}},
    }))  # fmt: skip
    words = ("template", "007", str(rendering.CHART), "--namespace", "1000", "--kube-version", rendering.KUBERNETES)
    found = rendering.manifests(rendering.helm(*words, "--values", str(values)))
    assert len(found) > 20
    assert [f"{o['kind']}{where}" for o in found for where in texts_that_are_none(o)] == []


@pytest.mark.parametrize(
    ("values", "where"), [({}, {"any": True}), ({"watchNamespaces": ["a", "b"]}, {"matchNames": ["a", "b"]})]
)
def test_the_pod_monitor_finds_drivers_and_workers_where_jobs_are(tmp_path, values, where):
    rendered = rendering.manifests(render(tmp_path, metrics={"podMonitor": {"enabled": True}}, **values))
    (spec,) = [found["spec"] for found in rendered if found["kind"] == "PodMonitor"]
    assert spec["namespaceSelector"] == where
    (expression,), (endpoint,) = spec["selector"]["matchExpressions"], spec["podMetricsEndpoints"]
    pods = [
        made for file in OPERATORS_PODS.glob("*.yaml") for made in yaml.safe_load_all(file.read_text())
        if made and made["kind"] == "Pod"
    ]  # fmt: skip
    assert {pod["metadata"]["labels"]["rlinf.io/component"] for pod in pods} == {"driver", "worker"}
    for pod in pods:
        assert expression["key"] in pod["metadata"]["labels"]
        ports = {port["name"]: port["containerPort"] for port in pod["spec"]["containers"][0]["ports"]}
        assert ports[endpoint["port"]] == names.PORT_METRICS


def test_long_names_are_cut_and_stay_names(tmp_path):
    for obj in rendering.manifests(render(tmp_path, fullnameOverride="x" * 60)):
        assert len(obj["metadata"]["name"]) <= 63 or obj["kind"].startswith(("Cluster", "Validating"))


@pytest.mark.slow("renders and validates the chart for every case")
def test_every_case_passes_chart_check():
    assert chart.check() == []


def images(rendered):
    """All that a chart's objects name, at any depth, in templates that are handed on as JSON too."""

    def found(value):
        if isinstance(value, dict):
            if isinstance(value.get("image"), str):
                yield value["image"]
            if value.get("name") in ("RLINF_OPERATOR_DRIVER_IMAGE", "RLINF_OPERATOR_WORKER_IMAGE"):
                yield value["value"]
            if value.get("name") == "RLINF_OPERATOR_DRIVER_TEMPLATE":
                yield from found(json.loads(value["value"]))
            yield from (image for inner in value.values() for image in found(inner))
        elif isinstance(value, list):
            yield from (image for inner in value for image in found(inner))

    kinds = ("Deployment", "Pod", "RLRuntime")
    return sorted({image for o in rendering.manifests(rendered) if o["kind"] in kinds for image in found(o["spec"])})


def of_a_container(image):
    return {
        "spec": {"containers": [{"name": "side", "image": image}], "initContainers": [{"name": "i", "image": image}]}
    }


EVERY_IMAGE = {
    "runtimes": {
        "own": {
            "template": of_a_container("side:1"),
            "driver": {"template": of_a_container("side:2")},
            "poolDefaults": {"image": "pool:1", "template": of_a_container("side:3")},
            "pools": [{"name": "sim", "image": "pool:2", "template": of_a_container("side:4")}],
        }
    },
    "operator": {"driverTemplate": of_a_container("side:5")},
}


def test_a_registry_of_ones_own_stands_in_front_of_every_image(tmp_path):
    released = [f"rlinf-operator:{__version__}", DEFAULTS.driver_image, DEFAULTS.worker_image]
    others = ["pool:1", "pool:2", *(f"side:{number}" for number in range(1, 6))]
    registry = {"imageRegistry": "registry.example.com:5000/mirror", "of": "another chart"}
    rendered = render(tmp_path, **{"global": registry}, **EVERY_IMAGE)
    assert images(rendered) == sorted(f"registry.example.com:5000/mirror/{name}" for name in (*released, *others))
    assert images(render(tmp_path, **EVERY_IMAGE)) == sorted([released[0], *others]), "the operator knows its own"


def test_what_names_the_registry_itself_has_it_once(tmp_path):
    own = {"repository": "r.example.com/rlinf-operator", "digest": f"sha256:{'0' * 64}"}
    named = {"driver": "r.example.com/driver:1", "worker": "elsewhere/worker:1"}
    rendered = render(tmp_path, **{"global": {"imageRegistry": "r.example.com"}}, image=own, jobImages=named)
    assert images(rendered) == [
        "r.example.com/driver:1", "r.example.com/elsewhere/worker:1", f"{own['repository']}@{own['digest']}",
    ]  # fmt: skip


def test_images_of_your_own_for_other_nodes_take_the_default_away(tmp_path):
    nowhere = {"nodeSelector": {"kubernetes.io/arch": None, "kubernetes.io/os": None}}
    values = {"operator": {**nowhere, "driverTemplate": {"spec": nowhere}}, "scheduler": nowhere}
    assert "amd64" not in render(tmp_path, **values)
    other = {"nodeSelector": {"kubernetes.io/arch": "arm64"}}
    values = {"operator": {**other, "driverTemplate": {"spec": other}}, "scheduler": other}
    found = render(tmp_path, **values)
    assert (found.count("arm64"), "amd64" in found) == (4, False)
