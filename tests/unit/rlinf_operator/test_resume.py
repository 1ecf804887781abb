"""A suspended job is wanted again: what it lost meanwhile is made again with its pods."""

from rlinf_api.report import DriverState
from tests.fakes.cluster import KEY, Cluster


async def test_a_secret_deleted_while_the_job_was_suspended_is_there_for_its_next_pods():
    cluster = Cluster()
    await cluster.apply()
    await cluster.settle()

    async def suspend(wanted):
        await cluster.store.patch("RLJob", "math", namespace="team", patch={"spec": {"suspend": wanted}})
        await cluster.settle()

    cluster.drivers.say(KEY, state=DriverState.RUNNING, plan_revision=1, step=3)
    await suspend(True)
    assert await cluster.names("Pod") == []
    secrets = await cluster.names("Secret")
    for name in secrets:
        await cluster.store.delete("Secret", name, namespace="team")
    await suspend(False)
    assert await cluster.names("Secret") == secrets
    assert "math-driver-a2" in await cluster.names("Pod")
