"""Flow ppo: what of its config is wrong in sentences, which channels it declares, which tickets a step needs."""

from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest

from rlinf_api.errors import InvalidManifest, UserError
from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.driver.flow import FlowRun, Topology
from rlinf_worker.flows import registry
from rlinf_worker.flows.ppo import check_config, ppo
from rlinf_worker.flows.protocol import Step, Ticket
from tests.builders_driver import Clock, make_job


class FakeFlow:
    """Records what the flow declares and puts; has two steps."""

    name, seed, max_steps, max_staleness = "ppo", 0, 2, 0

    def __init__(self, *, env_workers: int = 2, **config: Any) -> None:
        self.config: Mapping[str, Any] = check_config({"env": "CartPole-v1", **config})
        self._env_workers = env_workers
        self.declared: list[tuple[Any, ...]] = []
        self.put_at: dict[int, list[Ticket]] = {}

    def workers(self, role: str) -> int:
        return {"env": self._env_workers}.get(role, 1)

    def source(self, name: str, *, to: str) -> "FakeFlow":
        self.declared.append(("source", name, to))
        return self

    async def put(self, tickets: Any, *, step: Step) -> None:
        self.put_at[step.number] = list(tickets)

    def stream(self, name: str, producer: str, consumer: str) -> None:
        self.declared.append(("stream", name, producer, consumer))

    def queue(self, name: str, producer: str, consumer: str, *, rounds: bool = False, joins: str = "") -> None:
        self.declared.append(("queue", name, producer, consumer, rounds))

    def weights(self, producer: str, consumer: str) -> None:
        self.declared.append(("weights", producer, consumer))

    async def steps(self) -> AsyncIterator[Step]:
        for number in (1, 2):
            yield Step(number=number, version=PolicyVersion(0, number - 1))


async def test_it_declares_the_cycle_the_trajectories_and_the_weights():
    flow = FakeFlow()
    await ppo(flow)
    assert flow.declared == [
        ("source", "segments", "env"),
        ("stream", "observations", "env", "rollout"),
        ("stream", "actions", "rollout", "env"),
        ("queue", "trajectories", "env", "actor", True),
        ("weights", "actor", "rollout"),
    ]


async def test_a_step_needs_one_segment_of_every_slice_where_the_slice_lives():
    flow = FakeFlow(numEnvs=12, slices=3)
    await ppo(flow)
    assert sorted(flow.put_at) == [1, 2]
    assert [(t.key, dict(t.payload), t.affinity) for t in flow.put_at[2]] == [
        ("env:0@2", {"slice": 0}, 0),
        ("env:1@2", {"slice": 1}, 1),
        ("env:2@2", {"slice": 2}, 2),
    ]


async def test_more_env_workers_than_slices_is_said_with_both_remedies():
    with pytest.raises(UserError, match=r"4 env workers share 2 slices.*at least 4 slices; raise .* or lower"):
        await ppo(FakeFlow(env_workers=4))


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
    assert topology.names() == {"segments", "observations", "actions", "trajectories", "weights"}
    assert topology.committing is not None
    assert topology.committing.channel == "trajectories"
    assert [s.channel for s in topology.streams if s.first_rank_only] == ["weights"]


def test_a_flow_that_needs_a_role_the_job_lacks_or_names_a_channel_twice_is_told():
    run = flow_run([])
    with pytest.raises(UserError, match=r"flow 'ppo' needs role 'critic'.*add a role named 'critic' to spec.roles"):
        run.stream("values", "critic", "actor")
    run.stream("observations", "env", "rollout")
    with pytest.raises(UserError, match="declares channel 'observations' twice"):
        run.queue("observations", "env", "actor")
    with pytest.raises(UserError, match="has no queue with rounds=True"):
        run.steps()
