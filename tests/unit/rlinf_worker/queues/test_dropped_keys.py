"""Which units a step of a gang is done without, by branch and step."""

from rlinf_worker.queues.receipts import DroppedKeys


def test_a_step_is_done_without_its_own_and_what_is_before_it_is_forgotten():
    keys = DroppedKeys()
    keys.add(["env:0@1"], step=1, branch=0)
    keys.add(["env:0@2", "env:1@2"], step=2, branch=0)
    keys.add(["env:1@2", "env:2@2"], step=2, branch=0)
    keys.add(["env:0@3"], step=3, branch=0)
    keys.add(["env:9@2"], step=2, branch=1)
    assert keys.take(2, branch=0) == {"env:0@2", "env:1@2", "env:2@2"}
    assert keys.take(2, branch=0) == set(), "once"
    assert keys.take(1, branch=0) == set(), "it was before"
    assert keys.take(3, branch=0) == {"env:0@3"}
    assert keys.take(2, branch=1) == {"env:9@2"}


def test_a_branch_that_is_given_up_takes_its_own_and_older_ones_along():
    keys = DroppedKeys()
    for branch in (0, 1, 2):
        keys.add([f"env:{branch}@9"], step=9, branch=branch)
    keys.cancel(1)
    assert keys.take(9, branch=0) == set()
    assert keys.take(9, branch=1) == set()
    assert keys.take(9, branch=2) == {"env:2@9"}
