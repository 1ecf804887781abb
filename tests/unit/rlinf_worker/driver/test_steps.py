"""StepLedger: a step commits exactly once, on the units it was opened with, within the staleness bound."""

import json

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from rlinf_api.errors import InvariantBroken
from rlinf_worker.channels.protocol import PolicyVersion, oldest_version
from rlinf_worker.driver.steps import StepLedger, TicketsOf


def ledger(*, steps: int = 10, staleness: int = 0, every: int = 4) -> StepLedger:
    return StepLedger(steps=steps, max_staleness=staleness, checkpoint_every=every)


def opened(book: StepLedger, step: int, *keys: str, now: float = 0.0) -> None:
    entry = book.open(step, now=now)
    entry.part("actor").wanted.update(dict.fromkeys(keys or {f"k@{step}"}, 1))
    entry.sealed = True


def through(book: StepLedger, step: int, *, now: float = 1.0):
    branch = book.version.branch
    assert book.done(step, branch=branch, gang="actor", rank=0, keys=[f"k@{step}"], metrics={"loss": 1.0})
    return book.commit(step, worlds={"actor": 1}, now=now)


def test_a_step_commits_once_when_every_rank_has_done_its_part():
    book = ledger()
    opened(book, 1, "a", "b", "c")
    assert book.done(1, branch=0, gang="actor", rank=0, keys=["a", "b"], metrics={"loss": 1.0, "n_count": 2})
    assert book.commit(1, worlds={"actor": 2}, now=3.0) is None
    assert book.done(
        1, branch=0, gang="actor", rank=0, keys=["a", "b"], metrics={"loss": 1.0, "n_count": 2}
    )  # told again
    assert book.done(1, branch=0, gang="actor", rank=1, keys=["c"], metrics={"loss": 3.0, "n_count": 1})
    done = book.commit(1, worlds={"actor": 2}, now=3.0)
    assert done is not None
    assert (done.version, done.seconds) == (PolicyVersion(0, 1), 3.0)
    assert done.keys == {"actor": ("a", "b", "c")}
    assert done.metrics == {"loss": 2.0, "n_count": 3.0}
    assert book.commit(1, worlds={"actor": 2}, now=4.0) is None
    assert not book.done(1, branch=0, gang="actor", rank=0, keys=["a", "b"], metrics={})


def test_a_step_of_two_gangs_counts_when_both_have_their_own_units():
    book = ledger()
    opened(book, 1, "a", "b")
    entry = book.open(1, now=0.0)
    entry.part("critic").wanted.update({"b": 1, "c": 2})
    worlds = {"actor": 1, "critic": 2}

    def tickets_of(gang: str) -> TicketsOf:
        return lambda key: (key[0],) if gang == "critic" else (key,)

    assert book.done(1, branch=0, gang="actor", rank=0, keys=["a", "b"], metrics={"loss": 1.0})
    assert book.done(1, branch=0, gang="critic", rank=1, keys=["c/0"], metrics={"loss": 2.0, "n_count": 1})
    assert book.commit(1, worlds=worlds, now=1.0, tickets_of=tickets_of) is None
    assert book.done(1, branch=0, gang="critic", rank=0, keys=["b/0", "c/1"], metrics={"loss": 4.0, "n_count": 2})
    done = book.commit(1, worlds=worlds, now=1.0, tickets_of=tickets_of)
    assert done is not None
    assert done.keys == {"actor": ("a", "b"), "critic": ("b/0", "c/0", "c/1")}
    assert done.metrics == {"loss": 1.0, "critic_loss": 3.0, "critic_n_count": 3.0}


def test_each_gang_is_held_to_its_own_units():
    book = ledger()
    opened(book, 1, "a")
    book.open(1, now=0.0).part("critic").wanted["b"] = 1
    book.done(1, branch=0, gang="actor", rank=0, keys=["a"], metrics={})
    book.done(1, branch=0, gang="critic", rank=0, keys=["a"], metrics={})
    with pytest.raises(InvariantBroken, match=r"unexpected or twice: \['a'\], .* 1 tickets, missing: \['b'\]"):
        book.commit(1, worlds={"actor": 1, "critic": 1}, now=1.0)


