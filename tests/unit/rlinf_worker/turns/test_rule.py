"""One lease set, event by event: who is told what."""

from dataclasses import replace

import pytest

from rlinf_worker.turns import rule
from rlinf_worker.turns.rule import Gone, Kill, Kind, Late, LeaseSet, Order, Said, Standing, Turn, Warn

ENV = Turn(role="env", workers=("env/0",), fed_inside=True)
ROLLOUT = Turn(role="rollout", workers=("rollout/0",))
ACTOR = Turn(role="actor", workers=("actor/0", "actor/1"), gang=True)


class Set:
    """Plays the workers: each order is obeyed at once unless `deaf`."""

    def __init__(self, *turns: Turn) -> None:
        self.lease = LeaseSet(name="all", turns=turns)
        self.state = rule.fresh(self.lease)
        self.log: list[str] = []
        self.deaf: set[str] = set()

    def hear(self, event: rule.Event) -> list[str]:
        before = len(self.log)
        self.state, actions = rule.step(self.lease, self.state, event)
        for action in actions:
            match action:
                case Order(worker, kind):
                    self.log.append(f"{kind} {worker}")
                    if worker not in self.deaf and kind not in (Kind.OFFLOAD, Kind.PRELOAD):
                        self.hear(Said(worker, Standing.HOLDS))
                case Kill(worker):
                    self.log.append(f"kill {worker}")
                case Warn(text):
                    self.log.append(text)
        return self.log[before:]

    def say(self, worker: str, standing: Standing, **fields: bool) -> list[str]:
        return self.hear(Said(worker, standing, **fields))


def test_the_first_who_wants_is_granted_and_not_disturbed_while_nobody_else_wants():
    one = Set(ENV, ROLLOUT)
    assert one.say("rollout/0", Standing.WANTS) == ["grant rollout/0"]
    assert one.say("env/0", Standing.CONTENT) == []


def test_an_idle_role_gives_its_turn_to_one_that_has_work():
    one = Set(ENV, ROLLOUT)
    one.say("rollout/0", Standing.WANTS)
    assert one.say("env/0", Standing.WANTS) == ["leave rollout/0"]
    assert one.say("rollout/0", Standing.LEAVES) == []
    assert one.say("rollout/0", Standing.CONTENT) == ["grant env/0"]


def test_a_role_is_asked_before_it_leaves_for_one_that_is_not_ready_yet():
    one = Set(ROLLOUT, replace(ENV, fed_inside=False))
    one.say("rollout/0", Standing.WANTS)
    assert one.say("env/0", Standing.WANTS, ripe=False) == ["yield rollout/0"]
    assert one.say("env/0", Standing.WANTS, ripe=True) == ["leave rollout/0"]
    one.say("env/0", Standing.WANTS, ripe=False)
    assert one.say("rollout/0", Standing.IDLE) == [], "as it was frozen already"
    assert one.say("env/0", Standing.WANTS, ripe=True) == ["offload rollout/0"]


def test_a_rank_whose_turn_is_due_leaves_by_itself_and_the_others_follow():
    one = Set(ROLLOUT, ACTOR)
    one.say("actor/0", Standing.WANTS)
    one.say("actor/1", Standing.WANTS)
    assert one.say("rollout/0", Standing.WANTS) == ["finish actor/0", "finish actor/1"]
    assert one.say("actor/0", Standing.LEAVES) == []
    assert rule.late(one.state) == ["actor/0", "actor/1"], "an offload that does not end, and work behind the end"
    assert one.say("actor/0", Standing.WANTS) == [], "its turn is over"
    assert one.say("actor/1", Standing.IDLE) == ["offload actor/1"]
    assert one.say("actor/1", Standing.CONTENT)[0] == "grant rollout/0"


