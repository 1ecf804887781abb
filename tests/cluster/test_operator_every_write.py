"""The operator dies at each write of a job's life in turn, before the write reached the API server or when it was done
and nobody heard so; the next one goes on. The end is that of a job whom nobody disturbed.

`make chaos-operator` (CHAOS_OPERATOR=1) makes a life per write and way of dying; `make test-cluster` a sample of them
in one life. A write is any request of the operator in the job's namespace but a read: events and deletions too.
"""

import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rlinf_api import names
from tests.cluster.control_plane import ControlPlane, cartpole, condition
from tests.cluster.pods import make_namespace, remove_namespace
from tools.testcluster.apiproxy import ApiProxy, Rule, Script
from tools.testcluster.cluster import Cluster
from tools.testcluster.waiting import until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

STEPS = 2
"""Short: what is tried is the operator's part, the same for any number of steps."""
LIFE_S = 300
"""A life on an idle machine takes 6 s and an operator's death 2 s, most of it Python's imports. With all deaths of the
sample that is 18 s; fifteen times that on a busy one. A test may have two lives, the undisturbed one first."""
SETTLED_S = 60
"""A finished job's driver may stay for 30 s when nobody has heard its last word; the rest is its pod's deletion."""
SAMPLE: dict[int | str, str] = {
    "POST secrets": "after", "POST configmaps": "before", "PUT rljobs": "before", "POST pods": "after",
    "PATCH rlplans": "before", "DELETE pods": "after",
}  # fmt: skip
"""The first write of each kind, all in one life: each is made by another pass or part of a pass."""
CHAOS = bool(os.environ.get("CHAOS_OPERATOR"))


MOST = 24
"""More writes than a life has; the test says so when it has more."""


@dataclass(slots=True, kw_only=True)
class Deaths(Rule):
    """Kills the operator at given writes of one namespace, counted from 1 over all its lives."""

    at: dict[int | str, str]
    """To `before` or `after`: the number of a write, or its method and resource, which hold once."""
    seen: list[str] = field(default_factory=list)
    died_at: list[str] = field(default_factory=list)
    moment: str = ""

    def fits(self, *, method: str, path: str, watch: bool) -> bool:
        if not Rule.fits(self, method=method, path=path, watch=watch) or method in ("GET", "HEAD"):
            return False
        what = f"{method} {path.split('/namespaces/')[1].split('/')[1]}"
        self.seen.append(what)
        self.moment = self.at.pop(len(self.seen), "") or self.at.pop(what, "")
        return bool(self.moment)


def deaths(plane: ControlPlane, namespace: str, at: dict[int | str, str]) -> Deaths:
    def die() -> bool:
        plane.operator.kill()
        return True

    def before() -> bool:
        rule.died_at.append(rule.seen[-1])
        return rule.moment == "before" and die()

    script = Script(before=before, after=lambda status: die())
    rule = Deaths(path=f"/apis?/.*/namespaces/{namespace}/.*", do=script, at=dict(at))
    return rule


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    end: dict[str, Any]
    writes: int


@pytest.fixture(scope="module")
def proxy(cluster: Cluster) -> Iterator[ApiProxy]:
    with ApiProxy(cluster) as made:
        yield made


def control_plane(proxy: ApiProxy, folder: Path) -> ControlPlane:
    # Progress alone is written at times that no two lives share; conditions, counts and the end are written at once.
    return ControlPlane(proxy.cluster, folder, through=proxy.kubeconfig, progress_interval_s="3600")


@pytest.fixture
def plane(image: str, proxy: ApiProxy, undisturbed: Life, tmp_path: Path) -> Iterator[ControlPlane]:
    try:
        with control_plane(proxy, tmp_path) as made:
            yield made
    finally:
        proxy.clear()


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster, image: str, proxy: ApiProxy, tmp_path_factory: pytest.TempPathFactory) -> Life:
    """A life without deaths: how it ends, and after how many writes."""
    namespace = "undisturbed"
    make_namespace(cluster, namespace)
    claim = cluster.site_packages_volume(namespace, name="site-packages")
    try:
        with control_plane(proxy, tmp_path_factory.mktemp("undisturbed")) as plane:
            rule = deaths(plane, namespace, {})
            proxy.add(rule)
            live(plane, namespace, claim)
            until(lambda: is_over(plane, namespace), what="only the driver's pod to be left", timeout_s=SETTLED_S)
            print("\n".join(rule.seen))
            return Life(end=end_of(cluster, namespace), writes=len(rule.seen))
    finally:
        proxy.clear()
        cluster.api.delete(f"/api/v1/persistentvolumes/{namespace}-site-packages")
        remove_namespace(cluster, namespace)


def live(plane: ControlPlane, namespace: str, claim: str) -> None:
    """A job from apply to Complete; an operator that dies is started again at once."""
    plane.apply(namespace, cartpole(claim=claim, steps=STEPS))

    def complete() -> bool:
        if not plane.operator.running:
            plane.operator.start()
        return condition(plane.job(namespace, "cartpole"), "Complete") == "True"

    try:
        until(complete, what="Complete", timeout_s=LIFE_S, every_s=0.05)
    except Exception:
        print(plane.describe(namespace, "cartpole"))
        raise


