"""What becomes of a scenario that breaks: it is that one's failure, and those beside it go on."""

import asyncio
import contextlib

import psutil

from tests.conformance import conftest, world
from tests.conformance.scenario import Scenario


class Broken:
    """No world comes up, each for its own reason."""

    name, at_once = "broken", 2

    @contextlib.asynccontextmanager
    async def world(self, folder):
        await asyncio.sleep(0)
        if folder.name == "odd":
            raise KeyError("spec")
        await asyncio.sleep(0.05)
        raise AssertionError("no pod came")
        yield


def scenario(name, *, alone=False):
    return Scenario(name=name, jobs=(), expected={}, until=lambda state: True, alone=alone)


def test_what_breaks_in_one_scenario_is_told_by_it_and_ends_no_other(tmp_path):
    chosen = [scenario("odd"), scenario("plain"), scenario("last", alone=True)]
    outcomes = conftest._run(Broken(), chosen, tmp_path)
    assert {name: outcome.error for name, outcome in outcomes.items()} == {
        "odd": "KeyError: 'spec'",
        "plain": "AssertionError: no pod came",
        "last": "AssertionError: no pod came",
    }
    story = outcomes["odd"].story()
    assert story.startswith("KeyError: 'spec' after")
    assert 'raise KeyError("spec")' in story, "where, as nobody had thought of it"


def test_a_process_that_ended_before_it_was_killed_is_looked_for_again(monkeypatch):
    class Gone:
        def kill(self):
            raise psutil.NoSuchProcess(1)

    found = [None, Gone()]
    monkeypatch.setattr(world, "_process", lambda uid, part: found.pop(0))
    assert not world._kill("u", "env/0")
    assert not world._kill("u", "env/0")
    assert found == []