def test_the_next_is_granted_only_when_the_memory_is_free():
    one = Set(ENV, ROLLOUT)
    one.say("rollout/0", Standing.WANTS)
    one.say("env/0", Standing.WANTS)
    one.say("rollout/0", Standing.IDLE)
    assert one.say("rollout/0", Standing.IDLE, answers=False) == [], "it has not answered the offload"
    assert one.hear(Gone("rollout/0")) == ["grant env/0"]


def test_a_gang_is_granted_when_all_its_ranks_want_and_leaves_when_all_are_frozen():
    one = Set(ROLLOUT, ACTOR)
    assert one.say("actor/0", Standing.WANTS) == []
    assert one.say("actor/1", Standing.WANTS) == ["grant actor/0", "grant actor/1"]
    one.say("rollout/0", Standing.WANTS)
    assert one.say("actor/0", Standing.IDLE) == [], "a single rank never ends the turn"
    assert one.say("actor/0", Standing.MORE) == ["resume actor/0"]
    one.say("actor/0", Standing.IDLE)
    assert sorted(one.say("actor/1", Standing.DUE)) == ["offload actor/0", "offload actor/1"]
    one.say("actor/1", Standing.CONTENT)
    assert one.say("actor/0", Standing.CONTENT) == ["grant rollout/0"]


def test_a_turn_that_is_due_goes_on_where_nobody_waits():
    one = Set(ENV, ROLLOUT)
    one.say("env/0", Standing.WANTS)
    assert one.say("env/0", Standing.DUE) == ["resume env/0"]


def test_who_is_due_waits_for_the_others_of_its_role_and_those_who_hang_are_killed():
    one = Set(ROLLOUT, ACTOR)
    one.say("actor/0", Standing.WANTS)
    one.say("actor/1", Standing.WANTS)
    one.say("rollout/0", Standing.WANTS)
    one.say("actor/0", Standing.DUE)
    assert rule.late(one.state) == ["actor/1"]
    assert one.hear(Late.RELEASE) == ["kill actor/1"]
    assert one.hear(Late.RELEASE) == [], "once"
    assert one.hear(Gone("actor/1")) == ["offload actor/0"]


def test_a_worker_that_does_not_answer_its_grant_is_killed_and_the_set_goes_on():
    one = Set(ENV, ROLLOUT)
    one.deaf.add("env/0")
    one.say("env/0", Standing.WANTS)
    one.say("rollout/0", Standing.WANTS)
    assert one.hear(Late.RELEASE) == ["kill env/0"]
    assert one.hear(Gone("env/0")) == ["grant rollout/0"]


def test_a_role_that_was_idle_waits_for_a_quarter_of_its_channel_or_until_patience_is_over():
    one = Set(ROLLOUT, ACTOR)
    assert one.say("rollout/0", Standing.WANTS, ripe=False) == []
    assert rule.is_patience_needed(one.lease, one.state)
    assert one.hear(Late.PATIENCE) == ["grant rollout/0"]
    other = Set(ROLLOUT, ACTOR)
    other.say("rollout/0", Standing.WANTS, ripe=False)
    assert other.say("rollout/0", Standing.WANTS, ripe=True) == ["grant rollout/0"]


def test_nobody_waits_for_a_quarter_that_only_an_idle_role_could_fill():
    one = Set(ENV, ROLLOUT)
    one.say("rollout/0", Standing.WANTS)
    one.say("env/0", Standing.WANTS, ripe=False)
    assert one.say("rollout/0", Standing.IDLE) == ["offload rollout/0"]


def test_two_turns_without_an_item_are_said_once_with_what_the_roles_do():
    one = Set(ENV, ROLLOUT)
    said: list[str] = []
    one.say("env/0", Standing.WANTS)
    one.say("env/0", Standing.HOLDS, items=True)
    for worker, other in (("env/0", "rollout/0"), ("rollout/0", "env/0")) * 3:
        said += one.say(other, Standing.WANTS)
        said += one.say(worker, Standing.IDLE)
        said += one.say(worker, Standing.CONTENT)
    warned = [text for text in said if "two turns" in text]
    assert warned == ["two turns in a row of lease set 'all' passed without an item: env/0 content; rollout/0 wants"]


