"""Jobs that another controller looks after (spec.managedBy): nothing is made, written or counted."""

from typing import Any

from rlinf_operator.manifests import metadata
from rljob import run
from tests.builders import ppo_job
from tests.fakes.cluster import KEY, Cluster

OTHER = "kueue.x-k8s.io/multikueue"


async def test_a_job_of_another_controller_is_let_alone():
    cluster = Cluster()
    await cluster.apply(ppo_job().with_spec(managedBy=OTHER))
    await cluster.settle()
    assert cluster.store.writes == []
    assert not (await cluster.store.get("RLJob", "math", namespace="team")).get("status")
    for kind in ("RLPlan", "Pod", "Service", "Secret", "ConfigMap"):
        assert await cluster.names(kind) == []


async def test_a_job_that_names_this_operator_is_run():
    cluster = Cluster()
    await cluster.apply(ppo_job().with_spec(managedBy="rlinf.io/operator"))
    await cluster.settle()
    assert "math-driver-a1" in await cluster.names("Pod")


async def test_it_is_not_looked_at_again_by_the_resync():
    cluster = Cluster()
    await cluster.apply(ppo_job().with_spec(managedBy=OTHER))
    await cluster.reconciler.pass_over(KEY)
    assert KEY not in cluster.reconciler._memory


def test_who_names_nobody_is_ours():
    assert metadata.is_anothers({"spec": {"managedBy": OTHER}})
    ours: tuple[dict[str, Any], ...] = ({"spec": {}}, {}, {"spec": {"managedBy": "rlinf.io/operator"}})
    assert [metadata.is_anothers(job) for job in ours] == [False] * 3


def test_a_run_on_this_machine_refuses_it():
    [problem] = run.beyond_local_mode("math", ppo_job().with_spec(managedBy=OTHER).parsed())
    assert str(problem) == (
        f"spec.managedBy: got {OTHER!r}: another controller is to run it, and this machine has none; remove it"
    )
