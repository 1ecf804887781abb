"""The local store refuses the edits of an RLJob that the API server refuses, with its sentences."""

from typing import Any

import pytest

from rlinf_api.job import RLJobSpec
from rlinf_api.store import Invalid
from rljob.local.store import FIXED, MemoryStore

SPEC = {"seed": 1, "flow": {"name": "ppo", "steps": 3}, "roles": [{"name": "env", "kind": "gymnasium"}]}


def job():
    return {"kind": "RLJob", "metadata": {"name": "a", "namespace": "default"}, "spec": SPEC}


def test_every_rule_about_the_old_spec_is_known_here_and_no_other():
    extra: Any = RLJobSpec.model_config["json_schema_extra"]
    rules = extra["x-kubernetes-validations"]
    assert set(FIXED) == {rule["message"] for rule in rules if "oldSelf" in rule["rule"]}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"seed": 2}, "spec.seed cannot change"),
        ({"flow": {"name": "mine:flow"}}, "spec.flow.name cannot change"),
        ({"roles": [{"name": "env", "kind": "mine:Env"}]}, "roles and their kinds cannot change"),
        ({"roles": []}, "roles and their kinds cannot change"),
    ],
)
async def test_such_an_edit_is_refused(change, sentence):
    store = MemoryStore()
    await store.create(job())
    with pytest.raises(Invalid, match=f"^RLJob default/a: .*{sentence}"):
        await store.patch("RLJob", "a", patch={"spec": change})
    assert (await store.get("RLJob", "a"))["spec"] == SPEC


async def test_anything_else_may_change():
    store = MemoryStore()
    await store.create(job())
    changed = await store.patch("RLJob", "a", patch={"spec": {"flow": {"name": "ppo", "steps": 9}, "suspend": True}})
    assert (changed["spec"]["suspend"], changed["spec"]["flow"]["steps"]) == (True, 9)
