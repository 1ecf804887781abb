"""Synthetic roles between channels in memory: what is taken, handed on, acknowledged, dropped, loaded and offloaded."""

import asyncio
import contextlib
import itertools
import json
import time
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest

from rlinf_api.slots import Allotment
from rlinf_worker.channels.protocol import PolicyVersion, Round
from rlinf_worker.roles.protocol import FlowSettings, Memory
from rlinf_worker.roles.synthetic import cycle
from rlinf_worker.roles.synthetic import desk as desk_module
from rlinf_worker.roles.synthetic.desk import Courier, Desk, figures_of
from rlinf_worker.roles.synthetic.role import Committing, SyntheticRole
from tests.fakes.context import Stage

TIME = {"time": {"perItemMs": 0.0}}
EDGES = [
    {"from": "rollout", "to": "reward"},
    {"from": "reward", "to": "train"},
    {"from": "train", "to": "rollout", "weights": True, "syncMs": 1.0},
]


def stage_of(**config):
    made = Stage()
    settings = {"workload": "w", "edges": EDGES, **config}
    made.flow = FlowSettings(name="synthetic", steps=3, seed=1, max_staleness=0, order="arrival", config=settings)
    return made


@contextlib.asynccontextmanager
async def running(*contexts):
    roles = [SyntheticRole() for _ in contexts]
    tasks = [asyncio.ensure_future(role.run(context)) for role, context in zip(roles, contexts, strict=True)]
    try:
        async with asyncio.timeout(30):
            yield roles
            for context in contexts:
                context.stopping.set()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=5)
    for task in tasks:
        assert task.cancelled() or task.exception() is None, task.exception()


async def until(condition):
    while not condition():
        await asyncio.sleep(0.001)


def keys(items):
    return [item.key for item in items]


def filled(channel, monkeypatch):
    """(set when somebody wants to put something into it, to be set when it has room)."""
    asked, room, put = asyncio.Event(), asyncio.Event(), channel.put

    async def put_when_it_has_room(*args, **named):
        asked.set()
        await room.wait()
        await put(*args, **named)

    monkeypatch.setattr(channel, "put", put_when_it_has_room)
    return asked, room


@pytest.mark.parametrize("service", [{}, {"service": "concurrent", "lanes": 2}])
async def test_each_unit_is_handed_on_and_acknowledged_and_a_cancelled_one_is_dropped(service):
    stage = stage_of()
    units, done = stage.channel("rollout-reward"), stage.channel("reward-train")
    for n in range(3):
        units.give(f"w:1/{n}", {}, step=1, version=PolicyVersion(0, 4))
    units.give("w:1/gone", {}, step=1, cancelled=True)
    units.give("w:2/0", {}, step=2, branch=1)
    async with running(stage.context("reward", **TIME, payloadBytes=17, **service)):
        await until(lambda: len(units.acked) == 4 and units.dropped)
    assert sorted(keys(units.acked)) == sorted(keys(done.all)) == ["w:1/0", "w:1/1", "w:1/2", "w:2/0"]
    assert [(item.key, why) for item, why in units.dropped] == [("w:1/gone", "cancelled")]
    assert {len(item.payload["bytes"]) for item in done.all} == {17}
    assert sorted((item.step, item.branch, item.version) for item in done.all) == [(1, 0, PolicyVersion(0, 4))] * 3 + [
        (2, 1, PolicyVersion(0, 0))
    ]
    assert keys(done.parents["w:1/0"]) == ["w:1/0"]


async def test_slots_are_not_given_away_over_units_that_are_not_handed_on(monkeypatch):
    stage = stage_of()
    context, units, points = stage.context("reward", **TIME), stage.channel("rollout-reward"), list[list[str]]()
    asked, room = filled(stage.channel("reward-train"), monkeypatch)

    async def safe_point():
        points.append(keys(units.acked))

    monkeypatch.setattr(context, "safe_point", safe_point)
    units.give("w:1/0", {}, step=1)
    async with running(context):
        await asked.wait()
        for _ in range(20):
            await asyncio.sleep(0)
        assert points == []
        room.set()
        await until(lambda: points)
    assert points == [["w:1/0"]]


