"""Local mode carries out the very pods that the operator renders: nothing in them is refused."""

from typing import Any

import pytest

from rlinf_operator.manifests import pods
from rlinf_operator.manifests.metadata import JobMeta
from rlinf_operator.settings import DEFAULTS
from rljob.local import podspec
from tests.builders import make_job

JOB = JobMeta(namespace="default", name="a", uid="5f1c")


@pytest.mark.parametrize("part", ["driver", "worker"])
def test_nothing_of_a_rendered_pod_is_refused(part):
    spec = make_job("ppo").role("env", "gymnasium").pool("sim", ["env"], per_pod=2).parsed()
    common: dict[str, Any] = {"attempt": 1, "life": 1, "settings": DEFAULTS}
    if part == "driver":
        rendered = pods.driver(JOB, spec, **common)
    else:
        rendered = pods.worker(JOB, spec, pool="sim", ordinal=0, **common)
    assert podspec.refusals(rendered.manifest) == []
