"""The local store refuses the edits of an RLJob that the API server refuses, with its sentences."""

import re

import pytest

from rlinf_api.store import Invalid
from rljob.local.store import MemoryStore

ENV = {"name": "env", "kind": "gymnasium"}
CPU = {"name": "cpu", "roles": ["env"]}
SPEC = {"seed": 1, "flow": {"name": "ppo", "steps": 3}, "roles": [ENV], "pools": [CPU]}


def job():
    return {"kind": "RLJob", "metadata": {"name": "a", "namespace": "default"}, "spec": SPEC}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"seed": 2}, "spec.seed cannot change"),
        ({"flow": {"name": "mine:flow"}}, "spec.flow.name cannot change"),
        ({"roles": [{"name": "env", "kind": "mine:Env"}]}, "roles and their kinds cannot change"),
        ({"roles": [ENV, {"name": "two", "kind": "torch"}]}, "roles and their kinds cannot change"),
    ],
)
async def test_such_an_edit_is_refused(change, sentence):
    store = MemoryStore()
    await store.create(job())
    with pytest.raises(Invalid, match=f"^RLJob default/a: .*{sentence}"):
        await store.patch("RLJob", "a", patch={"spec": change})
    assert (await store.get("RLJob", "a"))["spec"] == SPEC


HELD = [
    ({"flow": {"config": {"env": "X"}}}, "spec.flow.config"),
    ({"flow": {"maxStaleness": 2}}, "spec.flow.maxStaleness"),
    ({"checkpoint": {"uri": "/c"}}, "spec.checkpoint.uri"),
    ({"model": {"path": "/m"}}, "spec.model"),
    ({"data": {"train": "/d"}}, "spec.data"),
    ({"roles": [ENV | {"config": {"a": 1}}]}, "spec.roles[*].config"),
    ({"roles": [ENV | {"slotsPerWorker": 2}]}, "spec.roles[*].slotsPerWorker"),
    ({"pools": [CPU, {"name": "two", "roles": ["env"]}]}, "spec.pools: which pools there are"),
    ({"pools": [CPU | {"name": "two"}]}, "spec.pools: which pools there are"),
    ({"pools": [CPU | {"slots": {"perPod": 2}}]}, "spec.pools[*].slots"),
    ({"placement": {"topology": {"preferred": "rack"}}}, "spec.placement.topology"),
    ({"pools": [CPU | {"topology": {"spread": "rack"}}]}, "spec.pools[*].topology"),
    ({"pools": [CPU | {"template": {"spec": {"priorityClassName": "high"}}}]}, "spec.pools[*].template.spec"),
]


@pytest.mark.parametrize(("change", "field"), HELD, ids=[field for _, field in HELD])
async def test_what_pods_are_made_from_may_change_only_while_there_are_none(change, field):
    store = MemoryStore()
    await store.create(job())
    await store.patch("RLJob", "a", patch={"status": {"attempt": 1, "state": "Running"}}, subresource="status")
    with pytest.raises(Invalid, match=re.escape(f"{field} cannot change while the job is at work")) as refused:
        await store.patch("RLJob", "a", patch={"spec": change})
    assert "set spec.suspend to true, change it, and set spec.suspend to false again" in str(refused.value)
    await store.patch("RLJob", "a", patch={"spec": {**change, "suspend": True}})
    await store.patch("RLJob", "a", patch={"spec": SPEC | {"suspend": False}})


@pytest.mark.parametrize(("change", "field"), HELD, ids=[field for _, field in HELD])
@pytest.mark.parametrize(
    "status", [{}, {"attempt": 1, "state": "Starting"}, {"attempt": 3, "state": "Queued"}], ids=str
)
async def test_a_job_that_has_not_begun_its_steps_may_be_repaired(change, field, status):
    store = MemoryStore()
    await store.create(job())
    before = await store.patch("RLJob", "a", patch={"status": status}, subresource="status")
    after = await store.patch("RLJob", "a", patch={"spec": change})
    assert after["spec"] != before["spec"]


@pytest.mark.parametrize(
    "change",
    [
        {"pools": [CPU | {"pods": {"min": 1, "max": 3}}]},
        {"pools": [CPU | {"template": {"metadata": {"labels": {"team": "a"}}}}]},
        {"roles": [ENV | {"workers": 3, "spares": 1}]},
        {"checkpoint": {"everySteps": 1, "keep": 1}},
        {"placement": {"mode": "Collocated"}},
        {"failurePolicy": {"maxRestarts": 1}, "ttlSecondsAfterFinished": 1, "activeDeadlineSeconds": 9},
    ],
    ids=str,
)
async def test_what_goes_on_in_place_may_change_while_it_runs(change):
    store = MemoryStore()
    await store.create(job())
    at_work = {"attempt": 1, "state": "Running"}
    before = await store.patch("RLJob", "a", patch={"status": at_work}, subresource="status")
    after = await store.patch("RLJob", "a", patch={"spec": change})
    assert after["spec"] != before["spec"]


async def test_anything_else_may_change():
    store = MemoryStore()
    await store.create(job())
    changed = await store.patch("RLJob", "a", patch={"spec": {"flow": {"name": "ppo", "steps": 9}, "suspend": True}})
    assert (changed["spec"]["suspend"], changed["spec"]["flow"]["steps"]) == (True, 9)
