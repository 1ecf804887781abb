"""Whatever a person writes where a value stands, the answer is sentences: damaged examples are checked, none raises."""

import copy
import datetime

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf_api import job as api
from rlinf_api import supported
from rljob import manifest
from tests.builders import ppo_job
from tools.gen_crds import ROOT

WHOLE = ppo_job(namespace="default").with_spec(
    seed=1,
    model={"path": "/m"},
    data={"train": "/t", "eval": "/e"},
    placement={"mode": "Pinned", "pin": "math-p1", "profileSteps": 3, "apply": "Auto"},
    objective="StepTime",
    minGainPerSlot=0.1,
    checkpoint={"uri": "/c", "everySteps": 2, "keep": 3},
    failurePolicy={"maxRestarts": 1, "resetAfterSeconds": 5, "rules": [{"role": "env", "exitCodes": [1]}]},
    allOrNothing={"timeoutSeconds": 5},
    suspend=False,
    ttlSecondsAfterFinished=1,
    activeDeadlineSeconds=1,
)
WHOLE.spec["flow"] |= {"steps": 3, "config": {"env": "CartPole-v1", "channels": {"weights": {"depth": 2}}}}
WHOLE.spec["roles"][1] |= {"spares": 1, "config": {"device": "cpu"}}
WHOLE.spec["pools"][0] |= {
    "pods": {"min": 1, "max": 2},
    "slots": {"perPod": 4, "cpu": "1", "memory": "2Gi"},
    "template": {"metadata": {"labels": {"a": "b"}}, "spec": {"containers": [{"name": "agent"}], "volumes": []}},
}
EXAMPLES = [yaml.safe_load(path.read_text(encoding="utf-8")) for path in sorted((ROOT / "examples").glob("*/*.yaml"))]
PLAIN = ppo_job(name="plain", namespace="default").with_spec(
    checkpoint={"uri": "/c", "everySteps": 2}, placement={"mode": "Disaggregated"}, failurePolicy={"maxRestarts": 3}
)
PLAIN.spec["flow"] |= {"config": {"env": "CartPole-v1", "slices": 16, "channels": {"weights": {"depth": 2}}}}
PLAIN.spec["roles"][0] |= {"workers": {"min": 1, "max": 8}, "spares": 1}
MANIFESTS = [*EXAMPLES, PLAIN.build(), WHOLE.build()]
"""All but the last are valid, so that each part of the check is reached."""


def places(value, path=()):
    """Every place below a value: the path to it. A circle has no end to its places."""
    if len(path) > 10:
        return
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in entries:
        yield (*path, key)
        yield from places(child, (*path, key))


def cyclic():
    found: dict[str, object] = {}
    found["again"] = found
    return found


COUNTS = st.sampled_from([-3, 0, 1, 2, 7, 64, 65, 1000, 100_000, 100_001, 200_000, 2**31, 2**63, 10**30])
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    COUNTS,
    st.floats(),
    st.sampled_from(
        [
            "",
            "0",
            "-1",
            "1e400",
            "1e99999999",
            "a b",
            "/a\0b",
            "s3://b",
            "x" * 5000,
            "module:name",
            "[1-2]",
            "2 GB",
            "é",
        ]
    ),
    st.text(max_size=5),
    st.sampled_from([datetime.date(2026, 1, 2), b"bytes", cyclic()]),
)
KEYS = st.one_of(st.text(max_size=5), st.sampled_from(["min", "max", "name", 1, None, True, datetime.date(2026, 1, 2)]))
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=5
)


def at(found, path):
    """The list or mapping that holds the place."""
    for key in path[:-1]:
        found = found[key]
    return found


@st.composite
def damaged(draw):
    """One of the manifests, with up to three places of it exchanged, removed, doubled, or with a key more."""
    found = copy.deepcopy(draw(st.sampled_from(MANIFESTS)))
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(list(places(found, ()))))
        node = at(found, path)
        how = draw(st.sampled_from(["exchange", "exchange", "exchange", "remove", "add"]))
        if how == "remove":
            del node[path[-1]]
        elif how == "exchange":
            node[path[-1]] = copy.deepcopy(draw(VALUES))
        elif isinstance(node, dict):
            node[draw(KEYS)] = copy.deepcopy(draw(VALUES))
        else:
            node.append(copy.deepcopy(draw(st.sampled_from(node))))
        if not found:
            break
    return found


def answered(found):
    checked = manifest.check(found)
    for problem in checked.problems:
        assert problem.field
        assert problem.message
    if checked.spec is not None and not checked.problems:
        again, problems = supported.validate({**found, "spec": api.dump(checked.spec)})
        assert (again, problems) == (checked.spec, []), "what is valid stays so on its way through the API server"


@pytest.mark.parametrize("original", MANIFESTS, ids=lambda m: m["metadata"]["name"])
def test_no_value_in_any_place_raises(original):
    wrong: tuple[object, ...] = (
        None,
        True,
        0,
        -3,
        200_000,
        2**63,
        1.5,
        float("inf"),
        "",
        "a b",
        "/a\0b",
        [],
        {},
        [None],
        {"name": 1},
        cyclic(),
    )
    for path in places(original):
        for value in wrong:
            found = copy.deepcopy(original)
            at(found, path)[path[-1]] = value
            answered(found)


@settings(max_examples=300)
@given(damaged())
def test_no_damage_to_a_manifest_raises_and_each_problem_is_a_sentence(found):
    answered(found)


@pytest.mark.parametrize("example", MANIFESTS[:-1], ids=lambda m: m["metadata"]["name"])
def test_the_others_are_valid_before_they_are_damaged(example):
    assert manifest.check(example).problems == ()
