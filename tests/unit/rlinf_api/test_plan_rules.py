"""What a plan must keep of its job's bounds, and who may not ask for it."""

import pytest

from rlinf_api import plan_rules
from rlinf_api.errors import InvalidManifest
from tests.builders_driver import make_job


@pytest.mark.parametrize(("spec_pods", "plan_pods", "sentence"), [(1, 2, "allows 1"), (3, 2, "wants 3")])
def test_counts_are_checked_but_by_a_driver_whose_job_file_may_be_older(spec_pods, plan_pods, sentence):
    """A pool may be lowered under its pods; the driver's stays, and its job file says what the counts were."""
    spec, plan = make_job(pods=spec_pods).spec, make_job(pods=plan_pods).plan
    with pytest.raises(InvalidManifest, match=sentence):
        plan_rules.check(plan, spec)
    assert plan_rules.check(plan, spec, counts=False).pods["sim"] == plan_pods
