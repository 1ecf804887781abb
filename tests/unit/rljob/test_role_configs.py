"""spec.roles[].config against the schema of its kind, whichever flow the role is in."""

import copy
import re

import pytest
import yaml

from rlinf_worker.roles import registry
from rljob import manifest
from tests.rljob_runs import EXAMPLE

JOB = yaml.safe_load(EXAMPLE.read_text())
KIND_OF = {"env": "gymnasium", "rollout": "torch", "actor": "fsdp"}
OWN = "mine.flows:train"


def problems(role, config, *, flow="ppo"):
    job = copy.deepcopy(JOB)
    job["spec"]["flow"]["name"] = flow
    next(r for r in job["spec"]["roles"] if r["name"] == role)["config"] = config
    return list(map(str, manifest.check(job).problems))


def test_every_kind_has_a_schema():
    assert registry.SCHEMAS.keys() == registry.KINDS.keys()


@pytest.mark.parametrize("kind", registry.KINDS)
def test_no_kind_takes_a_field_that_it_does_not_know(kind):
    with pytest.raises(Exception, match=r"spec.roles\[x\].config.nonsense: is not a field"):
        registry.check_config(kind, {"nonsense": 1}, field="spec.roles[x].config")


@pytest.mark.parametrize("flow", ["ppo", OWN])
@pytest.mark.parametrize(
    ("role", "config", "sentence"),
    [
        ("env", {"numEnvs": 3}, "config.numEnvs: is not a field; remove it. Known here: nothing"),
        ("rollout", {"device": "gpu"}, "config.device: got 'gpu', wanted cpu, cuda or cuda:N; write cuda for .*"),
        ("rollout", {"device": "tpu"}, "config.device: got 'tpu', wanted cpu, cuda or cuda:N; write cuda for .*"),
        ("rollout", {"device": 0}, 'config.device: got 0, wanted text; write it in quotes: "0"'),
        ("rollout", {"devise": "cuda"}, "config.devise: is not a field; did you mean 'device'\\? Known here: device"),
        ("actor", {"weightDelta": True}, "config.weightDelta: is not a field; did you mean 'weightsDelta'\\? .*"),
        ("actor", {"weightsDelta": "yes"}, "config.weightsDelta: got 'yes', wanted true or false; write that"),
        (
            "actor",
            {"precision": "bfloat16"},
            "config.precision: is not a field; remove it. Known here: memory, weightsDelta",
        ),
    ],
)
def test_a_wrong_config_is_one_sentence(role, config, sentence, flow):
    [found] = problems(role, config, flow=flow)
    assert re.fullmatch(rf"spec.roles\[{role}\].{sentence}", found), found


@pytest.mark.parametrize("flow", ["ppo", OWN])
@pytest.mark.parametrize(
    ("role", "config"),
    [
        ("env", {}),
        ("rollout", {}),
        ("rollout", {"device": "cpu"}),
        ("rollout", {"device": "cuda"}),
        ("rollout", {"device": "cuda:1"}),
        ("actor", {}),
        ("actor", {"weightsDelta": True}),
    ],
)
def test_what_a_kind_reads_is_let_through(role, config, flow):
    assert problems(role, config, flow=flow) == []