def test_the_next_role_loads_beside_the_last_work_where_its_memory_fits():
    one = Set(replace(ENV, beside=frozenset({"rollout"})), ROLLOUT)
    one.say("env/0", Standing.WANTS)
    assert one.say("rollout/0", Standing.WANTS) == ["leave env/0", "preload rollout/0"]
    one.say("rollout/0", Standing.WANTS)
    one.say("env/0", Standing.IDLE)
    assert one.say("env/0", Standing.CONTENT) == ["grant rollout/0"]


def test_what_was_loaded_for_nothing_leaves_before_another_is_granted():
    third = Turn(role="reward", workers=("reward/0",))
    one = Set(replace(ENV, beside=frozenset({"rollout"})), ROLLOUT, third)
    one.say("env/0", Standing.WANTS)
    one.say("rollout/0", Standing.WANTS)
    one.say("rollout/0", Standing.CONTENT)
    one.say("reward/0", Standing.WANTS)
    one.say("env/0", Standing.IDLE)
    assert one.say("env/0", Standing.CONTENT) == ["offload rollout/0"]
    assert one.say("rollout/0", Standing.CONTENT) == ["grant reward/0"]


def test_a_worker_that_comes_late_into_its_roles_turn_is_granted_too():
    pair = Turn(role="rollout", workers=("rollout/0", "rollout/1"))
    one = Set(pair, ENV)
    one.say("rollout/0", Standing.WANTS)
    assert one.say("rollout/1", Standing.WANTS) == ["grant rollout/1"]


@pytest.mark.parametrize("standing", sorted(rule.ON_SLOTS))
def test_a_new_arbiter_learns_who_holds_and_takes_the_turn_over(standing):
    lease = LeaseSet(name="all", turns=(ENV, ROLLOUT))
    state = rule.rebuilt(lease, {"rollout/0": standing, "env/0": Standing.CONTENT}, {})
    assert (state.holding, state.at, state.leaving) == (True, 1, standing is Standing.LEAVES)
    state, actions = rule.step(lease, state, Said("env/0", Standing.WANTS))
    assert all(action.worker == "rollout/0" for action in actions if isinstance(action, Order))
    assert not any(isinstance(action, Order) and action.kind is Kind.GRANT for action in actions)


def test_an_order_that_is_on_its_way_when_a_set_is_changed_still_counts():
    lease = LeaseSet(name="all", turns=(ENV, ROLLOUT))
    wanting = {"env/0": Standing.WANTS, "rollout/0": Standing.WANTS}
    state = rule.rebuilt(lease, wanting, {"rollout/0": Kind.GRANT})
    state, actions = rule.step(lease, state, Said("env/0", Standing.WANTS))
    assert actions == [], "the slots are the other's as soon as it reads what was sent"
    leaving = {"env/0": Standing.WANTS, "rollout/0": Standing.HOLDS}
    state = rule.rebuilt(lease, leaving, {"rollout/0": Kind.OFFLOAD})
    state, actions = rule.step(lease, state, Said("env/0", Standing.WANTS))
    assert (state.leaving, actions) == (True, [])
    state, actions = rule.step(lease, state, Said("rollout/0", Standing.CONTENT))
    assert actions == [Order("env/0", Kind.GRANT)]


REWARD = Turn(role="reward", workers=("reward/0",))


