"""Flow ppo: what of its config is wrong in sentences, which channels it declares, which tickets a step needs."""

import math
from typing import Any

import pytest

from rlinf_api.errors import InvalidManifest, UserError
from rlinf_api.plan import ChannelPlan
from rlinf_worker.channels import lineage
from rlinf_worker.channels.labels import LabelError
from rlinf_worker.channels.payload_type import PayloadMismatch
from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.driver.channel_specs import channel_specs
from rlinf_worker.driver.flow import FlowRun
from rlinf_worker.driver.topology import Topology
from rlinf_worker.flows import registry
from rlinf_worker.flows.ppo import ChannelConfig, check_config, ppo
from rlinf_worker.flows.protocol import Step, Ticket
from tests.builders_driver import Clock, make_job
from tests.fakes.driver_world import World
from tests.fakes.flow import FakeFlow


def fake(*, env_workers: int = 2, **config: Any) -> FakeFlow:
    checked = check_config({"env": "CartPole-v1", **config})
    return FakeFlow(checked, workers=lambda role: env_workers if role == "env" else 1)


async def test_it_declares_the_cycle_the_trajectories_and_the_weights():
    flow = fake()
    await ppo(flow)
    assert flow.declared == [
        ("source", "segments", "env"),
        ("cycle", "actions", "env", "rollout"),
        ("queue", "trajectories", "env", "actor", {"rounds": True}),
        ("weights", "actor", "rollout"),
    ]
    assert all(flow.payloads.values()), "each says what it carries"


async def test_a_step_needs_one_segment_of_every_slice_where_the_slice_lives():
    flow = fake(numEnvs=12, slices=3)
    await ppo(flow)
    assert sorted(flow.put_at) == [1, 2]
    assert [(t.key, dict(t.payload), t.affinity) for t in flow.put_at[2]] == [
        ("env:0@2", {"slice": 0}, 0),
        ("env:1@2", {"slice": 1}, 1),
        ("env:2@2", {"slice": 2}, 2),
    ]


async def test_more_env_workers_than_slices_is_said_with_both_remedies():
    with pytest.raises(UserError, match=r"4 env workers share 2 slices.*at least 4 slices; raise .* or lower"):
        await ppo(fake(env_workers=4))


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"horizn": 3}, "spec.flow.config.horizn: is not a field; did you mean 'horizon'?"),
        ({"numEnvs": 10, "slices": 3}, "slices 3 does not divide numEnvs 10; write a divisor"),
        ({"gamma": 1.5}, "spec.flow.config.gamma: got 1.5, wanted at most 1"),
        ({"numEnvs": "8x"}, "spec.flow.config.numEnvs: got '8x'"),
        ({"activation": "gelu"}, "wanted 'tanh' or 'relu'"),
        ({"hiddenSizes": [64, 0]}, "spec.flow.config.hiddenSizes[1]: got 0, wanted at least 1"),
        ({"env": ""}, "spec.flow.config.env"),
    ],
)
def test_a_wrong_config_is_answered_by_a_sentence_that_names_the_field(config, says):
    with pytest.raises(InvalidManifest) as caught:
        check_config({"env": "CartPole-v1", **config})
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_problem_has_its_own_sentence():
    with pytest.raises(InvalidManifest) as caught:
        check_config({"env": "CartPole-v1", "gamma": 2, "epochs": 0})
    assert str(caught.value).count("spec.flow.config.") == 2


def test_defaults_are_filled_in_and_both_spellings_are_read():
    config = check_config({"env": "CartPole-v1", "num_envs": 8, "gaeLambda": 0.9})
    assert (config["num_envs"], config["gae_lambda"], config["horizon"], config["order"]) == (8, 0.9, 32, "arrival")


def test_a_channel_may_be_sized_as_a_plan_may_size_it():
    for name, field in ChannelConfig.model_fields.items():
        assert field.metadata == ChannelPlan.model_fields[name].metadata, name
    with pytest.raises(InvalidManifest, match=r"config.channels.weights.depth: got 2000000, wanted at most 1000000"):
        check_config({"env": "CartPole-v1", "channels": {"weights": {"depth": 2_000_000}}})


# --- the registry ---------------------------------------------------------------------------------------------------
def test_a_flow_is_found_by_its_name_or_by_module_and_function():
    assert registry.load("ppo") is registry.load("rlinf_worker.flows.ppo:ppo") is ppo
    assert registry.check_config("json:loads", {"anything": 1}) == {"anything": 1}, "a flow without a schema"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("pp0", "flow 'pp0' is not known: wanted one of ppo.*module:function; correct spec.flow.name"),
        ("no_such_module:flow", "cannot be imported.*No module named 'no_such_module'.*the driver's image"),
        ("json:no_such_function", "module json has no function 'no_such_function'"),
        ("json:__name__", "module json has no function '__name__'"),
    ],
)
def test_a_flow_that_cannot_be_loaded_says_why(name, says):
    with pytest.raises(UserError, match=says):
        registry.load(name)


