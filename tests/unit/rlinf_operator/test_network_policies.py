"""The NetworkPolicy of a job: whom it lets in, and that it follows the operator's settings while the job runs."""

import asyncio
import dataclasses
import json

import pytest

from rlinf_api import names
from rlinf_api.errors import RLinfError, UserError
from rlinf_operator import process
from rlinf_operator.clients.cache import CachedStore
from rlinf_operator.manifests import network, pods
from rlinf_operator.manifests.metadata import JobMeta
from rlinf_operator.reconcile.loop import Reconciler, key_of
from rlinf_operator.settings import DEFAULTS, OperatorSettings, Peers
from rlinf_scheduler.service import Planning
from tests.builders import NOW, UID, ppo_job
from tests.fakes.api_server import FakeApiServer
from tests.fakes.cluster import AUTHORITY, KEY, QUICK, Cluster

JOB = JobMeta(namespace="team", name="math", uid=UID)
OPERATOR = [{"namespaceSelector": {}, "podSelector": {"matchLabels": {"app": "operator"}}}]
OFF = OperatorSettings(network_policy=False)


def policy(settings=DEFAULTS, job=None):
    return network.policy(JOB, (job or ppo_job()).parsed(), settings=settings)


def on_the_host(pool=1):
    job = ppo_job()
    job.spec["pools"][pool]["template"] = {"spec": {"hostNetwork": True}}
    return job


def opened(found, port):
    (rule,) = [r for r in found["spec"]["ingress"] if r.get("ports") == [{"protocol": "TCP", "port": port}]]
    return rule.get("from")


def test_it_isolates_the_jobs_pods_and_lets_them_talk_to_each_other_on_every_port():
    found = policy()
    assert found["spec"]["podSelector"] == {"matchLabels": {names.LABEL_JOB_UID: UID}}
    assert found["spec"]["policyTypes"] == ["Ingress"], "no egress rules"
    assert found["spec"]["ingress"][0] == {"from": [{"podSelector": {"matchLabels": {names.LABEL_JOB_UID: UID}}}]}
    assert found["metadata"]["ownerReferences"][0]["uid"] == UID
    assert found["metadata"]["labels"][names.LABEL_JOB] == "math"
    for pod in (
        pods.driver(JOB, ppo_job().parsed(), attempt=1, life=1, settings=DEFAULTS).manifest,
        pods.worker(JOB, ppo_job().parsed(), pool="sim", ordinal=0, attempt=1, life=1, settings=DEFAULTS).manifest,
    ):
        assert pod["metadata"]["labels"][names.LABEL_JOB_UID] == UID


def test_the_driver_takes_calls_of_the_operator_and_everybody_is_scraped_by_whom_the_settings_name():
    scrapers = [{"ipBlock": {"cidr": "10.0.0.0/8"}}]
    found = policy(
        OperatorSettings(
            network_policy_callers=Peers(json.dumps(OPERATOR)),
            network_policy_scrapers=Peers(json.dumps(scrapers)),
        )
    )
    assert opened(found, names.PORT_DRIVER_GRPC) == OPERATOR
    assert opened(found, names.PORT_METRICS) == scrapers
    assert len(found["spec"]["ingress"]) == 3


def test_without_peers_the_two_ports_are_open_and_no_other():
    found = policy()
    assert opened(found, names.PORT_DRIVER_GRPC) is None
    assert opened(found, names.PORT_METRICS) is None
    assert all("ports" in rule or "from" in rule for rule in found["spec"]["ingress"])


def test_a_job_on_the_hosts_network_has_none_and_says_so():
    assert policy(job=on_the_host()) is None
    decision = on_the_host().world().planned().decide()
    assert decision.create_pods
    assert decision.network_policy is None
    (event,) = [e for e in decision.events_of_made if e.reason == "NotIsolated"]
    assert "pool 'train' has hostNetwork" in event.message
    assert not [e for e in ppo_job().world().planned().decide().events_of_made if e.reason == "NotIsolated"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("anybody", "Expecting value"),
        ('{"podSelector": {}}', "wanted a JSON list"),
        ('[{"podselector": {}}]', "ipBlock, namespaceSelector, podSelector"),
        ("[{}]", "wanted a JSON list"),
    ],
)
def test_peers_that_are_none_keep_the_operator_from_starting(text, sentence):
    """An API server would refuse the policy of every job, one by one."""
    with pytest.raises(UserError, match="RLINF_OPERATOR_NETWORK_POLICY_CALLERS is no Peers") as caught:
        process.read({}, {"RLINF_OPERATOR_NETWORK_POLICY_CALLERS": text})
    assert sentence in str(caught.value)


