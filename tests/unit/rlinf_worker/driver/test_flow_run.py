"""A flow function in the driver: what it declares, what it is told where that cannot be, and how it ends."""

import asyncio
from typing import Any

import pytest

from rlinf_api import names
from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_api.conditions import Reason
from rlinf_api.errors import InvariantBroken, UserError
from rlinf_api.job import DataSpec, ModelSpec
from rlinf_api.names import WorkerId
from rlinf_api.report import DriverState, Failure
from rlinf_worker.channels.labels import LabelError
from rlinf_worker.channels.protocol import LineageKey
from rlinf_worker.driver import flow as driver_flow
from rlinf_worker.driver import main
from rlinf_worker.driver.flow import FlowRun, would_run
from rlinf_worker.driver.main import FlowTask
from rlinf_worker.driver.topology import CycleSpec, QueueSpec, Topology, WeightsSpec
from rlinf_worker.flows import registry
from rlinf_worker.flows.protocol import Step, Ticket
from rlinf_worker.roles.protocol import FlowSettings
from tests.builders_driver import Clock, make_job
from tests.fakes.driver_world import World

ROLES = {"env": 2, "rollout": 1, "actor": 3}


def new_driver() -> Any:
    return make_job(steps=3).driver(Clock())


def run(seen: list[Topology]) -> FlowRun:
    return FlowRun(new_driver(), roles=ROLES, on_declared=seen.append)


def test_what_a_flow_declares_is_the_topology_whole_and_in_its_order():
    seen = list[Topology]()
    flow = run(seen)
    flow.source("tickets", to="env", payload={"a": "int"})
    flow.cycle("acts", ask="env", answer="rollout", question={"q": "int"}, reply={"r": "float"}, anybody=True)
    flow.cycle("more", ask="rollout", answer="env")
    flow.queue("done", "env", "actor", rounds=True, payload={"d": "bytes"})
    flow.queue("also", "rollout", "actor", joins="done")
    flow.weights("actor", "rollout")
    assert seen == []
    flow.steps()
    [found] = seen
    texts = {text for q in found.queues if (text := q.payload)} | {found.cycles[0].question, found.cycles[0].answer}
    assert len(texts) == 4
    assert found == Topology(
        cycles=(
            CycleSpec(
                channel="acts", asker="env", answerer="rollout", question=found.cycles[0].question,
                answer=found.cycles[0].answer, anybody=True,
            ),
            CycleSpec(channel="more", asker="rollout", answerer="env"),
        ),
        queues=(
            QueueSpec(channel="tickets", producer="", consumer="env", rounds=False, payload=found.queues[0].payload),
            QueueSpec(
                channel="done", producer="env", consumer="actor", rounds=True, payload=found.queues[1].payload
            ),
            QueueSpec(channel="also", producer="rollout", consumer="actor", rounds=False, joins="done"),
        ),
        weights=(WeightsSpec(producer="actor", consumer="rollout"),),
    )  # fmt: skip
    for text, word in ((found.cycles[0].question, '"q"'), (found.cycles[0].answer, '"r"')):
        assert word in text
    assert ('"a"' in found.queues[0].payload, '"d"' in found.queues[1].payload) == (True, True)


def test_a_flow_is_told_its_settings_and_how_many_workers_a_role_has():
    flow, settings = run([]), new_driver().job.flow_settings
    assert (flow.name, flow.seed, flow.max_steps, flow.max_staleness) == ("ppo", settings.seed, 3, 0)
    assert flow.config == settings.config
    assert [flow.workers(role) for role in ROLES] == [2, 1, 3]


NO_ROLE = "flow 'ppo' needs role 'x': got roles env, rollout, actor; add a role named 'x' to spec.roles"


