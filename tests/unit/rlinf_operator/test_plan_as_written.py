"""What the operator reads of an RLPlan that somebody wrote by hand, right or wrong."""

from typing import Any

from rlinf_api import names
from rlinf_operator.reconcile.observe import plan_view

SPEC: dict[str, Any] = {
    "job": {"name": "math", "uid": "u"},
    "revision": 7,
    "pools": [{"name": "sim", "pods": 1}],
    "workers": [{"role": "env", "count": 1, "slots": "sim/0/0"}],
    "reason": {"code": "Pinned"},
}


def view(spec: dict[str, Any], **meta: Any) -> Any:
    return plan_view({"metadata": {"name": "math-p7", "uid": "p", "generation": 3, **meta}, "spec": spec})[0]


def test_a_plan_is_read_with_who_approved_it():
    found = view(SPEC, annotations={names.ANNOTATION_APPROVED_BY: "ann", names.ANNOTATION_STAYS: "Best: " + 999 * "x"})
    assert found.stays == "Best: " + 494 * "x"
    assert (found.name, found.uid, found.generation, found.revision) == ("math-p7", "p", 3, 7)
    assert (found.approved_by, found.problem) == ("ann", "")
    assert found.spec.workers[0].role == "env"


def test_what_is_wrong_in_a_plan_is_said_of_each_field_as_it_is_written():
    wrong = SPEC | {"pools": [], "workers": [SPEC["workers"][0] | {"option": -5}]}
    found = view(wrong)
    assert (found.spec, found.revision) == (None, 7)
    assert found.problem == (
        "spec.pools: got [], wanted at least 1 entries; change it; "
        'spec.workers[0].option: got -5, wanted text; write it in quotes: "-5"'
    )


def test_a_revision_that_is_no_number_is_none():
    found = view(SPEC | {"revision": "7"})
    assert (found.spec, found.revision) == (None, 0)
    assert found.problem.startswith("spec.revision: got '7', wanted")
