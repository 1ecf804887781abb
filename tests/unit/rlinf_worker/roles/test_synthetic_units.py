"""Synthetic roles of which each has its own number of units: several are made of one, one of several, in cycles too."""

import asyncio

import pytest

from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.roles.synthetic.figures import Figures
from rlinf_worker.roles.synthetic.graph import Graph
from tests.unit.rlinf_worker.roles.test_synthetic_roles import TIME, keys, running, stage_of, until

LINE = [{"from": "rollout", "to": "judge"}, {"from": "judge", "to": "train"}]
SAMPLED = {"edges": LINE, "items": 2}


def names(index, count):
    return [f"w:1/{index}/{sample}" for sample in range(count)]


async def test_an_engine_makes_samples_of_a_ticket_each_in_a_lane_and_acknowledges_it_once():
    stage = stage_of(**SAMPLED, units={"rollout": 6, "judge": 6})
    tickets, made = stage.channel("tickets"), stage.channel("rollout-judge")
    tickets.give("w:1/0/0", {})
    async with running(stage.context("rollout", **TIME, service="concurrent", lanes=2)):
        await until(lambda: tickets.acked)
    assert sorted(keys(made.all)) == names(0, 3)
    assert {tuple(keys(made.parents[key])) for key in names(0, 3)} == {("w:1/0/0",)}
    assert keys(tickets.acked) == ["w:1/0/0"]


async def test_of_a_ticket_that_is_cancelled_half_way_nothing_more_is_made_and_it_is_dropped_once():
    stage = stage_of(**SAMPLED, units={"rollout": 6, "judge": 6})
    tickets, made = stage.channel("tickets"), stage.channel("rollout-judge")
    ticket = tickets.give("w:1/0/0", {})
    async with running(stage.context("rollout", time={"perItemMs": 30.0}, service="concurrent", lanes=1)):
        await until(lambda: made.all)
        ticket.cancel()
        await until(lambda: tickets.dropped)
    assert len(made.all) < 3
    assert [(item.key, why) for item, why in tickets.dropped] == [("w:1/0/0", "cancelled")]
    assert tickets.acked == []


async def test_a_serial_role_splits_what_it_has_made_for_the_next_one():
    stage = stage_of(**SAMPLED, units={"judge": 4})
    tickets, made = stage.channel("tickets"), stage.channel("rollout-judge")
    tickets.give("w:1/1/0", {})
    async with running(stage.context("rollout", **TIME)):
        await until(lambda: tickets.acked)
    assert keys(made.all) == names(1, 2)


@pytest.mark.parametrize("service", [{}, {"service": "concurrent", "lanes": 3}])
async def test_a_group_is_put_once_all_of_it_is_there_and_acknowledged_with_it(service):
    stage = stage_of(**SAMPLED, units={"rollout": 6, "judge": 6})
    units, groups = stage.channel("rollout-judge"), stage.channel("judge-train")
    for key in names(0, 3)[:2]:
        units.give(key, {}, version=PolicyVersion(0, 4))
    units.give("w:1/1/0", {}, version=PolicyVersion(0, 9))
    async with running(stage.context("judge", **TIME, **service)):
        await until(lambda: units.items.empty())
        for _ in range(20):
            await asyncio.sleep(0)
        assert (groups.all, units.acked) == ([], [])
        units.give("w:1/0/2", {}, version=PolicyVersion(0, 3))
        await until(lambda: len(units.acked) == 3)
    assert [(item.key, item.version) for item in groups.all] == [("w:1/0/0", PolicyVersion(0, 3))]
    assert sorted(keys(groups.parents["w:1/0/0"])) == sorted(keys(units.acked)) == names(0, 3)


async def test_a_part_that_comes_anew_takes_the_place_of_the_one_before_and_those_of_dead_branches_go():
    stage = stage_of(**SAMPLED, units={"rollout": 4, "judge": 4})
    units, groups = stage.channel("rollout-judge"), stage.channel("judge-train")
    before, again = units.give("w:1/0/0", {}), units.give("w:1/0/0", {})
    units.give("w:1/0/1", {})
    dead = units.give("w:1/1/0", {})
    async with running(stage.context("judge", **TIME)):
        await until(lambda: len(units.acked) == 2)
        assert [item for item, _ in units.dropped] == [before]
        assert again in groups.parents["w:1/0/0"]
        units.give("w:1/1/1", {}, branch=1)
        await until(lambda: len(units.dropped) == 2)
    assert units.dropped[1] == (dead, "cancelled")


async def test_a_front_that_is_fed_asks_unit_by_unit_and_as_many_at_once_as_there_are_stages():
    edges = [{"from": "rollout", "to": "sim"}, {"from": "policy", "to": "train"}]
    cycle = {"roles": ["sim", "policy"], "roundTrips": 2, "stages": 2}
    stage = stage_of(edges=edges, cycles=[cycle], items=1, units={"sim": 4, "train": 4})
    units, made, asked = stage.channel("rollout-sim"), stage.channel("policy-train"), stage.cycle("cycle-sim-policy")
    for key in names(0, 4):
        units.give(key, {}, tickets=("w:1/0/0",))
    async with running(stage.context("sim", **TIME)):
        await until(lambda: len(asked.questions.all) == 2)
        for _ in range(20):
            await asyncio.sleep(0)
        assert [q.payload["keys"] for q in asked.questions.all] == [[key] for key in names(0, 2)]
        async with running(stage.context("policy", **TIME)):
            await until(lambda: len(units.acked) == 4)
    assert sorted((q.payload["keys"][0], q.payload["trip"]) for q in asked.questions.all) == [
        (key, trip) for key in names(0, 4) for trip in (1, 2)
    ]
    assert {item.tickets for key in names(0, 4) for item in made.parents[key]} == {("w:1/0/0",)}
    assert sorted(keys(made.all)) == names(0, 4)


def test_tokens_of_a_unit_are_the_same_for_all_roles_and_make_those_long_that_go_by_them():
    tokens = {"mean": 512.0, "sigma": 0.8}

    def figures(role, **time):
        return Figures.of({"time": {"perItemMs": 4.0, **time}}, role=role, workload="w", tokens=tokens)

    engine, judge, train = figures("roll", byTokens=True), figures("judge"), figures("train", byTokens=True)
    drawn = [f"w:{step}/{index}/0" for step in range(50) for index in range(50)]
    assert [engine.tokens([key]) for key in drawn] == [train.tokens([key]) for key in drawn]
    assert engine.tokens(drawn) / len(drawn) == pytest.approx(512.0, rel=0.1)
    for key in drawn[:10]:
        assert engine.item_s(key, step=1) == pytest.approx(0.004 * engine.tokens([key]) / 512.0)
        assert judge.item_s(key, step=1) == 0.004
    assert Figures.of({"time": {"perItemMs": 4.0}}, role="roll").tokens(drawn) == 0.0


@pytest.mark.parametrize(("made", "taken"), [(2, 6), (6, 2), (6, 6), (4, 12), (12, 4)])
def test_what_is_split_and_put_together_is_all_that_the_next_role_has(made, taken):
    graph = Graph(edges=(), items=2, counts={"a": made, "b": taken})
    of = [f"w:1/{index}/{n}" for index in range(2) for n in range(made // 2)]
    became = [key for unit in of for key in graph.becomes(unit, "a", "b")[0]]
    wanted = sorted(f"w:1/{index}/{n}" for index in range(2) for n in range(taken // 2))
    assert sorted(became) == sorted(wanted * max(1, made // taken))