@pytest.mark.parametrize(
    ("declare", "says"),
    [
        (lambda f: f.workers("x"), NO_ROLE),
        (lambda f: f.source("n", to="x"), NO_ROLE),
        (lambda f: f.cycle("n", ask="x", answer="env"), NO_ROLE),
        (lambda f: f.cycle("n", ask="env", answer="x"), NO_ROLE),
        (lambda f: f.queue("n", "x", "env"), NO_ROLE),
        (lambda f: f.queue("n", "env", "x"), NO_ROLE),
        (lambda f: f.weights("x", "env"), NO_ROLE),
        (lambda f: f.weights("env", "x"), NO_ROLE),
        (
            lambda f: f.cycle("n", ask="env", answer="env"),
            "flow 'ppo': in cycle 'n' role 'env' asks itself: wanted two roles; let another role answer",
        ),
        (
            lambda f: f.queue("n", "env", "actor", joins="m"),
            "flow 'ppo': queue 'n' joins 'm', which is no queue of 'actor' before it: wanted one of none; "
            "declare the queue that it joins first",
        ),
        (
            lambda f: [f.queue("m", "env", "rollout"), f.queue("o", "env", "actor"),
                       f.queue("n", "env", "actor", joins="m")],
            "flow 'ppo': queue 'n' joins 'm', which is no queue of 'actor' before it: wanted one of o; "
            "declare the queue that it joins first",
        ),
        (
            lambda f: (f.queue("m", "env", "actor", rounds=True), f.queue("n", "env", "actor", rounds=True)),
            "flow 'ppo': queue 'n' cannot have rounds=True: got 'm', which brings 'actor' its rounds, wanted one such "
            "queue of each gang; declare 'n' with joins='m' alone",
        ),
        (
            lambda f: (f.queue("m", "env", "actor"), f.queue("n", "env", "actor", rounds=True, joins="m")),
            "flow 'ppo': queue 'n' cannot have rounds=True: got 'm', which brings 'actor' its rounds, wanted one such "
            "queue of each gang; declare 'n' with joins='m' alone",
        ),
        (
            lambda f: f.queue("n", "env", "actor", rounds=True, together=True),
            "flow 'ppo': queue 'n' has together=True and rounds=True: wanted a queue whose units go to whoever has "
            "room; leave it out, as a gang's ranks take each round together",
        ),
        (
            lambda f: (f.queue("m", "env", "actor"), f.queue("n", "env", "actor", joins="m", together=True)),
            "flow 'ppo': queue 'n' has together=True and joins=: wanted a queue whose units go to whoever has room; "
            "say it of 'm', whose units these follow",
        ),
        (
            lambda f: (f.source("n", to="env"), f.queue("n", "env", "actor")),
            "flow 'ppo' declares channel 'n' twice; give one another name",
        ),
        (
            lambda f: (f.weights("actor", "rollout"), f.weights("actor", "env")),
            "flow 'ppo' declares channel 'weights' twice; give one another name",
        ),
        (
            lambda f: (f.source("n", to="env"), f.steps()),
            "flow 'ppo' has no queue with rounds=True: wanted one, whose consumer ends the steps; "
            "declare it with flow.queue(..., rounds=True)",
        ),
    ],
)  # fmt: skip
def test_a_declaration_that_cannot_be_is_told_what_to_write(declare, says):
    seen = list[Topology]()
    with pytest.raises(UserError) as caught:
        declare(run(seen))
    assert (str(caught.value), seen) == (says, [])


def test_a_payload_that_is_no_type_is_told_with_its_channel():
    with pytest.raises(UserError, match=r"^flow 'ppo', channel 'n': "):
        run([]).source("n", to="env", payload={"a": "no such type"})


# --- whether it would run with other workers --------------------------------------------------------------------------
def declares(*queues: str) -> Any:
    async def flow(f: Any) -> None:
        for name in queues:
            f.queue(name, "env", "actor", rounds=name == queues[0])
        async for _ in f.steps():
            raise AssertionError("a dry run has no steps")

    return flow


def raises(error: Exception) -> Any:
    async def flow(f: Any) -> None:
        raise error

    return flow


async def hangs(f: Any) -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (declares("a"), ""),
        (declares("a", "b"), "flow 'ppo' declares other channels under it"),
        (raises(UserError("two envs at least")), "two envs at least"),
        (raises(KeyError("k")), "flow 'ppo' raised KeyError: 'k'"),
        (hangs, "flow 'ppo' did not declare its channels within 0.01 s"),
    ],
)
async def test_a_flow_is_asked_whether_it_runs_with_other_workers(monkeypatch, function, says):
    monkeypatch.setattr(driver_flow, "DECLARE_TIMEOUT_S", 0.01 if function is hangs else 5.0)
    driver = new_driver()
    assert await would_run(driver, declares("a", "b"), roles=ROLES) == "", "nothing is declared yet"
    queue = QueueSpec(channel="a", producer="env", consumer="actor", rounds=True)
    driver.job.topology = Topology(queues=(queue,))
    assert await would_run(driver, function, roles=ROLES) == says
    assert not driver.job.ended.is_set()


# --- the task ---------------------------------------------------------------------------------------------------------
async def ended(monkeypatch: pytest.MonkeyPatch, function: Any) -> Any:
    driver = new_driver()
    monkeypatch.setattr(registry, "load", lambda name: function)
    FlowTask(driver).start()
    async with asyncio.timeout(10):
        await driver.job.ended.wait()
    return driver.job


async def returns(f: Any) -> None: ...


EARLY = "flow 'ppo' returned before its end: got step 0 of 3; let `async for step in flow.steps()` run to its end"


