"""Which instructions are obeyed, how often, and what an agent knows of plans."""

from hypothesis import given
from hypothesis import strategies as st

from rlinf_api._pb.rlinf.agents.v1alpha1.agents_pb2 import Result
from rlinf_worker.agent.instructions import Book, NewestPlan


def test_an_instruction_is_done_once_and_its_answer_repeated():
    book = Book(keep=10)
    assert book.admit(1, driver_attempt=1) is True
    assert book.admit(1, driver_attempt=1) is False
    answer = Result(instruction_id=1, ok=True)
    assert book.finish(answer, driver_attempt=1)
    assert book.admit(1, driver_attempt=1) == answer


def test_an_older_driver_is_refused_with_both_numbers():
    book = Book(keep=10)
    book.hear(3)
    answer = book.admit(1, driver_attempt=2)
    assert isinstance(answer, Result)
    assert "got driver attempt 2, wanted 3 or more" in answer.error


def test_a_new_driver_counts_from_one_again_and_gets_no_answers_of_the_old():
    book = Book(keep=10)
    book.admit(1, driver_attempt=1)
    assert book.admit(1, driver_attempt=2) is True
    assert not book.finish(Result(instruction_id=1, error="old"), driver_attempt=1)
    assert book.admit(1, driver_attempt=2) is False


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 3))))
def test_nothing_is_done_twice_for_one_driver_nor_for_an_old_one(steps):
    book, done, highest = Book(keep=100), set(), 0
    for id, attempt in steps:
        verdict = book.admit(id, driver_attempt=attempt)
        if attempt < highest:
            assert isinstance(verdict, Result)
            assert not verdict.ok
        elif verdict is True:
            assert (id, attempt) not in done
            done.add((id, attempt))
        highest = max(highest, attempt)


def test_what_is_kept_is_bounded():
    book = Book(keep=5)
    for id in range(100):
        book.admit(id, driver_attempt=1)
    assert len(book._answers) == 5


def committed(revision, *, switch, view=None):
    prepared = (view or NewestPlan()).prepare(revision, switch=switch, plan_json=f"plan {revision}")
    assert isinstance(prepared, NewestPlan)
    assert (prepared.revision, prepared.committed_switch < prepared.switch) == (revision, True)
    found = prepared.commit(revision, switch=switch)
    assert isinstance(found, NewestPlan)
    return found


def test_an_agent_that_has_heard_of_no_plan_knows_none():
    nothing = NewestPlan(revision=0, switch=0, plan_json="", committed=0, committed_switch=0, committed_json="")
    assert NewestPlan() == nothing
    aborted = NewestPlan().prepare(2, switch=1, plan_json="plan 2")
    assert isinstance(aborted, NewestPlan)
    assert aborted.abort(2, switch=1) == nothing


def test_a_plan_is_prepared_then_committed_and_not_undone():
    view = committed(2, switch=1)
    assert (view.revision, view.switch, view.committed_switch, view.committed_json) == (2, 1, 1, "plan 2")
    assert view.commit(2, switch=1) == view
    assert "its commit was seen here" in str(view.abort(2, switch=1))
    assert "wanted more than 1, by which plan 2 came into force" in str(view.prepare(1, switch=1, plan_json=""))


def test_an_older_plan_may_come_into_force_again_by_a_later_switch():
    view = committed(1, switch=3, view=committed(2, switch=2))
    assert (view.revision, view.committed, view.committed_switch, view.committed_json) == (1, 1, 3, "plan 1")


def test_a_plan_that_was_not_prepared_here_is_not_committed():
    assert "was not prepared here by switch 2" in str(committed(1, switch=1).commit(2, switch=2))


def test_an_aborted_plan_leaves_the_one_before():
    before = committed(1, switch=1)
    view = before.prepare(2, switch=2, plan_json="plan 2")
    assert isinstance(view, NewestPlan)
    assert (view.committed, view.committed_json) == (1, "plan 1"), "a preparation hides nothing"
    assert view.abort(2, switch=2) == before
