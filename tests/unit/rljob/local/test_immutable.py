"""The local store refuses the edits of an RLJob that the API server refuses, with its sentences."""

from typing import Any

import pytest

from rlinf_api.job import RLJobSpec
from rlinf_api.store import Invalid
from rljob.local.immutable import READERS, admit_rljob

SPEC = {"seed": 1, "flow": {"name": "ppo", "steps": 3}, "roles": [{"name": "env", "kind": "gymnasium"}]}


def job(**spec):
    return {"kind": "RLJob", "metadata": {"name": "a", "namespace": "default"}, "spec": SPEC | spec}


def test_every_rule_about_the_old_spec_is_known_here_and_no_other():
    extra: Any = RLJobSpec.model_config["json_schema_extra"]
    rules = extra["x-kubernetes-validations"]
    assert set(READERS) == {rule["message"] for rule in rules if "oldSelf" in rule["rule"]}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"seed": 2}, "spec.seed cannot change"),
        ({"flow": {"name": "mine:flow"}}, "spec.flow.name cannot change"),
        ({"roles": [{"name": "env", "kind": "mine:Env"}]}, "roles and their kinds cannot change"),
        ({"roles": []}, "roles and their kinds cannot change"),
    ],
)
def test_such_an_edit_is_refused(change, sentence):
    with pytest.raises(Invalid, match=sentence):
        admit_rljob(job(**change), job())


def test_anything_else_may_change_and_a_new_job_may_be_anything():
    assert admit_rljob(job(flow={"name": "ppo", "steps": 9}, suspend=True), job())["spec"]["suspend"]
    assert admit_rljob(job(seed=5), None)["spec"]["seed"] == 5
