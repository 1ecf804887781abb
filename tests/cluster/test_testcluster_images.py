"""Images come from this machine alone: a Debian base, a Dockerfile built by BuildKit, site-packages from a volume."""

import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.conftest import skip_or_fail
from tests.cluster.pods import create, phase, pod
from tools.testcluster import binaries, cgroups, images
from tools.testcluster.cluster import Cluster
from tools.testcluster.errors import NotBuilt
from tools.testcluster.waiting import until

# The base is imported into every node: 280 MB each. `make test-cluster` has made it; otherwise the first test does, in
# minutes.
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow("makes a Debian base, 280 MB, and imports it into every node"),
    pytest.mark.timeout(1500),
]


@pytest.fixture(scope="module")
def python_image(cluster: Cluster) -> str:
    return cluster.load_python_base(report=binaries.say)


def output(cluster: Cluster, namespace: str, name: str, *, timeout_s: float = 60) -> str:
    until(
        lambda: phase(cluster, namespace, name) in ("Succeeded", "Failed"),
        what=f"pod {name} to end",
        timeout_s=timeout_s,
        every_s=0.2,
    )
    said = cluster.kubectl("-n", namespace, "logs", name)
    assert phase(cluster, namespace, name) == "Succeeded", said
    return said


def test_a_restricted_pod_imports_what_this_python_has_installed(cluster: Cluster, namespace: str, python_image: str):
    claim = cluster.site_packages_volume(namespace, name="site-packages")
    manifest = pod("imports", restartPolicy="Never")
    container = manifest["spec"]["containers"][0]
    container["image"] = python_image
    loads = "import ctypes, sys, yaml; ctypes.CDLL('libnuma.so.1'); print(sys.version_info[:2], yaml.__file__)"
    container["command"] = ["python3", "-c", loads]
    container["env"] = [{"name": "PYTHONPATH", "value": "/site-packages"}]
    container["volumeMounts"].append({"name": "packages", "mountPath": "/site-packages", "readOnly": True})
    manifest["spec"]["volumes"].append(
        {"name": "packages", "persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
    )
    create(cluster, namespace, manifest)
    assert output(cluster, namespace, "imports") == f"{sys.version_info[:2]} /site-packages/yaml/__init__.py\n"


@pytest.fixture
def buildkit() -> Iterator[images.BuildKit]:
    try:
        made = images.BuildKit(report=binaries.say)
    except NotBuilt as err:
        skip_or_fail(str(err))
        raise
    with made:
        yield made
    assert cgroups.folders(made.group) == [], "a build leaves no cgroup"


def test_a_dockerfile_is_built_with_the_base_swapped_in_and_runs(
    cluster: Cluster, namespace: str, buildkit: images.BuildKit, tmp_path: Path
):
    (tmp_path / "Dockerfile").write_text(
        "FROM python:3.11-slim AS build\n"
        f"RUN true {uuid.uuid4()}\n"  # no layer of an earlier run is this one
        "RUN python3 -m venv /venv && /venv/bin/pip install --no-cache-dir six==1.17.0\n"
        "FROM python:3.11-slim\n"
        "COPY --from=build /venv /venv\n"
        "USER 1000\n"
        'ENTRYPOINT ["/venv/bin/python", "-c", "import six; print(six.__version__)"]\n'
    )
    base = images.python_base(report=binaries.say)
    archive = buildkit.build(
        tmp_path, name="localhost/six:1", out=tmp_path / "six.tar", bases={"python:3.11-slim": base}
    )
    assert cgroups.folders(buildkit.group), "what RUN starts is counted where it is looked for"
    cluster.load(archive)
    manifest = pod("six", restartPolicy="Never")
    container = manifest["spec"]["containers"][0]
    container["image"] = "localhost/six:1"
    del container["command"]
    create(cluster, namespace, manifest)
    assert output(cluster, namespace, "six") == "1.17.0\n"