@pytest.mark.parametrize(
    ("holder", "next_one", "last"),
    [("env", "rollout", "reward"), ("rollout", "reward", "env"), ("reward", "env", "rollout")],
)
def test_of_several_who_wait_the_next_in_the_plans_order_is_granted_and_told_that_others_wait(holder, next_one, last):
    one = Set(ENV, ROLLOUT, REWARD)
    one.say(f"{holder}/0", Standing.WANTS)
    for waiting in (last, next_one):
        one.say(f"{waiting}/0", Standing.WANTS)
    one.say(f"{holder}/0", Standing.LEAVES)
    state, actions = rule.step(one.lease, one.state, Said(f"{holder}/0", Standing.CONTENT))
    assert actions == [Order(f"{next_one}/0", Kind.GRANT, yielding=True)]
    assert state[f"{next_one}/0"].told is Kind.YIELD


def test_who_is_granted_while_nobody_waits_is_told_so():
    one = Set(ENV, ROLLOUT)
    _, actions = rule.step(one.lease, one.state, Said("env/0", Standing.WANTS))
    assert actions == [Order("env/0", Kind.GRANT, yielding=False)]


@pytest.mark.parametrize("holder", ["env", "rollout", "reward"])
def test_who_held_the_slots_before_they_were_a_lease_set_has_the_turn(holder):
    one = Set(ENV, ROLLOUT, REWARD)
    assert one.say(f"{holder}/0", Standing.HOLDS) == []
    other = "env" if holder != "env" else "reward"
    assert one.say(f"{other}/0", Standing.WANTS) == [f"leave {holder}/0"]
    assert not one.state.leaving


def test_who_is_on_the_slots_out_of_turn_is_told_to_leave_and_nobody_loads_before_it_has():
    one = Set(replace(ROLLOUT, workers=("rollout/0", "rollout/1")), ENV)
    one.state = rule.rebuilt(one.lease, {"rollout/0": Standing.HOLDS, "env/0": Standing.HOLDS}, {})
    assert one.say("rollout/1", Standing.WANTS) == ["leave env/0"], "not granted beside it"
    assert one.say("env/0", Standing.LEAVES) == []
    assert one.say("env/0", Standing.CONTENT) == ["grant rollout/1"]


def test_a_rank_out_of_turn_leaves_only_with_the_others_of_its_gang():
    one = Set(ROLLOUT, ACTOR)
    one.state = rule.rebuilt(one.lease, dict.fromkeys(("rollout/0", "actor/0", "actor/1"), Standing.HOLDS), {})
    assert one.say("rollout/0", Standing.HOLDS) == ["finish actor/0", "finish actor/1"]
    assert one.say("actor/0", Standing.IDLE) == []
    assert one.say("actor/0", Standing.MORE) == ["resume actor/0", "finish actor/0"], "work has come: it is done first"
    assert one.say("actor/0", Standing.IDLE) == []
    assert one.say("actor/1", Standing.IDLE) == ["offload actor/0", "offload actor/1"]


def test_a_rank_that_leaves_out_of_turn_ends_nobodys_turn_and_one_of_a_torn_gang_is_not_resumed_alone():
    one = Set(ROLLOUT, ACTOR)
    one.state = rule.rebuilt(one.lease, dict.fromkeys(("rollout/0", "actor/0", "actor/1"), Standing.HOLDS), {})
    one.say("rollout/0", Standing.HOLDS)
    assert one.say("actor/0", Standing.LEAVES) == []
    assert not one.state.leaving
    assert one.say("actor/0", Standing.CONTENT) == []
    assert one.say("rollout/0", Standing.CONTENT) == []
    assert one.say("actor/1", Standing.DUE) == ["offload actor/1"], "and not resumed: its gang wants a turn together"


def test_patience_is_for_who_is_unripe_while_nobody_uses_the_slots_and_no_turn_ends():
    pair = Turn(role="rollout", workers=("rollout/0", "rollout/1"))
    one = Set(pair, REWARD)
    assert not rule.is_patience_needed(one.lease, one.state)
    one.say("rollout/0", Standing.WANTS)
    one.say("reward/0", Standing.WANTS, ripe=False)
    assert not rule.is_patience_needed(one.lease, one.state), "the slots are in use"
    one.say("rollout/0", Standing.IDLE)
    assert rule.is_patience_needed(one.lease, one.state)
    assert one.hear(Late.PATIENCE) == ["offload rollout/0"]
    assert not rule.is_patience_needed(one.lease, one.state), "it was waited for, and the turn ends"
    leaving = replace(one.state, impatient=False)
    assert not rule.is_patience_needed(one.lease, leaving), "the turn ends anyway"