@pytest.mark.parametrize(
    ("keys", "got", "wanted"),
    [
        (["a"], "1 units, unexpected or twice: []", "those of 2 tickets, missing: ['b']"),
        (["a", "b", "b"], "3 units, unexpected or twice: ['b']", "those of 2 tickets, missing: []"),
        (["a", "x"], "2 units, unexpected or twice: ['x']", "those of 2 tickets, missing: ['b']"),
        (["x6", "x5", "x4", "x3", "x2", "x1"], f"6 units, unexpected or twice: {['x1', 'x2', 'x3', 'x4', 'x5']}",
         "those of 2 tickets, missing: ['a', 'b']"),
    ],
)  # fmt: skip
def test_training_on_other_units_than_opened_stops_loudly_and_names_five(keys, got, wanted):
    book = ledger()
    opened(book, 1, "a", "b")
    book.done(1, branch=0, gang="actor", rank=0, keys=keys, metrics={})
    with pytest.raises(InvariantBroken) as caught:
        book.commit(1, worlds={"actor": 1}, now=1.0)
    assert str(caught.value) == f"step 1 trained on other units than it was opened with: got {got}, wanted {wanted}"


def test_a_step_that_the_flow_has_not_said_whole_does_not_commit():
    book = ledger()
    opened(book, 1)
    entry = book.get(1)
    assert entry is not None
    entry.sealed = False
    assert through(book, 1) is None
    entry.sealed = True
    assert book.commit(1, worlds={"actor": 1}, now=2.0) is not None