def test_a_switch_is_true_or_false():
    assert process.read({"network_policy": "false"}, {})[1] == OFF
    assert process.read({"network_policy": "True"}, {})[1] == DEFAULTS
    with pytest.raises(UserError, match="NETWORK_POLICY is no bool: got 'no', wanted true or false"):
        process.read({}, {"RLINF_OPERATOR_NETWORK_POLICY": "no"})


# ---- over a job's life


def told_otherwise(cluster, **changes):
    """A new operator with other settings over the same cluster."""
    cluster.reconciler = Reconciler(
        store=cluster.store, scheduler=Planning(cluster.store), drivers=lambda _: cluster.drivers, authority=AUTHORITY,
        settings=dataclasses.replace(QUICK, **changes), clock=lambda: NOW,
    )  # fmt: skip


async def stored(cluster):
    return await cluster.store.get("NetworkPolicy", "math", namespace="team")


async def running():
    cluster = Cluster()
    await cluster.apply()
    await cluster.settle()
    return cluster


async def test_it_is_there_before_the_first_pod():
    cluster = await running()
    kinds = [kind for verb, kind, _ in cluster.store.writes if verb == "create"]
    assert kinds.index("NetworkPolicy") < kinds.index("Pod")


async def test_other_callers_are_let_in_under_a_running_job():
    """A release under another name: its operator must reach the drivers that an earlier one has started."""
    cluster = await running()
    cluster.store.writes.clear()
    told_otherwise(cluster, network_policy_callers=Peers(json.dumps(OPERATOR)))
    await cluster.settle(3)
    assert opened(await stored(cluster), names.PORT_DRIVER_GRPC) == OPERATOR
    assert cluster.store.writes == [("patch", "NetworkPolicy", "math")], "once, and nothing else"


async def test_switched_off_it_goes_and_switched_on_it_comes_back():
    cluster = await running()
    told_otherwise(cluster, network_policy=False)
    cluster.store.writes.clear()
    await cluster.settle(3)
    assert await cluster.names("NetworkPolicy") == []
    assert cluster.store.writes == [("delete", "NetworkPolicy", "math")]
    cluster.restart()
    await cluster.settle(3)
    assert await cluster.names("NetworkPolicy") == ["math"]
    assert (await cluster.status())["attempt"] == 1


async def test_switched_off_somebody_elses_policy_of_that_name_is_left_alone():
    cluster = Cluster()
    told_otherwise(cluster, network_policy=False)
    await cluster.apply()
    theirs = {"kind": "NetworkPolicy", "metadata": {"name": "math", "namespace": "team"}, "spec": {"podSelector": {}}}
    await cluster.store.create(theirs)
    await cluster.settle()
    assert (await stored(cluster))["spec"] == {"podSelector": {}}
    assert (await cluster.condition("Running"))[:2] == ("True", "Stepping")


async def test_a_policy_that_is_refused_keeps_pods_away_and_is_named():
    cluster = Cluster()
    await cluster.apply()
    cluster.store.refuse["create", "NetworkPolicy"] = RLinfError("networkpolicies is forbidden")
    for _ in range(3):
        applied = await cluster.reconciler.pass_over(KEY)
    assert "NetworkPolicy math was refused by the API server" in applied.try_again
    assert "networkpolicies is forbidden" in (await cluster.condition("PodsReady"))[2]
    assert await cluster.names("Pod") == []


async def test_it_is_watched_by_its_metadata_and_its_deletion_wakes_its_job():
    seen: list[dict[str, object]] = []
    async with FakeApiServer() as server, asyncio.TaskGroup() as group:
        server.put(policy())
        store = CachedStore(server.client(), metrics=server.metrics, on_change=seen.append, inactivity_s=30.0)
        before = set(asyncio.all_tasks())
        store.start(group)
        watches = [t for t in set(asyncio.all_tasks()) - before if "watch of" in t.get_name()]
        await store.wait_listed(timeout_s=20)
        known = await store.get("NetworkPolicy", "math", namespace="team")
        assert known["metadata"]["annotations"] == policy()["metadata"]["annotations"]
        assert "spec" not in known
        assert server.count("GET", "/networkpolicies/math") == 0
        seen.clear()
        server.remove("NetworkPolicy", "math")
        async with asyncio.timeout(20):
            while not seen:
                await asyncio.sleep(0.01)
        assert key_of(seen[0]) == KEY
        for watch in watches:
            watch.cancel()