def test_a_worker_that_was_being_resumed_as_its_roles_turn_ends_is_told_to_finish():
    pair = Turn(role="rollout", workers=("rollout/0", "rollout/1"))
    one = Set(pair, replace(ENV, fed_inside=False))
    one.say("rollout/0", Standing.WANTS)
    one.say("rollout/1", Standing.WANTS)
    assert one.say("env/0", Standing.WANTS, ripe=False) == ["yield rollout/0", "yield rollout/1"]
    one.say("rollout/1", Standing.IDLE)
    one.deaf.add("rollout/1")
    assert one.say("rollout/1", Standing.MORE) == ["resume rollout/1"]
    assert one.say("env/0", Standing.WANTS) == ["finish rollout/0"], "the other has an order on its way"
    assert one.say("rollout/0", Standing.LEAVES) == []
    assert one.say("rollout/1", Standing.HOLDS) == ["finish rollout/1"]


def test_a_role_loads_beside_the_last_work_of_another_in_every_round():
    one = Set(replace(ENV, beside=frozenset({"rollout"})), ROLLOUT)
    for _ in range(2):
        one.say("env/0", Standing.WANTS)
        assert "preload rollout/0" in one.say("rollout/0", Standing.WANTS)
        one.say("rollout/0", Standing.WANTS)
        one.say("env/0", Standing.LEAVES)
        assert one.say("env/0", Standing.CONTENT) == ["grant rollout/0"]
        one.say("env/0", Standing.WANTS)
        one.say("rollout/0", Standing.LEAVES)
        one.say("rollout/0", Standing.CONTENT)
        one.say("env/0", Standing.LEAVES)
        one.say("env/0", Standing.CONTENT)


def test_a_new_arbiter_knows_who_was_told_to_load_and_has_it_leave_before_another_is_granted():
    lease = LeaseSet(name="all", turns=(ENV, ROLLOUT, REWARD))
    state = rule.rebuilt(lease, {"rollout/0": Standing.WANTS}, {"rollout/0": Kind.PRELOAD})
    assert (state.holding, state["rollout/0"].loaded) == (False, True)
    state, actions = rule.step(lease, state, Said("rollout/0", Standing.CONTENT))
    assert actions == []
    state, actions = rule.step(lease, state, Said("reward/0", Standing.WANTS))
    assert actions == [Order("rollout/0", Kind.OFFLOAD)]
    state, actions = rule.step(lease, state, Said("rollout/0", Standing.CONTENT))
    assert actions == [Order("reward/0", Kind.GRANT)]


def test_what_was_to_be_next_and_wants_no_more_is_forgotten():
    """It would keep another from being loaded beside the last work."""
    one = Set(replace(ENV, beside=frozenset({"rollout", "reward"})), ROLLOUT, REWARD)
    one.say("env/0", Standing.WANTS)
    one.say("rollout/0", Standing.WANTS)
    one.say("rollout/0", Standing.CONTENT)
    one.say("env/0", Standing.LEAVES)
    one.say("env/0", Standing.CONTENT)
    assert one.state.next == -1
    assert one.say("env/0", Standing.WANTS) == ["offload rollout/0"]
    assert one.say("rollout/0", Standing.CONTENT) == ["grant env/0"]
    assert "preload reward/0" in one.say("reward/0", Standing.WANTS)


