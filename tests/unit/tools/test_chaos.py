"""The verdict on chaos finds what is wrong, and the same seed draws the same faults."""

import dataclasses
import random

import pytest

from tools.chaos import faults, verdict
from tools.chaos.rounds import Round


def line(step, *, branch=0, digest="d", returned=400.0):
    return {"step": step, "branch": branch, "units": 4, "digest": f"{digest}{step}", "return_mean": returned}


CALM = Round(
    seed=1, exit_code=0, seconds=1.0, answer={"condition": "Complete"},
    lineage=[line(1), line(2), line(3)], metrics=[line(1), line(2), line(3)], events=[],
    checksums={("b0-1", ""): {"a"}}, left=[], said="",
)  # fmt: skip


def test_a_job_that_made_steps_again_has_the_history_of_one_that_was_left_alone():
    again = [line(1), line(2), line(2, branch=1), line(3, branch=1)]
    assert verdict.problems(dataclasses.replace(CALM, lineage=again), calm=CALM) == []


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"exit_code": 1}, "ended with exit code 1"),
        ({"answer": {"condition": "Failed"}}, "'Failed'"),
        ({"left": [12]}, r"\[12\] are left"),
        ({"lineage": [line(1), line(1), line(2), line(3)]}, r"committed twice.*\(0, 1\)"),
        ({"lineage": [line(1), line(2, digest="x"), line(3)]}, "step 2: "),
        ({"lineage": [line(1), line(2)]}, "it has 2 steps, wanted 3"),
        ({"checksums": {("b0-1", ""): {"a", "b"}}}, "two checksums.*b0-1"),
        ({"checksums": {}}, "no worker has logged a checksum"),
    ],
)
def test_what_does_not_hold_is_a_sentence(changes, says):
    problems = verdict.problems(dataclasses.replace(CALM, **changes), calm=CALM)
    assert len(problems) >= 1
    with pytest.raises(AssertionError, match=says):
        raise AssertionError("; ".join(problems))


def test_learning_is_measured_against_the_spread_of_undisturbed_seeds():
    calm = [480.0, 490.0, 470.0, 485.0, 475.0]
    assert verdict.learning([470.0], calm) == ""
    assert verdict.learning([499.0], calm) == "", "better is well"
    assert "reached a mean return of 400.0" in verdict.learning([400.0], calm)
    assert verdict.learning([494.0], [500.0] * 5) == "", "no spread at the top is not no tolerance"


def test_the_result_is_of_the_history_that_survived():
    made_again = [line(1), line(2, returned=10.0), line(2, branch=1), line(3, branch=1)]
    assert verdict.result(dataclasses.replace(CALM, metrics=made_again)) == 400.0


def test_the_same_seed_draws_the_same_faults_and_leaves_out_what_the_machine_has_not():
    def drawn(seed, **can):
        chance = random.Random(seed)
        return [faults.draw(chance, **{"can_slow": True, "can_fill": True, **can}) for _ in range(200)]

    assert drawn(3) == drawn(3) != drawn(4)
    assert {fault.kind for fault in drawn(3)} == {kind for kind, _, _ in faults.CHOICES}
    kinds = {fault.kind for fault in drawn(3, can_slow=False, can_fill=False)}
    assert kinds == {"kill", "kill-pod", "stop", "pause"}
