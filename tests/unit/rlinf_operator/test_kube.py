"""Calls to the API server: what its refusals are called, what is tried again, and within which time."""

import time

import pytest

from rlinf_api.errors import ClusterBusy, RLinfError
from rlinf_operator.clients import kube

LABELS = {"rlinf.io/job": "math"}


def pod(name="a", **meta):
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "team", "labels": LABELS, **meta},
    }


async def refused(call) -> RLinfError:
    with pytest.raises(RLinfError) as caught:
        await call
    return caught.value


async def test_refusals_are_told_apart_by_reason(server):
    api = server.client()
    made = await api.create(pod())
    assert (await refused(api.create(pod()))).reason == "AlreadyExists"
    assert (await refused(api.get("Pod", "b", namespace="team"))).reason == "NotFound"
    stale = {**made, "metadata": {**made["metadata"], "resourceVersion": "1"}}
    assert (await refused(api.replace(stale))).reason == "Conflict"
    assert (await refused(api.delete("Pod", "a", namespace="team", uid="other"))).reason == "Conflict"
    for status, reason in ((403, "Forbidden"), (422, "Invalid"), (410, "Expired")):
        server.fault(status=status, method="POST")
        assert (await refused(api.create(pod("c")))).reason == reason


async def test_a_refusal_says_what_was_asked_and_what_the_server_said(server):
    server.fault(status=403, method="POST", reason="Forbidden")
    error = await refused(server.client().create(pod()))
    assert "create of Pod team/a" in str(error)
    assert "403 Forbidden scripted 403" in str(error)


async def test_429_is_tried_again_after_the_pause_that_it_asks_for(server):
    server.fault(status=429, times=2, method="POST", headers={"Retry-After": "0"})
    await server.client().create(pod())
    assert server.count("POST", "/pods") == 3


async def test_a_pause_longer_than_the_deadline_is_not_waited_for(server):
    server.fault(status=429, times=100, headers={"Retry-After": "30"})
    started = time.monotonic()
    error = await refused(server.client(timeout_s=1).get("Pod", "a", namespace="team"))
    assert isinstance(error, ClusterBusy)
    assert error.delay_s == 30
    assert time.monotonic() - started < 20, "the pause was waited for"
    assert server.count("GET", "/pods/a") == 1


async def test_a_storm_of_500_ends_within_the_deadline(server):
    server.fault(status=500, times=1000)
    started = time.monotonic()
    assert isinstance(await refused(server.client(timeout_s=1).get("Pod", "a", namespace="team")), ClusterBusy)
    assert time.monotonic() - started < 20
    assert 1 <= server.count("GET", "/pods/a") <= 6


async def test_a_create_whose_answer_was_lost_is_found_to_be_taken(server):
    """The caller then compares the owner: doing it twice is the same as once."""
    server.fault(status=500, method="POST", after=True)
    assert (await refused(server.client().create(pod()))).reason == "AlreadyExists"


async def test_a_create_under_a_generated_name_is_never_done_twice(server):
    server.fault(status=500, method="POST", after=True)
    event = {"kind": "Event", "metadata": {"generateName": "math.", "namespace": "team"}}
    assert isinstance(await refused(server.client().create(event)), ClusterBusy)
    assert server.count("POST", "/events") == 1


async def test_an_api_server_that_hangs_is_left_at_the_deadline(server):
    server.fault(status=500, delay_s=30, method="GET")
    started = time.monotonic()
    error = await refused(server.client(timeout_s=0.5).get("Pod", "a", namespace="team"))
    assert "no answer" in str(error)
    assert time.monotonic() - started < 20


async def test_a_list_of_many_pages_is_whole(server):
    for number in range(1201):
        server.put(pod(f"p-{number:04}"), silently=True)
    pages = server.client(timeout_s=10).pages("Pod", label_selector="rlinf.io/job")
    items = [item async for page in pages for item in page.items]
    assert len(items) == 1201
    assert {item["kind"] for item in items} == {"Pod"}
    assert server.count("GET", "/pods") == 13


async def test_calls_are_counted_by_verb_kind_and_code(server):
    api = server.client()
    await api.create(pod())
    await refused(api.get("Pod", "b", namespace="team"))
    count = server.metrics.registry.get_sample_value
    found = "rlinf_operator_api_calls_total"
    assert count(found, {"verb": "create", "kind": "Pod", "code": "201"}) == 1
    assert count(found, {"verb": "get", "kind": "Pod", "code": "404"}) == 1


async def test_no_refusal_shows_what_was_sent(server):
    server.fault(status=422, method="POST")
    secret = {"kind": "Secret", "metadata": {"name": "s", "namespace": "team"}, "data": {"tls.key": "c2VjcmV0"}}
    assert "c2VjcmV0" not in str(await refused(server.client().create(secret)))


def test_a_name_cannot_leave_its_path():
    assert kube.path_of("Pod", namespace="a/../b", name="c?d") == "/api/v1/namespaces/a%2F..%2Fb/pods/c%3Fd"


async def test_a_watch_that_is_left_is_cut_and_not_closed_in_good_order(server, monkeypatch):
    """A farewell by TLS outlives the loop that would read the answer to it."""
    api, seen = server.client(), []
    send = api._send

    async def sending(ask):
        response = await send(ask)
        seen.append(response.connection.transport)
        monkeypatch.setattr(seen[0], "abort", lambda: seen.append("cut"))
        return response

    monkeypatch.setattr(api, "_send", sending)
    async with api.open_watch("Pod", resource_version="0", server_timeout_s=60, namespace="team"):
        pass
    assert seen[1:] == ["cut"]