def test_a_turn_that_ends_while_one_works_on_is_resumed_and_left_as_one_that_others_wait_for():
    """A rank that is resumed in a turn that ends still knows that somebody waits, and says so when it is through."""
    one = Set(ROLLOUT, ACTOR)
    for rank in ("actor/0", "actor/1"):
        one.say(rank, Standing.WANTS)
    one.say("actor/1", Standing.IDLE)
    state, actions = rule.step(one.lease, one.state, Said("actor/0", Standing.LEAVES))
    assert state.yielding
    assert actions == [Order("actor/1", Kind.OFFLOAD, yielding=True)]


def test_a_gang_that_goes_on_resumes_only_who_is_frozen_and_owes_nothing():
    one = Set(ROLLOUT, ACTOR)
    for rank in ("actor/0", "actor/1"):
        one.say(rank, Standing.WANTS)
    one.say("actor/1", Standing.IDLE)
    assert sorted(one.say("actor/0", Standing.DUE)) == ["resume actor/0", "resume actor/1"]


def test_who_is_off_the_slots_is_not_resumed_with_the_others_of_its_role():
    one = Set(Turn(role="rollout", workers=("rollout/0", "rollout/1")), ENV)
    one.say("rollout/1", Standing.CONTENT)
    one.say("rollout/0", Standing.WANTS)
    assert one.say("rollout/0", Standing.DUE) == ["resume rollout/0"]


def test_a_gang_is_ripe_when_all_are_and_others_when_one_is():
    gang = Set(ROLLOUT, ACTOR)
    gang.say("actor/0", Standing.WANTS)
    assert gang.say("actor/1", Standing.WANTS, ripe=False) == []
    assert gang.say("actor/1", Standing.WANTS) == ["grant actor/0", "grant actor/1"]
    pair = Set(Turn(role="rollout", workers=("rollout/0", "rollout/1")), ENV)
    assert pair.say("rollout/0", Standing.WANTS, ripe=False) == []
    assert pair.say("rollout/1", Standing.WANTS) == ["grant rollout/0", "grant rollout/1"]


def test_patience_that_was_granted_once_is_asked_for_anew():
    one = Set(ROLLOUT, ACTOR)
    one.say("rollout/0", Standing.WANTS, ripe=False)
    assert one.hear(Late.PATIENCE) == ["grant rollout/0"]
    one.say("actor/0", Standing.WANTS)
    one.say("actor/1", Standing.WANTS)
    one.say("rollout/0", Standing.LEAVES)
    one.say("rollout/0", Standing.CONTENT)
    one.say("actor/0", Standing.CONTENT)
    one.say("actor/1", Standing.CONTENT)
    assert one.say("rollout/0", Standing.WANTS, ripe=False) == []
    assert rule.is_patience_needed(one.lease, one.state)


def test_a_role_loads_beside_the_last_work_of_another_though_somebody_wants_at_every_moment():
    one = Set(replace(ENV, beside=frozenset({"rollout"})), replace(ROLLOUT, beside=frozenset({"env"})))
    one.say("env/0", Standing.WANTS)
    for holder, other in (("env/0", "rollout/0"), ("rollout/0", "env/0")) * 2:
        assert f"preload {other}" in one.say(other, Standing.WANTS)
        one.say(other, Standing.WANTS)
        one.say(holder, Standing.LEAVES)
        assert one.say(holder, Standing.CONTENT) == [f"grant {other}"]


def test_a_rank_for_which_work_has_come_while_its_turn_ends_works_on_to_its_own_end():
    one = Set(ROLLOUT, ACTOR)
    for rank in ("actor/0", "actor/1"):
        one.say(rank, Standing.WANTS)
    assert one.say("actor/0", Standing.LEAVES) == ["finish actor/1"]
    assert one.say("actor/1", Standing.MORE)[0] == "resume actor/1"


def test_one_that_leaves_as_the_set_comes_to_be_ends_nobodys_turn():
    one = Set(Turn(role="rollout", workers=("rollout/0", "rollout/1")), ENV)
    assert one.say("rollout/0", Standing.LEAVES) == []
    assert one.say("rollout/1", Standing.HOLDS) == []