@given(staleness=st.integers(0, 4), steps=st.integers(1, 12), chance=st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_never_more_steps_are_open_than_the_bound_allows_and_all_commit_in_order(staleness, steps, chance):
    book, next_step = ledger(steps=steps, staleness=staleness), 1
    while not book.finished:
        if book.may_open(next_step) and chance.random() < 0.5:
            opened(book, next_step)
            next_step += 1
        elif book.open_steps:
            later = book.open_steps[-1].number
            assert later - 1 - book.committed <= staleness
            if later > book.committed + 1:
                assert through(book, later) is None, "the next step first"
            assert through(book, book.committed + 1) is not None
    assert book.committed == steps
    assert not book.may_open(steps + 1)


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_steps_open_ahead_of_the_weights_as_far_as_the_bound_allows(staleness):
    book = ledger(staleness=staleness)
    assert [step for step in range(1, 11) if book.may_open(step)] == list(range(1, staleness + 2))
    opened(book, 1)
    assert through(book, 1) is not None
    assert [step for step in range(2, 11) if book.may_open(step)] == list(range(2, staleness + 3))


def test_a_drain_ends_behind_the_steps_that_are_open_and_opens_no_other():
    book = ledger(staleness=1)
    opened(book, 1)
    opened(book, 2)
    book.drain()
    book.drain()
    first, second = through(book, 1), through(book, 2)
    assert first is not None
    assert second is not None
    assert (first.last, second.last, second.checkpoint) == (False, True, True)
    assert not book.may_open(3)


def test_a_drain_with_nothing_open_ends_behind_the_next_step():
    book = ledger()
    book.drain()
    assert book.may_open(1)
    assert not book.may_open(2)


def test_a_rewind_opens_a_branch_that_was_never_used_and_voids_what_is_open():
    book = ledger(staleness=1)
    for step in (1, 2):
        opened(book, step)
    through(book, 1)
    book.heard_of(6)
    assert book.rewind(PolicyVersion(3, 0)) == PolicyVersion(7, 0)
    assert book.open_steps == ()
    assert not book.done(2, branch=0, gang="actor", rank=0, keys=["k@2"], metrics={})
    assert book.rewind(PolicyVersion(7, 0)) == PolicyVersion(8, 0)


def test_a_drain_after_a_rewind_does_not_make_all_lost_steps_again():
    book = ledger()
    for step in (1, 2, 3):
        opened(book, step)
        through(book, step)
    opened(book, 4)
    book.drain()
    book.rewind(PolicyVersion(0, 1))
    assert book.may_open(2)
    assert not book.may_open(3)


def test_a_new_driver_adopts_what_has_committed_and_never_goes_back():
    book = ledger(staleness=2)
    for step in (1, 2, 3):
        book.open(step, now=0.0)
    assert book.adopt(PolicyVersion(2, 2))
    assert [s.number for s in book.open_steps] == [3]
    assert not book.adopt(PolicyVersion(2, 1))
    assert not book.adopt(PolicyVersion(1, 9))
    assert book.version == PolicyVersion(2, 2)
    with pytest.raises(InvariantBroken, match="opened after"):
        book.open(2, now=0.0)


def test_checkpoints_come_every_so_many_steps_and_with_the_last():
    book = ledger(steps=6, every=4)
    asked = []
    for step in range(1, 7):
        opened(book, step)
        done = through(book, step)
        assert done is not None
        asked.append((done.checkpoint, done.last))
        assert done.checkpoint == book.has_checkpoint(step)
    assert asked == [(False, False)] * 3 + [(True, False), (False, False), (True, True)]


def test_steps_that_are_open_beside_one_with_rare_tickets_commit_as_rare():
    book = ledger(steps=4, staleness=1)
    opened(book, 1)
    opened(book, 2)
    found = [through(book, 1).rare]
    opened(book, 3)
    book.open(3, now=0.0).rare = True
    found.append(through(book, 2).rare)
    opened(book, 4)
    found += [through(book, 3).rare, through(book, 4).rare]
    assert found == [False, True, True, False]


def test_overlapping_steps_are_timed_from_commit_to_commit():
    book = ledger(staleness=1)
    opened(book, 1, now=0.0)
    opened(book, 2, now=1.0)
    first, second = through(book, 1, now=5.0), through(book, 2, now=7.0)
    assert first is not None
    assert second is not None
    assert (first.seconds, second.seconds) == (5.0, 2.0)


def test_the_state_that_goes_with_a_checkpoint_names_step_and_branch():
    book = ledger()
    book.adopt(PolicyVersion(2, 8))
    assert json.loads(book.state_json(seed=7)) == {"format": 1, "step": 8, "branch": 2, "seed": 7}


EVENTS = st.tuples(
    st.sampled_from(("make", "make", "make", "train", "train", "train", "actor", "driver")), st.integers(0, 9)
)


@given(staleness=st.integers(0, 4), events=st.lists(EVENTS, min_size=30, max_size=120))
@settings(max_examples=200, deadline=None)
def test_no_step_trains_on_weights_older_than_the_bound_whatever_dies(staleness, events):
    """Rollouts that work ahead as far as the ledger opens steps, with whatever weights they have of what they may use;
    actors that go back to an older checkpoint, drivers that begin anew and are told what has committed."""
    steps = 12
    book = ledger(steps=steps, staleness=staleness, every=2)
    shown, made, saved = [book.version], dict[tuple[int, int], PolicyVersion](), [book.version]
    for event, number in events:
        branch = book.version.branch
        if event == "make":
            step = book.committed + 1 + number % (staleness + 2)
            is_allowed = step <= min(steps, book.committed + 1 + staleness)
            assert book.may_open(step) == is_allowed, "k + 1 steps are open, and no more"
            if is_allowed and (branch, step) not in made:
                opened(book, step)
                oldest = oldest_version(step, branch=branch, max_staleness=staleness)
                usable = [version for version in shown if version >= oldest]
                assert usable, "what a step asks for has been shown by the time that it is open"
                made[branch, step] = usable[number % len(usable)]
        elif event == "train" and (version := made.get((branch, book.committed + 1))) is not None:
            step = book.committed + 1
            if book.get(step) is None:  # a new driver runs its flow again; the unit is where it was
                opened(book, step)
            committed = through(book, step)
            assert committed is not None
            assert version.branch == branch, "of no dead branch"
            assert 0 <= step - 1 - version.number <= staleness
            shown.append(committed.version)
            if committed.checkpoint:
                saved.append(committed.version)
        elif event == "actor":
            version = book.rewind(saved[number % len(saved)])
            saved = [one for one in saved if one.number <= version.number]
            shown.append(version)
        elif event == "driver":
            old, book = book, ledger(steps=steps, staleness=staleness, every=2)
            book.heard_of(old.highest_branch)
            book.adopt(old.version)
