"""What the API server refuses when a job is made, `rljob` refuses before it starts one: for the same reason, with the
same remedy."""

import pytest

from rljob import manifest as manifests
from tests.cluster.control_plane import served
from tests.conformance.parts import job
from tools.testcluster.api import ApiError
from tools.testcluster.cluster import REPOSITORY, Cluster
from tools.testcluster.waiting import until

REFUSED = {
    "a pool names a role that is not there": (
        job(pool={"roles": ["env", "rollout", "actor", "critic"]}), "add the role or remove the name"
    ),
    "no pool may run a role": (job(pool={"roles": ["env", "rollout"]}), "spec.pools[*].roles"),
    "a slot is two things": (job(pool={"slots": {"resource": "nvidia.com/gpu", "cpu": "1"}}), "remove one"),
    "a plan is pinned that has no name": (job(placement={"mode": "Pinned"}), "write the name of an RLPlan"),
    "no steps": (job(steps=0), "spec.flow.steps"),
    "a field that is none": (job(config={}, pool={"podz": 1}), "podz"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_rljob_refuses_it_before_the_start(case: str):
    manifest, said = REFUSED[case]
    assert any(said in str(problem) for problem in manifests.check(manifest).problems)


@pytest.mark.cluster
@pytest.mark.timeout(180)
@pytest.mark.parametrize("case", REFUSED)
def test_the_api_server_refuses_it(cluster: Cluster, case: str):
    manifest, said = REFUSED[case]
    cluster.kubectl("apply", "-f", str(REPOSITORY / "crds" / "rlinf.io_rljobs.yaml"))
    cluster.kubectl("wait", "--for=condition=Established", "crd/rljobs.rlinf.io")
    until(lambda: served(cluster, "rljobs"), what="the API of RLJobs", timeout_s=30)
    path = "/apis/rlinf.io/v1alpha1/namespaces/default/rljobs?dryRun=All&fieldValidation=Strict"
    with pytest.raises(ApiError) as refused:
        cluster.api.request("POST", path, body=manifest)
    assert said in str(refused.value)