def test_who_was_being_told_that_somebody_waits_is_not_told_again_by_a_new_arbiter():
    lease = LeaseSet(name="all", turns=(replace(ENV, fed_inside=False), ROLLOUT))
    state = rule.rebuilt(lease, {"rollout/0": Standing.HOLDS}, {"rollout/0": Kind.YIELD})
    state, actions = rule.step(lease, state, Said("env/0", Standing.WANTS, ripe=False))
    assert actions == []
    state, actions = rule.step(lease, state, Said("rollout/0", Standing.HOLDS))
    assert actions == []


def turn(one: Set, worker: str, *, items: bool = False) -> list[str]:
    """Alone, from its grant to its end."""
    said = one.say(worker, Standing.WANTS)
    said += one.say(worker, Standing.HOLDS, items=items)
    said += one.say(worker, Standing.LEAVES)
    return [text for text in said + one.say(worker, Standing.CONTENT) if "two turns" in text]


def test_turns_without_an_item_are_in_a_row_and_count_from_the_first_item_of_all():
    one = Set(ENV, ROLLOUT)
    turns: dict[bool, list[bool]] = {False: [], True: []}
    for items in (False, False, False, True, False, True, False, True, True, False, False, False, True, False, False):
        turns[items].append(bool(turn(one, "env/0", items=items)))
    assert turns[True] == [False] * 5
    #                      before any flowed    alone         in a row             once more
    assert turns[False] == [False, False, False, False, False, False, True, False, False, True]


def test_a_turn_that_goes_on_as_nobody_waits_is_a_new_one_in_which_nobody_waits_and_nothing_flowed():
    one = Set(ENV, ROLLOUT)
    one.say("env/0", Standing.WANTS)
    one.say("env/0", Standing.HOLDS, items=True)
    state, actions = rule.step(one.lease, one.state, Said("env/0", Standing.DUE))
    assert actions == [Order("env/0", Kind.RESUME, yielding=False)]
    one.state = state
    for standing in (Standing.HOLDS, Standing.LEAVES, Standing.CONTENT):
        assert one.say("env/0", standing) == []
    assert turn(one, "env/0") != [], "the second in a row without an item"


def test_the_words_of_two_empty_turns_tell_who_is_not_there_and_who_is_unripe():
    one = Set(ENV, ROLLOUT, REWARD)
    one.say("reward/0", Standing.WANTS, ripe=False)
    turn(one, "env/0", items=True)
    turn(one, "env/0")
    assert turn(one, "env/0") == [
        "two turns in a row of lease set 'all' passed without an item: "
        "env/0 content; rollout/0 away; reward/0 wants, unripe"
    ]


def test_a_new_arbiter_takes_who_wants_for_ripe():
    lease = LeaseSet(name="all", turns=(ENV, ROLLOUT))
    state = rule.rebuilt(lease, {"rollout/0": Standing.WANTS}, {})
    _, actions = rule.step(lease, state, Gone("env/0"))
    assert actions == [Order("rollout/0", Kind.GRANT)]


def test_a_new_arbiter_loads_nobody_beside_one_that_was_told_to_load():
    lease = LeaseSet(name="all", turns=(replace(ENV, beside=frozenset({"rollout", "reward"})), ROLLOUT, REWARD))
    state = rule.rebuilt(lease, {"env/0": Standing.HOLDS}, {"rollout/0": Kind.PRELOAD})
    _, actions = rule.step(lease, state, Said("reward/0", Standing.WANTS))
    assert actions == [Order("env/0", Kind.LEAVE, yielding=True)]


