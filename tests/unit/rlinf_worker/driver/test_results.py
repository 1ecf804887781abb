"""What roles tell the flow: once, in lineage order, kept by its maker until the step commits; and what a flow keeps."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_api.errors import UserError
from rlinf_api.names import WorkerId
from rlinf_worker.channels.protocol import LineageKey, PolicyVersion
from rlinf_worker.driver import results
from rlinf_worker.driver.flow import FlowRun
from rlinf_worker.driver.job import FlowWait
from rlinf_worker.driver.results import ResultsBook
from rlinf_worker.driver.steps import StepLedger
from rlinf_worker.driver.topology import QueueSpec
from rlinf_worker.flows.protocol import Result, Step, Ticket
from rlinf_worker.queues.units import Age
from tests.builders_driver import Clock, make_job

A, B = WorkerId("reward/0"), WorkerId("reward/1")
BEFORE = Age(0, 0)


def told(key: str, value: Any, *, step: int = 1, branch: int = 0, tickets: tuple[str, ...] = ()) -> pb.Unit:
    version = pb.PolicyVersion(branch=branch, number=step - 1)
    return pb.Unit(
        key=key, step=step, branch=branch, tickets=tickets, inline=json.dumps(value).encode(), version=version
    )


class Site:
    def __init__(self) -> None:
        self.said, self.failed = list[tuple[str, str, str]](), list[str]()
        self.ledger = StepLedger(steps=3, max_staleness=1, checkpoint_every=1)
        job: Any = SimpleNamespace(sessions=SimpleNamespace(tell=self._tell), fail=self._fail, ledger=self.ledger)
        self.book = ResultsBook(job, QueueSpec(channel="scores", producer="reward", consumer=""))

    def opens(self, number: int, *tickets: str) -> None:
        step = self.ledger.open(number, now=0.0)
        step.tickets.update(dict.fromkeys(tickets, 8))
        step.sealed = True

    def _tell(self, producer: str, *, can_wait: bool, **words: pb.Keys) -> None:
        [(kind, keys)] = words.items()
        assert can_wait, "nobody waits for these"
        assert keys.channel == "scores"
        self.said.extend((kind, producer, key) for key in keys.keys)

    def _fail(self, reason: str, message: str) -> None:
        assert reason == "UserError"
        self.failed.append(message)

    def take_said(self) -> Any:
        said, self.said = self.said, []
        return said


def test_results_are_held_at_once_told_in_lineage_order_and_released_with_their_step():
    site = Site()
    site.book.announced([told("p:10", {"r": 1}), told("p:9", {"r": 0.5})], producer=A, after=BEFORE)
    site.book.announced([told("p:1/7", 3, tickets=("p:1", "p:2"))], producer=B, after=BEFORE)
    assert site.take_said() == [("held", A, "p:10"), ("held", A, "p:9"), ("held", B, "p:1/7")]
    version = PolicyVersion(0, 0)
    assert site.book.of(Age(0, 1), ["p:10", "p:9", "p:2"]) == [
        Result(key=LineageKey("p:1/7"), tickets=(LineageKey("p:1"), LineageKey("p:2")), value=3, version=version),
        Result(key=LineageKey("p:9"), tickets=(LineageKey("p:9"),), value={"r": 0.5}, version=version),
        Result(key=LineageKey("p:10"), tickets=(LineageKey("p:10"),), value={"r": 1}, version=version),
    ]
    assert [result.key for result in site.book.of(Age(0, 1), ["p:9"])] == ["p:9"]
    assert site.book.of(Age(0, 2), ["p:9"]) == []
    site.book.announced([told("q:9", None, step=2)], producer=A, after=BEFORE)
    site.take_said()
    site.book.close(Age(0, 1))
    released = [("released", A, "p:10"), ("released", A, "p:9"), ("released", B, "p:1/7")]
    assert sorted(site.take_said()) == sorted(released)
    assert [result.value for result in site.book.of(Age(0, 2), ["q:9"])] == [None]


def test_the_first_of_a_key_counts_and_who_tells_it_again_may_free_it():
    site = Site()
    site.book.announced([told("p:1", "first")], producer=A, after=BEFORE)
    site.book.announced([told("p:1", "second")], producer=B, after=BEFORE)
    site.book.announced([told("p:1", "again, as its stream broke")], producer=A, after=BEFORE)
    assert site.take_said() == [("held", A, "p:1"), ("released", B, "p:1"), ("held", A, "p:1")]
    assert [result.value for result in site.book.of(Age(0, 1), ["p:1"])] == ["first"]
    site.book.announced([told("p:2", 0), told("p:1", 0, branch=1)], producer=B, after=Age(0, 1))
    assert site.take_said() == [("released", B, "p:2"), ("held", B, "p:1")], "of a step that is over, and of the next"


@pytest.mark.parametrize("first", ["the flow", "the result"])
def test_what_comes_of_no_ticket_of_its_step_is_the_users_error(first):
    """Nobody would ever ask for it."""
    site = Site()
    acts = [
        lambda: site.opens(1, "p:1"),
        lambda: site.book.announced([told("p:1/0", 0, tickets=("p:1",)), told("p:2", 0)], producer=A, after=BEFORE),
    ]
    for act in acts if first == "the flow" else reversed(acts):
        assert site.failed == []
        act()
    site.book.look_at(Age(0, 1))
    assert site.failed[0] == (
        "step 1 has no ticket for what worker reward/0 tells by 'scores': got key 'p:2', of ticket 'p:2', which is "
        "none of the step, wanted a value of something that came of a ticket; put it with parents=[...], or with the "
        "ticket's key"
    )


def test_what_a_driver_keeps_of_results_is_bounded_and_freed_with_their_steps(monkeypatch):
    monkeypatch.setattr(results, "MAX_KEPT_BYTES", 10)
    site = Site()
    site.book.announced([told("p:1", 1234), told("p:1", 5), told("p:2", 1234, step=2)], producer=A, after=BEFORE)
    site.book.announced([told("p:1", 1234)], producer=B, after=BEFORE)
    site.book.close(Age(0, 1))
    site.book.announced([told("p:3", 123456, step=2)], producer=A, after=BEFORE)
    assert site.failed == [], "10 bytes, of what counts and is open"
    site.book.announced([told("p:4", 0, step=2)], producer=A, after=BEFORE)
    assert site.failed == [
        "worker reward/0 tells the flow more by 'scores' than a driver keeps: got 11 bytes of open steps, wanted at "
        "most 10; tell what the flow decides by, and put the rest into a queue"
    ]


# --- a flow -----------------------------------------------------------------------------------------------------------
ROLES = {"env": 2, "rollout": 1, "actor": 1}


class Running:
    """A flow that has begun step 1 of a job whose workers are ready."""

    def __init__(self, *, state: Any = None) -> None:
        self.driver = make_job(steps=3).driver(Clock())
        self.driver.switch.first(make_job(steps=3).plan, switches=0)
        self.flow = FlowRun(self.driver, roles=ROLES, on_declared=lambda topology: self.driver.declare(topology))
        self.source = self.flow.source("tickets", to="env")
        self.scores = self.flow.results("scores", producer="env")
        self.flow.queue("done", "env", "actor", rounds=True)
        self.steps = self.flow.steps()
        self.driver.job.begun = True
        self.driver.job.ledger.flow_state = state or {}

    async def step(self) -> Step:
        return await anext(self.steps)


def test_results_of_whoever_ends_the_steps_come_too_late_for_all_of_them():
    flow = FlowRun(make_job(steps=3).driver(Clock()), roles=ROLES, on_declared=lambda topology: None)
    flow.source("tickets", to="env")
    flow.queue("done", "env", "actor", rounds=True)
    flow.results("losses", producer="actor")
    with pytest.raises(UserError, match="results 'losses' come of 'actor', which ends the steps: wanted a role before"):
        flow.steps()


async def test_a_flow_asks_for_results_of_tickets_that_it_has_put():
    running = Running()
    step = await running.step()
    await running.source.put([Ticket(key=LineageKey("a"))], step=step)
    with pytest.raises(UserError) as refused:
        await running.scores.of(step, [LineageKey("a"), LineageKey("b")])
    assert str(refused.value) == (
        "flow 'ppo' asks for results of what step 1 does not have: got 'b', wanted keys of tickets that were put for "
        "it; put the tickets first"
    )
    assert await running.scores.of(step, []) == []
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await running.scores.of(step)


async def test_a_ticket_that_a_flow_withdraws_is_through_and_its_others_are_not():
    running = Running()
    step = await running.step()
    keys = [LineageKey(key) for key in "abc"]
    await running.source.put([Ticket(key=key) for key in keys], step=step)
    with pytest.raises(UserError) as refused:
        running.source.withdraw([keys[0], LineageKey("d"), LineageKey("e")], step=step)
    assert str(refused.value) == (
        "flow 'ppo' withdraws what step 1 does not have: got 'd', 'e', wanted keys of tickets that were put for it; "
        "put the tickets first"
    )
    through = running.driver.exchange.through
    assert [through.has(Age(0, 1), key) for key in keys] == [False, False, False], "all of them or none"
    running.source.withdraw(keys[:2], step=step)
    assert [through.has(Age(0, 1), key) for key in keys] == [True, True, False]
    assert await running.scores.of(step, keys[:2]) == []
    asked = asyncio.ensure_future(running.scores.of(step, keys[2:]))
    await asyncio.sleep(0.05)
    assert not asked.done()
    told = running.driver.job.flow_waits
    assert (told.what, list(told.tickets)) == ("results of 1 tickets of step 1", ["c"])
    asked.cancel()
    await asyncio.wait([asked])
    assert running.driver.job.flow_waits == FlowWait()
    assert not running.driver.job.take_marks(), "it is settled"


async def test_what_a_flow_keeps_is_there_with_its_first_step_and_goes_with_each_commit():
    running = Running(state={"level": 2, "seen": [1]})
    assert running.flow.state == {}
    step = await running.step()
    assert running.flow.state == {"level": 2, "seen": [1]}
    await running.source.put([Ticket(key=LineageKey("a"))], step=step)
    running.flow.state["seen"].append(7)
    ledger = running.driver.job.ledger
    assert ledger.flow_state == {"level": 2, "seen": [1]}, "as long as the step does not count"
    waiting = asyncio.ensure_future(running.step())
    await asyncio.sleep(0)
    assert ledger.done(1, branch=0, gang="actor", rank=0, keys=["a"], metrics={})
    assert ledger.commit(1, worlds={"actor": 1}, now=0.0) is not None
    assert json.loads(ledger.state_json(seed=3)) == {
        "format": 1, "step": 1, "branch": 0, "seed": 3, "flow": {"level": 2, "seen": [1, 7]},
    }  # fmt: skip
    waiting.cancel()


@pytest.mark.parametrize(
    ("state", "got", "wanted"),
    [
        ({"a": {1}}, "set {1}", "what JSON can write, without NaN"),
        ({"a": float("nan")}, "Out of range float values are not JSON compliant", "what JSON can write, without NaN"),
        ({"a": (1, 2)}, '{"a":[1,2]}', "a dict with names as keys, and no tuples"),
        ({3: 1}, '{"3":1}', "a dict with names as keys, and no tuples"),
        ({"a": "x" * 65_536}, "65544 bytes", "at most 65536"),
    ],
)  # fmt: skip
async def test_a_state_that_no_checkpoint_can_have_is_refused(state, got, wanted):
    running = Running()
    step = await running.step()
    await running.source.put([Ticket(key=LineageKey("a"))], step=step)
    running.flow.state.update(state)
    with pytest.raises(UserError) as refused:
        await running.step()
    assert str(refused.value).startswith("flow 'ppo' keeps a state that no checkpoint can have: got ")
    assert got in str(refused.value)
    assert f"wanted {wanted}; keep plain values, and few" in str(refused.value)


def test_a_gang_that_goes_back_brings_the_flows_state_back_and_a_new_driver_hears_it():
    ledger = StepLedger(steps=9, max_staleness=0, checkpoint_every=2)
    kept = '{"format": 1, "step": 4, "branch": 0, "seed": 0, "flow": {"level": 4}}'
    assert ledger.adopt(PolicyVersion(0, 4), state_json=kept)
    assert ledger.flow_state == {"level": 4}
    assert not ledger.adopt(PolicyVersion(0, 3), state_json="{}")
    assert ledger.flow_state == {"level": 4}, "no news"
    ledger.rewind(PolicyVersion(0, 2), state_json=kept.replace("4}}", "2}}"))
    assert ledger.flow_state == {"level": 2}
    ledger.rewind(PolicyVersion(0, 0))
    assert ledger.flow_state == {}, "from the beginning"
