"""Flows by name, ours and the user's own: what is loaded, what of a module is asked, and whose error it is."""

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from rlinf_api.errors import UserError
from rlinf_api.job import Problem, RLJobSpec
from rlinf_worker.flows import grpo, ppo, registry, synthetic
from rlinf_worker.roles.loading import LoadFailed

THEIRS = "their_flows:train"


@pytest.fixture
def theirs(monkeypatch):
    """A module of the user's, by what it defines."""

    def define(**names: Any) -> None:
        module = ModuleType("their_flows")
        vars(module).update({"train": print, **names})
        monkeypatch.setitem(sys.modules, "their_flows", module)

    define()
    return define


def spec(name: str = THEIRS, env: dict[str, Any] | None = None) -> RLJobSpec:
    role = {"name": "env", "kind": "synthetic", "config": {"time": {"perItemMs": 1}} if env is None else env}
    pools = [{"name": "cpu", "roles": ["env"], "slots": {"perPod": 1}}]
    flow = {"name": name, "config": {"a": 1}}
    return RLJobSpec.model_validate({"flow": flow, "roles": [role], "pools": pools})


def test_ours_are_loaded_by_name_and_the_users_by_module_and_function(theirs):
    loaded = [registry.load(name) for name in ("ppo", "grpo", "synthetic", THEIRS)]
    assert loaded == [ppo.ppo, grpo.grpo, synthetic.synthetic, print]


def test_a_name_that_is_neither_is_answered_with_what_there_is():
    with pytest.raises(UserError) as caught:
        registry.load("pppo")
    assert str(caught.value) == (
        "flow 'pppo' is not known: wanted one of ppo, grpo, synthetic or module:function; correct spec.flow.name"
    )


@pytest.mark.parametrize("names", [{"train": 3}, {"train": None}])
def test_what_is_no_function_is_no_flow(theirs, names):
    theirs(**names)
    with pytest.raises(UserError) as caught:
        registry.load(THEIRS)
    assert str(caught.value) == "flow 'their_flows:train': module their_flows has no function 'train'; " + (
        "correct spec.flow.name"
    )


def test_a_module_that_is_not_in_the_image_belongs_there():
    with pytest.raises(LoadFailed, match=r"flow 'no_such_flows:train' cannot be imported.*in the driver's image"):
        registry.load("no_such_flows:train")


def test_a_config_that_nobody_checks_is_taken_as_it_is_and_one_that_is_checked_as_it_comes_back(theirs):
    given = {"a": 1}
    taken = registry.check_config(THEIRS, given)
    assert (taken, taken is given) == ({"a": 1}, False)
    theirs(check_config=lambda config: [*config.items(), ("b", 2)])
    assert registry.check_config(THEIRS, given) == {"a": 1, "b": 2}


def test_a_check_of_the_users_that_raises_is_named(theirs):
    theirs(check_config=lambda config: config["b"])
    with pytest.raises(LoadFailed, match=r"check_config of flow 'their_flows:train' raised: got KeyError: 'b'"):
        registry.check_config(THEIRS, {})
    theirs(check_job=lambda spec: spec.no_such_field)
    with pytest.raises(LoadFailed, match=r"check_job of flow 'their_flows:train' raised: got AttributeError"):
        list(registry.check_job(spec()))


def needs(what: str):
    def check_config(config: Any) -> Any:
        raise ImportError(f"no {what}")

    return check_config


@pytest.mark.parametrize("check", ["check_config", "check_job"])
def test_what_a_check_of_the_users_lacks_belongs_in_the_drivers_image(theirs, check):
    theirs(**{check: needs("gym")})
    with pytest.raises(LoadFailed, match=r"ImportError: no gym.*; install what it needs in the driver's image"):
        (registry.check_config(THEIRS, {}) if check == "check_config" else list(registry.check_job(spec())))


def test_a_check_of_ours_that_raises_is_a_bug_and_not_the_users(monkeypatch):
    monkeypatch.setattr(ppo, "check_config", lambda config: config["b"])
    with pytest.raises(KeyError):
        registry.check_config("ppo", {})


def test_a_job_of_the_users_flow_is_checked_by_its_module_once_its_parts_are_right(theirs):
    problem = Problem(field="spec.flow.steps", message="are too few")
    asked = list[RLJobSpec]()

    def check_job(spec: RLJobSpec) -> Iterator[Problem]:
        asked.append(spec)
        yield problem

    theirs(check_job=check_job)
    job = spec()
    assert list(registry.check_job(job)) == [problem]
    assert asked == [job]
    wrong = list(registry.check_job(spec(env={})))
    assert [p.field for p in wrong] == ["spec.roles[env].config.time"]
    assert len(asked) == 1, "the whole is not asked about while a part is wrong"


def test_a_job_of_a_flow_that_checks_nothing_has_the_problems_of_its_roles_alone(theirs):
    assert list(registry.check_job(spec())) == []
    assert list(registry.check_job(spec(env={}))) == list(registry.check_roles(spec(env={}))) != []


def refuses(sentence: str):
    def check_config(config: Any) -> Any:
        raise UserError(sentence)

    return check_config


@pytest.mark.parametrize(
    ("said", "problems"),
    [
        ("spec.flow.config.a: is bad", [("spec.flow.config.a", "is bad")]),
        (
            "spec.flow.config.a: is bad; spec.flow.config.b: is worse",
            [("spec.flow.config.a", "is bad"), ("spec.flow.config.b", "is worse")],
        ),
        ("the weather is bad: go home", [("spec.flow.config", "the weather is bad: go home")]),
        ("is bad", [("spec.flow.config", "is bad")]),
    ],
)
def test_each_sentence_of_an_error_is_a_problem_of_the_field_that_it_begins_with(theirs, said, problems):
    theirs(check_config=refuses(said))
    assert [(p.field, p.message) for p in registry.check_job(spec())] == problems