def test_a_worker_that_is_its_roles_only_one_by_another_plan_is_told_to_leave_once_idle():
    lease = LeaseSet(name="all", turns=(ROLLOUT, ENV))
    state = rule.rebuilt(lease, {"rollout/0": Standing.HOLDS}, {"rollout/0": Kind.FINISH})
    state, actions = rule.step(lease, state, Said("env/0", Standing.WANTS))
    assert actions == []
    _, actions = rule.step(lease, state, Said("rollout/0", Standing.HOLDS))
    assert actions == [Order("rollout/0", Kind.LEAVE, yielding=True)]


def test_a_role_that_only_roles_of_the_set_feed_is_ready_though_unripe_as_nobody_would_work():
    one = Set(ENV, ROLLOUT)
    one.say("rollout/0", Standing.WANTS)
    assert one.say("env/0", Standing.WANTS, ripe=False) == ["leave rollout/0"]


def test_who_works_is_late_as_soon_as_one_of_its_role_has_ended_the_turn():
    one = Set(ROLLOUT, ACTOR)
    for rank in ("actor/0", "actor/1"):
        one.say(rank, Standing.WANTS)
    assert rule.late(one.state) == []
    one.say("actor/0", Standing.IDLE)
    assert rule.late(one.state) == []
    one.say("rollout/0", Standing.WANTS)
    one.say("actor/0", Standing.DUE)
    assert rule.late(one.state) == ["actor/1"]


def test_who_has_left_as_its_roles_turn_ends_waits_for_the_next():
    one = Set(Turn(role="rollout", workers=("rollout/0", "rollout/1")), ENV)
    for worker in ("rollout/0", "rollout/1"):
        one.say(worker, Standing.WANTS)
    one.say("env/0", Standing.WANTS)
    one.say("rollout/0", Standing.IDLE)
    assert one.say("rollout/1", Standing.IDLE) == ["offload rollout/0", "offload rollout/1"]
    assert one.say("rollout/0", Standing.CONTENT) == []
    assert one.say("rollout/0", Standing.WANTS) == []
    assert one.say("rollout/1", Standing.CONTENT) == ["grant env/0", "leave env/0"]


def test_patience_is_over_once():
    one = Set(ROLLOUT, ACTOR)
    one.say("actor/0", Standing.WANTS, ripe=False)
    assert rule.is_patience_needed(one.lease, one.state)
    assert one.hear(Late.PATIENCE) == [], "the other rank does not want"
    assert not rule.is_patience_needed(one.lease, one.state)


def test_a_new_arbiter_that_knows_nothing_is_as_the_first():
    lease = LeaseSet(name="all", turns=(ENV, ROLLOUT, ACTOR))
    assert rule.rebuilt(lease, {}, {}) == rule.fresh(lease)


def test_who_was_loaded_to_be_next_is_next_though_another_is_nearer_in_the_plans_order():
    one = Set(replace(ENV, beside=frozenset({"rollout", "reward"})), REWARD, ROLLOUT)
    one.say("env/0", Standing.WANTS)
    assert "preload rollout/0" in one.say("rollout/0", Standing.WANTS)
    one.say("rollout/0", Standing.WANTS)
    assert not [text for text in one.say("reward/0", Standing.WANTS) if text.startswith("preload")]
    one.say("env/0", Standing.LEAVES)
    assert one.say("env/0", Standing.CONTENT)[0] == "grant rollout/0"


def test_before_any_turn_the_first_of_the_plan_goes_first():
    turns = (replace(ENV, fed_inside=False), ROLLOUT, REWARD)
    one = Set(*turns)
    for role in ("reward", "rollout", "env"):
        assert one.say(f"{role}/0", Standing.WANTS, ripe=False) == []
    assert one.hear(Late.PATIENCE)[0] == "grant env/0"


def test_a_turn_of_no_number_of_units_lasts_to_the_end_of_the_step():
    assert Turn(role="env", workers=("env/0",)) == Turn(
        role="env", workers=("env/0",), gang=False, fed_inside=False, beside=frozenset(), until_units=0
    )