async def test_a_role_that_pulls_weights_waits_for_those_that_a_unit_asks_for():
    stage = stage_of()
    tickets, done = stage.channel("tickets"), stage.channel("rollout-reward")
    tickets.give("w:1/0", {}, step=1, version=PolicyVersion(0, 2))
    async with running(stage.context("rollout", **TIME)):
        stage.weights.show(PolicyVersion(0, 1), {})
        await until(lambda: stage.weights.pulls == 1)
        await asyncio.sleep(0.005)
        assert done.all == []
        stage.weights.show(PolicyVersion(0, 3), {})
        await until(lambda: done.all)
        assert done.all[0].version == PolicyVersion(0, 3)
        tickets.give("w:2/0", {}, step=2, version=PolicyVersion(0, 2))
        await until(lambda: len(done.all) == 2)
    assert stage.weights.pulls == 1, "what is here is newer than what is asked for"


async def test_two_edges_out_of_a_role_give_each_unit_twice():
    stage = stage_of(edges=[*EDGES, {"from": "rollout", "to": "train"}])
    tickets, first, second = (stage.channel(name) for name in ("tickets", "rollout-reward", "rollout-train"))
    tickets.give("w:1/0", {}, step=1)
    stage.weights.show(PolicyVersion(0, 0), {})
    async with running(stage.context("rollout", **TIME)):
        await until(lambda: tickets.acked)
    assert keys(first.all) == keys(second.all) == ["w:1/0"]
    assert keys(first.parents["w:1/0"]) == keys(second.parents["w:1/0"]) == ["w:1/0"]


def a_cycle(round_trips, **options):
    edges = [{"from": "policy", "to": "train"}, {"from": "train", "to": "policy", "weights": True}]
    return stage_of(
        edges=edges, cycles=[{"roles": ["sim", "policy"], "roundTrips": round_trips, "stages": 2, **options}]
    )


@pytest.mark.parametrize("round_trips", [1, 3])
async def test_sub_batches_travel_their_round_trips_and_leave_at_the_back(round_trips):
    stage = a_cycle(round_trips)
    stage.weights.show(PolicyVersion(0, 5), {})
    tickets, done = stage.channel("tickets"), stage.channel("policy-train")
    for n in range(4):
        tickets.give(f"w:1/{n}", {"of": 4, "at": n}, step=1)
    async with running(stage.context("sim", **TIME), stage.context("policy", **TIME)):
        await until(lambda: len(tickets.acked) == 4)
    questions = stage.cycle("cycle-sim-policy").questions.all
    assert sorted((tuple(q.payload["keys"]), q.payload["trip"]) for q in questions) == sorted(
        (pair, trip + 1) for pair in (("w:1/0", "w:1/2"), ("w:1/1", "w:1/3")) for trip in range(round_trips)
    )
    assert sorted(keys(done.all)) == [f"w:1/{n}" for n in range(4)]
    assert {item.version for item in done.all} == {PolicyVersion(0, 5)}
    for item in done.all:
        (parent,) = done.parents[item.key]
        assert (parent.channel, parent.key, parent.step, parent.branch) == ("", item.key, 1, 0)


async def test_a_hand_over_in_a_cycle_takes_its_hop_what_it_really_took_included(monkeypatch):
    now, loop, delays = itertools.count(0.0, 0.125), asyncio.get_running_loop(), list[float]()
    call_later = loop.call_later

    def soon(delay, callback, *args):
        if delay == 0.375:
            delays.append(delay)
            delay = 0.0
        return call_later(delay, callback, *args)

    monkeypatch.setattr(loop, "call_later", soon)
    monkeypatch.setattr(cycle, "time", SimpleNamespace(time=lambda: next(now)))
    stage = a_cycle(2, hopMs=500.0)
    stage.weights.show(PolicyVersion(0, 5), {})
    tickets = stage.channel("tickets")
    tickets.give("w:1/0", {"of": 1, "at": 0}, step=1)
    async with running(stage.context("sim", **TIME), stage.context("policy", **TIME)):
        await until(lambda: tickets.acked)
    assert delays == [0.375] * 3, "there, back, and there again"