@pytest.mark.parametrize(
    ("function", "reason", "because", "says"),
    [
        (returns, "UserError", "UserError", EARLY),
        (raises(UserError("no")), "UserError", "UserError", "no"),
        (raises(KeyError("k")), "UserError", "KeyError", "flow 'ppo' raised KeyError: 'k'"),
        (raises(InvariantBroken("b")), "InternalError", "InvariantBroken", str(InvariantBroken("b"))),
    ],
)
async def test_a_flow_that_ends_early_fails_the_job_and_says_whose_fault_it_is(
    monkeypatch, function, reason, because, says
):
    job = await ended(monkeypatch, function)
    assert (job.standing.state, job.standing.reason, job.standing.message) == (DriverState.FAILED, reason, says)
    assert job.failure == Failure(role="driver", reason=because, message=says)


async def test_a_flow_that_is_run_anew_is_cancelled_first(monkeypatch):
    driver, said = new_driver(), list[str]()

    async def flow(f: Any) -> None:
        said.append("begins")
        try:
            await asyncio.Event().wait()
        finally:
            said.append("ends")

    monkeypatch.setattr(registry, "load", lambda name: flow)
    task = FlowTask(driver)
    for _ in range(2):
        task.start()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert sorted(said) == ["begins", "begins", "ends"]
    assert not driver.job.ended.is_set(), "to be cancelled is no failure"
    monkeypatch.setattr(registry, "load", lambda name: returns)
    task.start()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert driver.job.standing.message == EARLY


# --- the exit code ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("end", "terminated", "code"),
    [
        (lambda job: job.finish(saved=True), True, 0),
        (lambda job: job.fail(Reason.USER_ERROR, "no"), True, 64),
        (lambda job: job.fail(Reason.INTERNAL_ERROR, "no"), True, 1),
        (lambda job: job.stop("newer", stale=True), True, names.EXIT_STALE),
        (lambda job: job.stop("over"), True, names.EXIT_TERMINATED),
        (lambda job: job.stop("over"), False, names.EXIT_RETRYABLE),
    ],
)
def test_a_driver_exits_with_what_became_of_its_job(end, terminated, code):
    driver = new_driver()
    end(driver.job)
    assert main._exit_code(driver, terminated=terminated) == code


@pytest.mark.parametrize("units", [0, -1, True, 1.5, "8"])
async def test_a_ticket_of_which_no_number_of_units_comes_is_refused(units):
    driver = new_driver()
    flow = FlowRun(driver, roles=ROLES, on_declared=lambda topology: driver.declare(topology))
    source = flow.source("tickets", to="env")
    flow.queue("done", "env", "actor", rounds=True)
    driver.switch.first(make_job(steps=3).plan, switches=0)
    flow.steps()
    step = Step(number=1, version=driver.open_step(1))
    with pytest.raises(LabelError) as refused:
        await source.put([Ticket(key=LineageKey("a"), units=units)], step=step)
    assert str(refused.value) == (
        f"ticket 'a' of channel 'tickets' cannot be put: got units={units!r}, wanted how many units come of it, from 1 "
        "on, or None; leave out a ticket of which nothing comes"
    )
    assert driver.job.ledger.get(1).tickets == {}
    await source.put([Ticket(key=LineageKey("a"), units=8), Ticket(key=LineageKey("b"), units=None)], step=step)
    assert driver.job.ledger.get(1).tickets == {"a": 8, "b": None}
    assert not driver.job.ledger.get(1).rare
    await source.put([Ticket(key=LineageKey("c")), Ticket(key=LineageKey("d"), rare=True)], step=step)
    await source.put([Ticket(key=LineageKey("e"))], step=step)
    assert driver.job.ledger.get(1).rare


async def test_a_flow_is_told_a_fact_as_soon_as_a_role_shares_it():
    world = World(make_job())
    await world.run_until(lambda: world.driver.job.begun)
    driver, flow = world.driver, FlowRun(world.driver, roles=ROLES, on_declared=lambda topology: None)
    waiting = asyncio.ensure_future(flow.shared("rows"))
    for name, value in (("other", "1"), ("rows", '{"count": 7}')):
        await asyncio.sleep(0)
        assert not waiting.done()
        driver.on_worker_message(WorkerId("env/0"), pb.WorkerMessage(fact=pb.Fact(name=name, json=value)))
    assert await asyncio.wait_for(waiting, 5) == {"count": 7}
    assert await flow.shared("rows") == {"count": 7}, "it stays"


def test_roles_are_told_where_model_and_data_are():
    model, data = ModelSpec(path="/m"), DataSpec(train="/t.jsonl", eval="/e.jsonl")
    settings = main.flow_settings(make_job().spec.model_copy(update={"model": model, "data": data}))
    assert (settings.model, settings.train_data, settings.eval_data) == ("/m", "/t.jsonl", "/e.jsonl")
    assert settings == FlowSettings.from_json(settings.to_json())
