"""The env and the rollout role against each other in one event loop, over channels in memory."""

import asyncio
import weakref
from collections.abc import AsyncIterator
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from rlinf_api.errors import UserError
from rlinf_worker.algorithms import sampling
from rlinf_worker.algorithms.policies import ActorCritic
from rlinf_worker.algorithms.policy_spec import Actions, NumpyPolicy, PolicySpec
from rlinf_worker.channels.protocol import Item, PolicyVersion
from rlinf_worker.roles.env.environment import EnvironmentFailed
from rlinf_worker.roles.env.role import GymnasiumRole
from rlinf_worker.roles.rollout.role import TorchPolicyRole
from rlinf_worker.sums import Amount
from tests.builders_policies import weights_of
from tests.fakes.context import FakeContext, Stage

HORIZON, ENVS = 12, 3
SPEC = PolicySpec(obs_shape=(4,), actions=Actions("discrete", 2), hidden_sizes=(8,))
WEIGHTS = weights_of(ActorCritic(SPEC, seed=0))


class Explodes(gym.Env[Any, Any]):
    """Raises in its third step."""

    observation_space = gym.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gym.spaces.Discrete(2)
    steps = 0

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return np.zeros(4, np.float32), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        if self.steps == 3:
            raise ValueError("the simulator has no floor")
        return np.zeros(4, np.float32), 1.0, False, False, {}


class Running:
    """Both roles as tasks; `env` may fail."""

    def __init__(self, **config: Any) -> None:
        defaults: dict[str, Any] = {"numEnvs": 2 * ENVS, "slices": 2, "horizon": HORIZON, "hiddenSizes": [8]}
        self.stage = Stage(**{**defaults, **config})
        self.env_context, self.rollout_context = self.stage.context("env"), self.stage.context("rollout")
        self.tasks = [
            asyncio.ensure_future(GymnasiumRole().run(self.env_context)),
            asyncio.ensure_future(TorchPolicyRole().run(self.rollout_context)),
        ]

    @property
    def env(self) -> "asyncio.Future[None]":
        return self.tasks[0]

    def ticket(self, index: int, *, step: int = 1, branch: int = 0) -> Item:
        version = PolicyVersion(branch, step - 1)
        key = f"env:{index}@{step}"
        return self.stage.channel("segments").give(key, {"slice": index}, step=step, branch=branch, version=version)

    async def trajectory(self) -> Item:
        async with asyncio.timeout(20):
            taking = asyncio.ensure_future(self.stage.channel("trajectories").take())
            both: list[asyncio.Future[Any]] = [taking, self.env]
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if not taking.done():
                taking.cancel()
                self.env.result()
            return await taking

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(10):
            while not condition():
                await asyncio.sleep(0.001)


@pytest.fixture
async def running() -> AsyncIterator[Running]:
    running = Running()
    yield running
    for task in running.tasks:
        task.cancel()
    await asyncio.wait(running.tasks, timeout=5)


def replay(index: int, *, step: int = 1, seed: int = 3) -> dict[str, np.ndarray[Any, Any]]:
    """The same segment by the plainest loop over Gymnasium's own environments."""
    policy = NumpyPolicy(SPEC, WEIGHTS)
    seeds = sampling.environment_seeds(seed, slice_index=index, step=step, num_envs=ENVS)
    noise = sampling.uniform_block(seed, slice_index=index, step=step, horizon=HORIZON, num_envs=ENVS)
    envs = [gym.make("CartPole-v1") for _ in range(ENVS)]
    obs = np.stack([env.reset(seed=s)[0] for env, s in zip(envs, seeds, strict=True)])
    rows: dict[str, list[Any]] = {"obs": [], "action": [], "logprob": [], "reward": [], "terminated": []}
    for t in range(HORIZON):
        action, logprob = sampling.discrete_actions(policy(obs), noise[t])
        rows["obs"].append(obs.copy())
        rows["action"].append(action)
        rows["logprob"].append(logprob)
        out = [env.step(int(a)) for env, a in zip(envs, action, strict=True)]
        rows["reward"].append([o[1] for o in out])
        rows["terminated"].append([o[2] for o in out])
        obs = np.stack([env.reset()[0] if o[2] or o[3] else o[0] for env, o in zip(envs, out, strict=True)])
    return {**{name: np.array(values) for name, values in rows.items()}, "last_obs": obs}


async def test_a_trajectory_is_what_the_plainest_loop_would_have_seen(running):
    running.stage.weights.show(PolicyVersion(0, 0), WEIGHTS)
    tickets = [running.ticket(0), running.ticket(1)]
    made = {item.key: item for item in [await running.trajectory(), await running.trajectory()]}
    await running.until(lambda: len(running.stage.channel("segments").acked) == 2)
    assert {item.key for item in running.stage.channel("segments").acked} == made.keys(), "nothing more comes of them"
    for index, ticket in enumerate(tickets):
        item = made[ticket.key]
        assert (item.step, item.branch, item.weight) == (1, 0, float(HORIZON * ENVS))
        assert running.stage.channel("trajectories").parents[item.key] == [ticket]
        expected = replay(index)
        for name, values in expected.items():
            np.testing.assert_allclose(item.payload[name], values, rtol=1e-5, atol=1e-6, err_msg=name)
        assert item.payload["obs"].shape == (HORIZON, ENVS, 4)
    cycle = running.stage.cycle("actions")
    assert len(cycle.questions.all) == len(cycle.answers.all) == 2 * HORIZON