# --- the driver's half ----------------------------------------------------------------------------------------------
def flow_run(seen: list[Topology]) -> FlowRun:
    return FlowRun(make_job().driver(Clock()), roles={"env": 2, "rollout": 1, "actor": 1}, on_declared=seen.append)


async def test_the_drivers_flow_declares_ppos_topology():
    seen: list[Topology] = []
    run = flow_run(seen)
    task = ppo(run)
    while not seen:  # to its first wait
        task.send(None)
    task.close()
    (topology,) = seen
    assert topology.names() == {"segments", "actions", "trajectories", "weights"}
    assert [gang.channel for gang in topology.gangs] == ["trajectories"]
    assert [(w.producer, w.consumer) for w in topology.weights] == [("actor", "rollout")]
    assert [(c.asker, c.answerer, c.anybody) for c in topology.cycles] == [("env", "rollout", False)]


def test_a_flow_that_needs_a_role_the_job_lacks_or_names_a_channel_twice_is_told():
    run = flow_run([])
    with pytest.raises(UserError, match=r"flow 'ppo' needs role 'critic'.*add a role named 'critic' to spec.roles"):
        run.cycle("values", ask="actor", answer="critic")
    with pytest.raises(UserError, match="in cycle 'values' role 'actor' asks itself"):
        run.cycle("values", ask="actor", answer="actor")
    run.cycle("actions", ask="env", answer="rollout")
    with pytest.raises(UserError, match="declares channel 'actions' twice"):
        run.queue("actions", "env", "actor")
    with pytest.raises(UserError, match="has no queue with rounds=True"):
        run.steps()
    run.queue("trajectories", "env", "actor", rounds=True)
    with pytest.raises(UserError, match="queue 'values' cannot have rounds=True: got 'trajectories', which"):
        run.queue("values", "env", "actor", rounds=True)
    run.queue("values", "env", "actor", joins="trajectories")


def test_a_declaration_of_payloads_goes_to_the_workers_as_it_is_and_a_wrong_one_names_flow_and_channel():
    job = make_job()
    driver = job.driver(Clock())
    driver.switch.first(job.plan, switches=1)
    run = FlowRun(driver, roles={"env": 2, "rollout": 1, "actor": 1}, on_declared=driver.declare)
    run.cycle("actions", ask="env", answer="rollout", question={"obs": "float32[n, ...]"}, reply="int")
    run.queue("trajectories", "env", "actor", rounds=True, payload="bytes")
    run.queue("rest", "env", "actor")
    run.steps()
    assert {spec.name: (spec.payload, spec.answers) for spec in channel_specs(driver.job)} == {
        "actions": ('{"obs":"float32[n, ...]"}', '"int"'), "trajectories": ('"bytes"', ""), "rest": ("", ""),
    }  # fmt: skip
    with pytest.raises(UserError, match=r"flow 'ppo', channel 'more': the payload of a channel .* got 'flaot'"):
        flow_run([]).cycle("more", ask="env", answer="rollout", reply="flaot")


async def test_a_ticket_that_is_not_what_the_flow_declares_is_refused_with_all_of_its_call_and_counted():
    world = World(make_job(steps=2))
    await world.run()
    exchange = world.driver.exchange
    assert exchange is not None
    run = FlowRun(world.driver, roles={"env": 2, "rollout": 1, "actor": 1}, on_declared=lambda topology: None)
    segments = run.source("segments", to="env", payload={"slice": "int"})
    before = {name: len(queue.core.book.entries) for name, queue in exchange.queues.items()}
    tickets = [Ticket(key=lineage.segment(n, step=2), payload={"slice": slice}) for n, slice in enumerate((0, "1"))]
    with pytest.raises(PayloadMismatch, match=r"channel 'segments'.*payload\['slice'\]: got str '1', wanted int"):
        await segments.put(tickets, step=Step(number=2, version=PolicyVersion(0, 1)))
    light = [Ticket(key=lineage.segment(0, step=2), payload={"slice": 0}, weight=math.nan)]
    with pytest.raises(LabelError, match=r"the weight of item .* of channel 'segments' cannot be sent: got float nan"):
        await segments.put(light, step=Step(number=2, version=PolicyVersion(0, 1)))
    assert exchange.queues["segments"].core.counts["refused"] == 2
    assert {name: len(queue.core.book.entries) for name, queue in exchange.queues.items()} == before