async def test_without_a_hop_nothing_in_a_cycle_is_delayed(monkeypatch):
    loop, delays = asyncio.get_running_loop(), list[float]()
    call_later = loop.call_later

    def noted(delay, callback, *args):
        delays.append(delay)
        return call_later(delay, callback, *args)

    monkeypatch.setattr(loop, "call_later", noted)
    stage = a_cycle(1)
    stage.weights.show(PolicyVersion(0, 5), {})
    tickets = stage.channel("tickets")
    tickets.give("w:1/0", {"of": 1, "at": 0}, step=1)
    async with running(stage.context("sim", **TIME), stage.context("policy", **TIME)):
        await until(lambda: tickets.acked)
        assert [delay for delay in delays if 0.01 < delay < 5.0] == [], "but for the tests' own looks and ends"


async def test_what_is_cancelled_in_a_cycle_is_dropped_at_both_ends():
    stage = a_cycle(1)
    stage.weights.show(PolicyVersion(0, 0), {})
    tickets, done = stage.channel("tickets"), stage.channel("policy-train")
    tickets.give("w:1/0", {"of": 2, "at": 0}, step=1)
    tickets.give("w:1/gone", {"of": 2, "at": 1}, step=1, cancelled=True)
    cycle = stage.cycle("cycle-sim-policy")
    cycle.questions.give("none", {"keys": [], "tickets": [], "trip": 1, "sent": 0.0}, cancelled=True)
    front, back = stage.context("sim", **TIME), stage.context("policy", **TIME)
    async with running(front):
        await until(lambda: len(cycle.questions.all) == 2)
        cycle.answers.give(cycle.questions.all[-1].key, None, cancelled=True)
        await until(lambda: len(tickets.dropped) == 2)
    assert {(item.key, why) for item, why in tickets.dropped} == {("w:1/gone", "cancelled"), ("w:1/0", "unanswered")}
    async with running(back):
        await until(lambda: cycle.questions.dropped)
    assert [(item.key, why) for item, why in cycle.questions.dropped] == [("none", "cancelled")]
    assert keys(done.all) == ["w:1/0"]


async def test_a_full_channel_is_waited_for_when_a_courier_is_to_be_empty(monkeypatch):
    stage = stage_of()
    context = stage.context("reward", **TIME)
    units, done = stage.channel("rollout-reward"), stage.channel("reward-train")
    courier = Courier(Desk(context, figures_of(context)))
    asked, room = filled(done, monkeypatch)
    for n in range(2):
        courier.send([units.give(f"w:1/{n}", {})], version=PolicyVersion(0, 0))
    emptied = asyncio.create_task(courier.empty())
    await asked.wait()
    for _ in range(20):
        await asyncio.sleep(0)
    assert not emptied.done()
    assert units.acked == []
    room.set()
    await emptied
    assert keys(units.acked) == keys(done.all) == ["w:1/0", "w:1/1"]
    await courier.empty()
    monkeypatch.setattr(done, "put", AsyncMock(side_effect=ValueError("no such channel")))
    courier.send([units.give("w:1/2", {})], version=PolicyVersion(0, 0))
    with pytest.raises(ValueError, match="no such channel"):
        await courier.empty()


async def test_memory_is_that_of_the_config_on_the_slots_and_off_them():
    config = {**TIME, "memory": {"resident": 10, "peak": 30, "offloaded": 2}}
    stage = stage_of()
    assert SyntheticRole().memory() == Memory(now=0)
    async with running(stage.context("reward", **config)) as (role,):
        await until(lambda: role.memory().now == 10 << 20)
        assert role.memory() == Memory(now=10 << 20, resident=10 << 20, peak=30 << 20)
        await role.offload()
        assert role.memory().now == 2 << 20
        await role.load()
        assert role.memory().now == 10 << 20


def test_speed_and_drift_are_those_of_the_own_pool_and_role():
    drift = {"role": "reward", "step": 2, "factor": 3.0}
    stage = stage_of(drift=drift, speeds={"fast": 4.0})
    reward, train = (stage.context(role, time={"perItemMs": 8.0}) for role in ("reward", "train"))
    assert figures_of(reward).item_s("k", step=1) == 0.008
    assert figures_of(reward).item_s("k", step=2) == pytest.approx(0.024)
    assert figures_of(train).item_s("k", step=2) == 0.008
    train.pool = "fast"
    assert figures_of(train).item_s("k", step=2) == 0.002