async def test_each_says_how_much_it_works_on(running):
    """A profile fits its times by it."""
    running.stage.weights.show(PolicyVersion(0, 0), WEIGHTS)
    running.ticket(0)
    await running.trajectory()
    for context in (running.env_context, running.rollout_context):
        worked = [amount for kind, amount in context.worked if kind == "compute"]
        assert worked == [Amount(units=1, tokens=ENVS)] * HORIZON


async def test_each_says_of_which_step_its_work_is(running):
    """What is of none is in no step's times: a load of weights would be time that nobody took."""
    running.stage.weights.show(PolicyVersion(0, 1), WEIGHTS)
    running.ticket(0, step=2)
    await running.trajectory()
    assert set(running.env_context.steps) == {("other", 2), ("compute", 2)}
    assert set(running.rollout_context.steps) == {("load", 2), ("compute", 2)}


async def test_the_next_segment_goes_on_where_the_last_ended(running):
    running.stage.weights.show(PolicyVersion(0, 0), WEIGHTS)
    running.ticket(0)
    first = await running.trajectory()
    running.stage.weights.show(PolicyVersion(0, 1), WEIGHTS)
    running.ticket(0, step=2)
    second = await running.trajectory()
    np.testing.assert_array_equal(second.payload["obs"][0], first.payload["last_obs"])
    assert (first.version, second.version) == (PolicyVersion(0, 0), PolicyVersion(0, 1))


async def test_of_each_slice_the_noise_of_two_steps_is_kept(running, monkeypatch):
    draw, drawn = sampling.uniform_block, dict[tuple[int, int], weakref.ref[Any]]()

    def uniform_block(seed, **key):
        block = draw(seed, **key)
        assert (key["slice_index"], key["step"]) not in drawn, "it is drawn once"
        drawn[key["slice_index"], key["step"]] = weakref.ref(block)
        return block

    monkeypatch.setattr(sampling, "uniform_block", uniform_block)
    for step in (1, 2, 3):
        running.stage.weights.show(PolicyVersion(0, step - 1), WEIGHTS)
        for index in (0, 1):
            running.ticket(index, step=step)
            await running.trajectory()
    assert {key for key, block in drawn.items() if block() is not None} == {(0, 2), (1, 2), (0, 3), (1, 3)}


async def test_no_question_is_answered_with_weights_that_are_too_old(running):
    running.stage.weights.show(PolicyVersion(0, 0), WEIGHTS)
    running.ticket(0, step=2)
    await running.until(lambda: running.stage.cycle("actions").questions.all)
    await asyncio.sleep(0.05)
    assert running.stage.cycle("actions").answers.all == []
    running.stage.weights.show(PolicyVersion(0, 1), WEIGHTS)
    assert (await running.trajectory()).version == PolicyVersion(0, 1)


async def test_a_cancelled_ticket_is_dropped_and_its_slice_goes_on_with_the_next(running):
    dead = running.ticket(0, step=5)  # its weights never come
    await running.until(lambda: running.stage.cycle("actions").questions.all)
    dead.cancelled = True
    running.ticket(0, step=1, branch=1)
    running.stage.weights.show(PolicyVersion(1, 0), WEIGHTS)
    item = await running.trajectory()
    assert (item.branch, item.key) == (1, "env:0@1")
    assert running.stage.channel("segments").dropped == [(dead, "cancelled")]


async def test_a_ticket_that_is_cancelled_while_another_is_in_work_makes_room_for_the_next(running):
    tickets = [running.ticket(0), running.ticket(0, step=2), running.ticket(0, step=3)]
    await running.until(lambda: running.stage.cycle("actions").questions.all)
    tickets[1].cancelled = True
    running.stage.weights.show(PolicyVersion(0, 2), WEIGHTS)
    assert [(await running.trajectory()).key for _ in range(2)] == ["env:0@1", "env:0@3"]
    assert running.stage.channel("segments").dropped == [(tickets[1], "cancelled")]


async def test_an_answer_of_a_segment_that_was_given_up_is_left_out(running):
    running.stage.weights.show(PolicyVersion(0, 0), WEIGHTS)
    running.ticket(0)
    answers = running.stage.cycle("actions").answers
    await running.until(lambda: len(answers.all) >= 2)
    wrong = {"action": np.zeros(ENVS, np.int64) + 1, "logprob": np.zeros(ENVS, np.float32)}
    answers.give(answers.all[0].key, wrong)
    item = await running.trajectory()
    np.testing.assert_allclose(item.payload["action"], replay(0)["action"])


