"""A module of the user's own that does not import, at each seam where a manifest names one: one sentence, at once."""

import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest

from rlinf_api.errors import RetryableError, UserError
from rlinf_worker.flows import registry as flows
from rlinf_worker.roles import loading
from rlinf_worker.roles import registry as roles
from rlinf_worker.roles.env.environment import Environment, EnvironmentConfig, import_environment

SEAMS = {
    "flow": (lambda name: flows.load(f"{name}:flow"), "flow 'theirs:flow' cannot be imported"),
    "flow config": (lambda name: flows.check_config(f"{name}:flow", {}), "flow 'theirs:flow' cannot be imported"),
    "role": (lambda name: roles.make(f"{name}:Role"), "role kind 'theirs:Role' cannot be imported"),
    "environment": (
        lambda name: Environment(EnvironmentConfig(id=f"{name}:Reach-v0", num_envs=1)),
        "environment 'theirs:Reach-v0' names module 'theirs', which cannot be imported",
    ),
    "warm environment": (
        lambda name: import_environment(f"{name}:Reach-v0"),
        "environment 'theirs:Reach-v0' names module 'theirs', which cannot be imported",
    ),
}
BROKEN = {
    "def (": "SyntaxError: invalid syntax (theirs.py, line 1); correct it; its stack is in the log",
    "\n\ngym.register()": "NameError: name 'gym' is not defined ({}, line 3); correct it; its stack is in the log",
    "import sys\nsys.exit('no licence')": "SystemExit: no licence ({}, line 2); correct it",
    "from json import nothing": "ImportError: cannot import name 'nothing' from 'json'",
    "import no_such_module": "ModuleNotFoundError: No module named 'no_such_module' ({}, line 1); install",
}


@pytest.fixture
def theirs(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path / "theirs.py"
    sys.modules.pop("theirs", None)


@pytest.mark.parametrize("seam", SEAMS)
@pytest.mark.parametrize("text", BROKEN)
def test_a_module_that_does_not_import_is_a_sentence_with_its_place(theirs, seam, text):
    theirs.write_text(text)
    load, what = SEAMS[seam]
    with pytest.raises(UserError) as raised:
        load("theirs")
    assert str(raised.value).startswith(f"{what}: got {BROKEN[text].format(theirs)}")
    assert "; " in str(raised.value), "what to do next"
    assert raised.value.__cause__ is not None, "the stack belongs into the log"


@pytest.mark.parametrize("seam", SEAMS)
def test_a_disk_that_does_not_answer_is_tried_again(theirs, seam):
    theirs.write_text("raise OSError(5, 'Input/output error')")
    with pytest.raises(RetryableError, match=r"imported: got OSError: .*Input/output error.*; it is tried again"):
        SEAMS[seam][0]("theirs")


REACH = """
class Reach(gym.Env):
    observation_space = gym.spaces.Box(-1, 1, (2,))
    action_space = gym.spaces.Discrete(2)
    def __init__(self):
        {body}
"""


@pytest.fixture
def reach(theirs, monkeypatch):
    """An environment of a registered id whose class is in the user's own module; `write(body, top)` fills that."""
    spec = gym.envs.registration.EnvSpec(id="Reach-v0", entry_point="theirs:Reach")
    monkeypatch.setitem(gym.registry, "Reach-v0", spec)

    def write(body: str = "pass", top: str = "") -> EnvironmentConfig:
        theirs.write_text("import gymnasium as gym\n" + top + REACH.format(body=body))
        return EnvironmentConfig(id="Reach-v0", num_envs=2)

    return write


def test_the_module_of_an_environments_class_is_imported_as_any_other(reach):
    assert Environment(reach()).num_envs == 2
    sys.modules.pop("theirs")
    for load in (Environment, lambda config: import_environment(config.id)):
        with pytest.raises(UserError, match=r"'Reach-v0' is made by a module that cannot be imported: got NameError"):
            load(reach(top="register()"))
        with pytest.raises(RetryableError, match=r"imported: got OSError: .*Stale file handle.*; it is tried again"):
            load(reach(top="raise OSError(116, 'Stale file handle')"))


@pytest.mark.parametrize("body", ["raise OSError(5, 'Input/output error')", "raise MemoryError"])
def test_an_environment_that_the_machine_refuses_to_make_is_tried_again(reach, body):
    with pytest.raises(RetryableError, match=r"'Reach-v0' cannot be made: got .*Error.*; it is tried again"):
        Environment(reach(body))


@pytest.mark.parametrize("body", ["raise RuntimeError('no licence')", "raise SystemExit('no licence')"])
def test_an_environment_that_raises_as_it_is_made_is_a_sentence(reach, body):
    says = r"cannot be made: got \w+: no licence \(.*theirs.py, line 7\); check its arguments \({}\) and what its"
    with pytest.raises(UserError, match=says):
        Environment(reach(body))


def test_environments_that_were_made_before_one_failed_are_closed(reach):
    config = reach("Reach.made += 1; assert Reach.made < 2, 'one display'")
    make = "Reach.made, Reach.closed = 0, []\nReach.close = lambda self: Reach.closed.append(self)\n"
    module = Path(sys.path[0]) / "theirs.py"
    module.write_text(module.read_text() + make)
    with pytest.raises(UserError, match="got AssertionError: one display"):
        Environment(config)
    assert len(sys.modules["theirs"].Reach.closed) == 1


def test_a_role_that_raises_as_it_is_made_is_a_sentence(theirs, monkeypatch):
    theirs.write_text("class Role:\n    def __init__(self):\n        1 / 0\n    async def run(self, ctx): ...\n")
    with pytest.raises(UserError, match=r"'theirs:Role' cannot be made: got ZeroDivisionError: .*line 3\); correct"):
        roles.make("theirs:Role")


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("raise KeyError('lr')", r"'theirs:flow' raised: got KeyError: 'lr' \(.*theirs.py, line 2\); correct it"),
        ("return 5", r"raised: got TypeError"),
        ("from rlinf_api.errors import UserError; raise UserError('lr is missing')", "^lr is missing$"),
    ],
)
def test_a_flows_own_check_that_raises_is_a_problem_of_its_config(theirs, body, says):
    theirs.write_text(f"def check_config(config):\n    {body}\nasync def flow(flow): ...\n")
    with pytest.raises(UserError, match=says):
        flows.check_config("theirs:flow", {})


def test_what_a_module_of_ours_lacks_is_told_and_a_bug_in_it_stays_one(theirs, monkeypatch):
    monkeypatch.setitem(roles.KINDS, "own", "theirs:Role")
    theirs.write_text("import no_such_module")
    with pytest.raises(UserError, match=r"role kind 'own' cannot be imported: .*install what it needs in this pool's"):
        roles.make("own")
    theirs.write_text("1 / 0")
    with pytest.raises(ZeroDivisionError):
        roles.make("own")


def test_a_bug_in_the_check_of_a_flow_of_ours_stays_one(monkeypatch):
    def check(config: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr("rlinf_worker.flows.ppo.check_config", check)
    with pytest.raises(ZeroDivisionError):
        flows.check_config("ppo", {})


def test_an_error_without_a_text_is_named_by_its_class():
    assert loading.told(KeyError()) == "KeyError"