async def test_a_checkpoint_says_how_many_steps_there_have_been(tmp_path):
    context = stage_of().context("train", **TIME)
    trainer, written = Committing(Desk(context, figures_of(context)), in_turn=lambda: None), list[object]()
    for number in (0, 1, 2):
        if number:
            await trainer.train(SimpleNamespace(number=number, units=("w:1/0",)))  # type: ignore[arg-type]
        trainer.write(tmp_path, trainer.state())
        written += [json.loads(file.read_text()) for file in tmp_path.iterdir()]
    assert written == [{"step": 0}, {"step": 1}, {"step": 2}]


@pytest.mark.parametrize(("publish_s", "left_s"), [(0.0, 0.001), (0.0004, 0.0006), (0.5, 0.0)])
async def test_publishing_takes_as_long_as_the_workload_says_and_the_real_one_is_part_of_it(
    monkeypatch, publish_s, left_s
):
    spent: list[float] = []

    async def spend(seconds):
        spent.append(seconds)

    for role in ("train", "reward"):
        context = stage_of().context(role, **TIME)
        desk = Desk(context, figures_of(context))
        monkeypatch.setattr(desk.pacer, "spend", spend)
        trainer = Committing(desk, in_turn=lambda: None)
        await trainer.committed(PolicyVersion(0, 1), publish_s=publish_s)
        assert (trainer.weights(PolicyVersion(0, 1)) is None) == (role == "reward"), "it has no edge of weights"
    assert spent == pytest.approx([left_s])


def test_ranks_of_timers_have_no_collective_in_which_one_could_miss_another():
    """Only `take` of a gang meets: else each works on its own part, however late the others are."""
    assert not Committing.holds_collectives


async def test_a_round_of_a_gang_lasts_as_long_as_its_largest_part_and_the_sync(monkeypatch):
    stage = stage_of()
    context = stage.context("train", time={"perItemMs": 4.0, "perBatchMs": 1.0}, gang=True, syncMs=8.0)

    async def meet(place, value):
        assert (place, value) == ((0, 1, 2), (0.004, 1.0))
        return [value, (0.012, 1.0)]

    async def spend(seconds):
        spent.append(seconds)

    spent: list[float] = []
    desk = Desk(context, figures_of(context))
    monkeypatch.setattr(context.gang, "world", 2, raising=False)
    monkeypatch.setattr(context.gang, "meet", meet)
    monkeypatch.setattr(desk.pacer, "spend", spend)
    item = stage.channel("reward-train").give("w:1/0", {})
    await Committing(desk, in_turn=lambda: None).take(
        Round(branch=0, step=1, number=2, items=(item,), last=True, total_weight=1.0)
    )
    assert spent == pytest.approx([0.005, 0.012]), "its own part, then that of the other rank and half of syncMs"


@pytest.mark.parametrize(("role", "config"), [("reward", {}), ("reward", {"service": "concurrent", "lanes": 2})])
async def test_a_long_unit_shows_that_it_moves_in_each_service(role, config, monkeypatch):
    monkeypatch.setattr(desk_module, "MOVES_EVERY_S", 0.004)
    stage, moves = stage_of(), itertools.count()
    context = stage.context(role, time={"perItemMs": 20.0}, **config)
    monkeypatch.setattr(context, "moved", lambda: next(moves))
    stage.channel("rollout-reward").give("w:1/0", {}, step=1)
    async with running(context):
        await until(lambda: stage.channel("reward-train").all)
    assert next(moves) >= 2


async def test_another_option_of_the_plan_counts_from_the_next_step_on_in_the_same_life():
    stage = stage_of()
    units, done = stage.channel("rollout-reward"), stage.channel("reward-train")
    context = stage.context(
        "reward", time={"perItemMs": 0.0}, memory={"resident": 1, "peak": 9}, options=[{"peak": 5, "perItemMs": 30.0}]
    )

    async def took(key):
        began = time.monotonic()
        units.give(key, {}, step=1)
        await until(lambda: key in keys(done.all))
        return time.monotonic() - began

    async with running(context) as (role,):
        await took("w:1/0")
        assert role.memory().peak == 9 << 20
        context.allotment = Allotment(option="0")
        assert await took("w:2/0") >= 0.025
        assert role.memory().peak == 5 << 20
        context.allotment = Allotment(option="base")
        assert role.memory().peak == 9 << 20