async def test_a_segment_whose_question_nobody_answers_is_given_up_and_its_slice_goes_on():
    stage = Stage(numEnvs=ENVS, slices=1, horizon=2, hiddenSizes=[8])
    env = asyncio.ensure_future(GymnasiumRole().run(stage.context("env")))
    actions, segments = stage.cycle("actions"), stage.channel("segments")
    first, _ = (segments.give(f"env:0@{step}", {"slice": 0}, step=step) for step in (1, 2))
    async with asyncio.timeout(20):
        actions.answering.drop(await actions.questions.take(), "too hard")
        for _ in range(2):
            question = await actions.questions.take()
            answer = {"action": np.zeros(ENVS, np.int64), "logprob": np.zeros(ENVS, np.float32)}
            actions.answering.answer(question, answer)
        assert (await stage.channel("trajectories").take()).key == "env:0@2"
    assert segments.dropped == [(first, "unanswered")]
    env.cancel()
    await asyncio.gather(env, return_exceptions=True)


@pytest.mark.filterwarnings("ignore:Overriding environment")
async def test_an_environment_that_raises_ends_the_role_with_the_environments_own_words():
    gym.register("Explodes-v0", entry_point=lambda **_: Explodes())
    running = Running(env="Explodes-v0")
    running.stage.weights.show(PolicyVersion(0, 0), WEIGHTS)
    running.ticket(0)
    running.ticket(1)
    with pytest.raises(EnvironmentFailed, match=r"'Explodes-v0' raised in step.*ValueError: the simulator has no"):
        await running.trajectory()
    for task in running.tasks:
        task.cancel()


async def test_an_environment_that_does_not_exist_is_the_users_to_correct():
    stage = Stage(env="CartPoll-v1")
    with pytest.raises(UserError, match=r"environment 'CartPoll-v1' does not exist.*CartPole-v1"):
        await GymnasiumRole().run(FakeContext(stage, "env", {}))


@pytest.mark.filterwarnings("ignore:Overriding environment")
async def test_environments_are_made_and_first_reset_within_the_deadline_of_loading():
    """A simulator may take minutes to come up, and a hang in either is found by that deadline."""
    seen: list[tuple[str, list[str]]] = []

    class Slow(Explodes):
        def __init__(self) -> None:
            seen.append(("made", context.phases[-1:]))

        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            seen.append(("reset", context.phases[-1:]))
            return super().reset(seed=seed, options=options)

    gym.register("Slow-v0", entry_point=lambda **_: Slow())
    stage = Stage(env="Slow-v0", numEnvs=4, slices=2, horizon=HORIZON, hiddenSizes=[8])
    context = stage.context("env")
    role = asyncio.ensure_future(GymnasiumRole().run(context))
    for index in (0, 1):
        stage.channel("segments").give(f"env:{index}@1", {"slice": index}, step=1, version=PolicyVersion(0, 0))
    async with asyncio.timeout(10):
        while len(seen) < 8:
            await asyncio.sleep(0.001)
    role.cancel()
    await asyncio.wait([role])
    assert seen == [*[("made", ["load"])] * 2, *[("reset", ["load"])] * 2] * 2
    assert context.phases[-1] == "step"


async def test_both_end_in_good_order_when_their_inputs_end(running):
    running.stage.weights.show(PolicyVersion(0, 0), WEIGHTS)
    running.ticket(0)
    await running.trajectory()
    running.stage.channel("segments").end()
    running.stage.cycle("actions").questions.end()
    done, _ = await asyncio.wait(running.tasks, timeout=10)
    assert [task.exception() for task in done] == [None, None]


@pytest.mark.parametrize(("stages", "most"), [(0, 4), (1, 1), (2, 2)])
async def test_so_many_slices_are_in_flight_as_the_cycle_has_stages(stages, most):
    """Of the env alone: its questions wait for answers that the test gives."""
    stage = Stage(numEnvs=8, slices=4, horizon=2, hiddenSizes=[8])
    context = stage.context("env")
    context.in_flight = stages
    env = asyncio.ensure_future(GymnasiumRole().run(context))
    for index in range(4):
        version = PolicyVersion(0, 0)
        stage.channel("segments").give(f"env:{index}@1", {"slice": index}, step=1, version=version)
    questions, trajectories = stage.cycle("actions").questions, stage.channel("trajectories")
    open_questions: list[Item] = []
    async with asyncio.timeout(20):
        while len(trajectories.all) < 4:
            while len(open_questions) < most and len(questions.all) < 8:
                open_questions.append(await questions.take())
            for _ in range(20):
                await asyncio.sleep(0)
            assert questions.items.empty(), "no further question before an answer"
            question = open_questions.pop(0)
            answer = {"action": np.zeros(2, np.int64), "logprob": np.zeros(2, np.float32)}
            stage.cycle("actions").answers.give(question.key, answer, step=1, version=PolicyVersion(0, 0))
            for _ in range(20):
                await asyncio.sleep(0)
            while not questions.items.empty() and len(open_questions) < most:
                open_questions.append(await questions.take())
    context.stopping.set()
    env.cancel()
    await asyncio.gather(env, return_exceptions=True)
