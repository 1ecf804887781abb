"""Quantities are bounded before anybody calculates with them: one job's exponent is no other job's wait."""

import time
from decimal import Decimal

import pytest
from pydantic import ValidationError

from rlinf_api import quantities, supported
from rlinf_api.errors import InvalidManifest
from rlinf_api.plan import Capacity, JobRef, WorkerMemory
from rlinf_scheduler.planner.infeasible import Infeasible
from rlinf_scheduler.planner.initial import initial
from tests.builders import make_job, ppo_job

LARGE = ("1e309", "1e5000", "1e99999", "1e99999999", "1e99", "9999Ei", "9223372036854775808")


def examined(**slots):
    manifest = ppo_job().build()
    manifest["spec"]["pools"][0]["slots"].update(slots)
    return [str(problem) for problem in supported.validate(manifest)[1]]


@pytest.mark.parametrize("text", LARGE)
@pytest.mark.parametrize("field", ["cpu", "memory"])
def test_a_slot_that_no_machine_has_is_refused_at_once(field, text):
    before = time.process_time()
    (said,) = examined(**{field: text})
    assert time.process_time() - before < 0.5
    assert said.startswith(f"spec.pools[sim].slots.{field}: got {text!r}, wanted ")


@pytest.mark.parametrize(
    ("slots", "sentence"),
    [
        ({"perPod": 4, "memory": "2Ei"}, "at most 9223372036854775807 for the 4 slots of a pod; write for example 2Gi"),
        ({"cpu": "9e15"}, "at most 9223372036854775 for the 4 slots of a pod; write for example 1 or 500m"),
        ({"memory": "0"}, "slots.memory: got '0', wanted a quantity of at least 1 and at most"),
        ({"memory": "1m"}, "slots.memory: got '1m', wanted a quantity of at least 1 and"),
        (
            {"perPod": 4, "resource": "a.com/x", "hostMemory": "2Ei"},
            "slots.hostMemory: got '2Ei', wanted a quantity of at least 1 and at most 9223372036854775807 for the 4 "
            "slots of a pod; write for example 2Gi",
        ),
        ({"cpu": "0"}, "slots.cpu: got '0', wanted a quantity of at least 1m and"),
        ({"cpu": "1u"}, "slots.cpu: got '1u', wanted a quantity of at least 1m and"),
    ],
)
def test_the_slots_of_a_pod_are_something_that_a_pod_can_ask_for(slots, sentence):
    (said,) = examined(**{"perPod": 4, **slots})
    assert sentence in said


@pytest.mark.parametrize("slots", [{"memory": "1e9"}, {"memory": "1Ei"}, {"memory": "0.5Gi"}, {"cpu": "1m"}])
def test_what_a_pod_can_ask_for_is_let_through(slots):
    assert examined(**slots) == []


@pytest.mark.parametrize("text", LARGE)
def test_a_plan_with_such_a_quantity_is_refused(text):
    for kind, field in ((Capacity, "bytes"), (WorkerMemory, "resident"), (WorkerMemory, "kv")):
        with pytest.raises(ValidationError):
            kind.model_validate({field: text})


@pytest.mark.parametrize("text", LARGE)
def test_a_quantity_is_bounded_where_it_is_read(text):
    with pytest.raises(InvalidManifest, match=r"^accelerator_shm .*wanted .*; write"):
        quantities.to_bytes(text, field="accelerator_shm")


def test_the_largest_quantity_is_read():
    assert quantities.to_bytes("9223372036854775807") == quantities.MOST
    assert quantities.to_bytes("9e18") == 9 * 10**18


@pytest.mark.parametrize("mebibytes", [1e308, 10**400, -1e308])
def test_a_synthetic_roles_memory_is_bounded_too(mebibytes):
    job = make_job("synthetic").role("train", "synthetic", config={"memory": {"resident": 1, "peak": mebibytes}})
    spec, problems = supported.validate(job.pool("cpu", ["train"]).build())
    assert spec is not None
    assert problems == []
    plan = initial(spec, job=JobRef(name="j", uid="u"))
    if mebibytes < 0:
        assert not isinstance(plan, Infeasible)
    else:
        assert isinstance(plan, Infeasible)
        assert " MiB and the largest slot that it may have is " in str(plan)
        assert len(plan.reasons) == 1


@pytest.mark.parametrize(
    ("suffix", "times"),
    [
        ("n", "0.000000001"), ("u", "0.000001"), ("m", "0.001"), ("", "1"), ("k", "1000"), ("M", "1000000"),
        ("G", "1000000000"), ("T", "1000000000000"), ("P", "1000000000000000"), ("E", "1000000000000000000"),
        ("Ki", "1024"), ("Mi", "1048576"), ("Gi", "1073741824"), ("Ti", "1099511627776"), ("Pi", "1125899906842624"),
        ("Ei", "1152921504606846976"), ("e3", "1000"), ("E2", "100"),
    ],
)  # fmt: skip
def test_a_suffix_multiplies_by(suffix, times):
    assert quantities.parse(f"3{suffix}") == 3 * Decimal(times)
    assert quantities.parse(f"0.5{suffix}") == Decimal(times) / 2