def is_over(plane: ControlPlane, namespace: str) -> bool:
    if not plane.operator.running:  # it may die at a deletion too
        plane.operator.start()
    return [pod["status"]["phase"] for pod in plane.pods(namespace)] == ["Succeeded"]


def end_of(cluster: Cluster, namespace: str) -> dict[str, Any]:
    """Which objects are there, and what the job says of itself: all that is the same for each life."""
    kinds = "rlplans,pods,services,secrets,configmaps,networkpolicies"
    listed = cluster.kubectl("-n", namespace, "get", kinds, "-o", "name").split()
    job = cluster.api.get(f"/apis/rlinf.io/v1alpha1/namespaces/{namespace}/rljobs/cartpole")
    uid, status = str(job["metadata"]["uid"]), job["status"]
    fields = ("attempt", "restarts", "step", "policyVersion", "progressPercentage", "plan", "pools", "firstFailure")
    return {
        "objects": sorted(name.replace(uid[:8], "UID") for name in listed if "kube-root-ca" not in name),
        **{c["type"]: (c["status"], c["reason"]) for c in status["conditions"]},
        **{name: status.get(name) for name in fields},
    }


def made_pods(cluster: Cluster, namespace: str) -> Counter[str]:
    """Every pod that was ever made here, by the API server's own history, up to a mark that is set at its end."""
    mark = {"metadata": {"annotations": {"test.rlinf.io/mark": "end"}}}
    driver = f"/api/v1/namespaces/{namespace}/pods/cartpole-driver-a1"
    cluster.api.request("PATCH", driver, body=mark, kind="application/merge-patch+json")
    since = cluster.api.get(f"/api/v1/namespaces/{namespace}")["metadata"]["resourceVersion"]
    query = f"watch=true&resourceVersion={since}&timeoutSeconds=2"

    def history() -> list[dict[str, Any]]:
        lines = cluster.kubectl("get", "--raw", f"/api/v1/namespaces/{namespace}/pods?{query}").splitlines()
        events = [json.loads(line) for line in lines]
        assert not [event for event in events if event["type"] == "ERROR"], f"no history: {events}"
        marked = any("test.rlinf.io/mark" in json.dumps(event["object"]["metadata"]) for event in events)
        return events if marked else []

    events = until(history, what="the whole history of the pods", timeout_s=30)
    return Counter(event["object"]["metadata"]["name"] for event in events if event["type"] == "ADDED")


def lives() -> list[dict[int | str, str]]:
    if not CHAOS:
        return [dict(SAMPLE)]
    return [{number: moment} for number in range(1, MOST + 1) for moment in ("before", "after")]


def name_of(at: dict[int | str, str]) -> str:
    return "a sample" if len(at) > 1 else "-".join(f"{moment} {number}" for number, moment in at.items())


@pytest.mark.parametrize("at", lives(), ids=name_of)
def test_a_job_ends_the_same_though_the_operator_dies_at_a_write(
    cluster: Cluster, plane: ControlPlane, proxy: ApiProxy, undisturbed: Life, namespace: str, claim: str,
    at: dict[int | str, str],
):  # fmt: skip
    assert undisturbed.writes <= MOST, "raise MOST: a life has more writes by now"
    rule = deaths(plane, namespace, at)
    proxy.add(rule)
    began = time.monotonic()
    live(plane, namespace, claim)
    until(lambda: is_over(plane, namespace), what="only the driver's pod to be left", timeout_s=SETTLED_S)
    print(f"{time.monotonic() - began:.1f} s with deaths at {rule.died_at}; {len(rule.seen)} writes in all")
    # Of the last writes a life may have one more or less: two statuses in a row may be one.
    due = [what for what in at if isinstance(what, str) or what <= undisturbed.writes - 4]
    if "PATCH rlplans" not in rule.seen:  # the end was the first that was heard of the plan, and it dies as pods go
        due = [what for what in due if what != "PATCH rlplans"]
    assert len(rule.died_at) >= len(due)
    assert end_of(cluster, namespace) == undisturbed.end
    assert made_pods(cluster, namespace) == {"cartpole-driver-a1": 1, "cartpole-cpu-0-a1": 1}


def test_an_operator_that_dies_whenever_it_wrote_a_secret_gets_on(
    cluster: Cluster, plane: ControlPlane, proxy: ApiProxy, namespace: str, claim: str
):
    """It cannot read Secrets, so each life begins with writing them; what the one before wrote must count."""
    died: list[int] = []

    def die(status: int) -> bool:
        if status >= 300:  # it was there already: nothing was written
            return False
        died.append(status)
        plane.operator.kill()
        return True

    proxy.add(Rule(path=f"/api/v1/namespaces/{namespace}/secrets.*", do=Script(after=die)))
    live(plane, namespace, claim)
    print(f"{len(died)} deaths")
    secrets = cluster.kubectl("-n", namespace, "get", "secrets", "-l", f"{names.LABEL_JOB}=cartpole", "-o", "name")
    assert 1 <= len(died) <= len(secrets.split())
    assert plane.job(namespace, "cartpole")["status"]["attempt"] == 1
