"""The chart as helm renders it: snapshots are current, and values that mean nothing are refused with their name.

Needs helm and kubeconform from the test cluster's cache; a machine that has not built them skips this with a sentence.
`make test-cluster` builds them, and runs this too.
"""

import os

import pytest
import yaml

from tools.chart import __main__ as chart
from tools.chart import rendering
from tools.testcluster import binaries
from tools.testcluster.errors import ClusterError, CommandFailed

pytestmark = pytest.mark.programs


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
        ({"watchNamespaces": ["Team_A"]}, "watchNamespaces"),
        ({"admissionPolicy": {"validationActions": []}}, "validationActions"),
        ({"commonLabels": {"team": "not a label"}}, "commonLabels"),
        ({"networkPolicies": {"apiServer": {"ports": [0]}}}, "ports"),
        ({"serviceAccounts": {"operator": {"create": False}}}, "serviceAccounts.operator.create is false"),
    ],
)
def test_a_value_that_means_nothing_is_refused_by_name(tmp_path, values, named):
    with pytest.raises(CommandFailed, match=named):
        render(tmp_path, **values)


def test_long_names_are_cut_and_stay_names(tmp_path):
    for obj in rendering.manifests(render(tmp_path, fullnameOverride="x" * 60)):
        assert len(obj["metadata"]["name"]) <= 63 or obj["kind"].startswith(("Cluster", "Validating"))


@pytest.mark.slow("renders and validates the chart for every case")
def test_every_case_passes_chart_check():
    assert chart.check() == []


def test_images_of_your_own_for_other_nodes_take_the_default_away(tmp_path):
    nowhere = {"nodeSelector": {"kubernetes.io/arch": None, "kubernetes.io/os": None}}
    values = {"operator": {**nowhere, "driverTemplate": {"spec": nowhere}}, "scheduler": nowhere}
    assert "amd64" not in render(tmp_path, **values)
    other = {"nodeSelector": {"kubernetes.io/arch": "arm64"}}
    values = {"operator": {**other, "driverTemplate": {"spec": other}}, "scheduler": other}
    found = render(tmp_path, **values)
    assert (found.count("arm64"), "amd64" in found) == (4, False)
