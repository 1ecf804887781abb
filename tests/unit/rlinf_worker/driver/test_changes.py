"""What another plan changes for the workers of a running job."""

import pytest

from rlinf_api.placement import Placement, resolve
from rlinf_api.plan import LeaseSetPlan, TurnPlan
from rlinf_worker.driver.changes import Changes, between, check
from rlinf_worker.driver.topology import Topology
from tests.builders_driver import make_job


def placed(**changes) -> Placement:
    return make_job(**{"envs": 2, "slices": 4, "elastic": True, **changes}).placement


OLD = placed()


@pytest.mark.parametrize(
    ("new", "beside", "after", "gone", "gang"),
    [
        (placed(micro_batch=1, depth=5), [], [], [], False),
        (placed(envs=3), ["env/2"], [], [], False),
        (placed(envs=1), [], [], ["env/1"], False),
        (placed(envs=3, pods=2), ["env/2"], [], [], False),
        (placed(actors=2), [], ["actor/0", "actor/1"], ["actor/0"], True),
    ],
)
def test_who_stays_who_comes_and_who_goes(new, beside, after, gone, gang):
    found = between(OLD, new, gang_roles=("actor",))
    assert (sorted(found.beside), sorted(found.after), sorted(found.gone), found.gang) == (beside, after, gone, gang)
    assert found.kept == {w.id for w in new.workers} - found.beside - found.after


def test_a_plan_that_changes_nothing_forms_no_gang_anew_and_needs_no_checkpoint():
    """As a first plan is looked at, once the flow has said its channels."""
    plan = make_job().plan.model_copy(update={"channels": [], "cycles": []})
    check(plan, Changes(), topology=Topology(), cycles=(), checkpoint_uri="")


def test_gangs_that_end_steps_are_formed_anew_together():
    old, new = placed(critics=1), placed(critics=1, actors=2)
    both = between(old, new, gang_roles=("actor", "critic"))
    assert (sorted(both.after), sorted(both.gone), both.gang) == (
        ["actor/0", "actor/1", "critic/0"], ["actor/0", "critic/0"], True
    )  # fmt: skip
    one = between(old, new, gang_roles=("actor",), gangs=("critic",))
    assert (sorted(one.after), one.gang) == (["actor/0", "actor/1"], True)


def test_a_new_pod_is_named_with_or_without_a_worker():
    assert between(OLD, placed(envs=2, pods=2), gang_roles=("actor",)).new_pods == {("sim", 1)}


def test_a_role_of_another_size_is_named_as_the_flow_may_have_asked_for_it():
    assert between(OLD, placed(envs=3), gang_roles=("actor",)).resized_roles == {"env"}
    assert between(OLD, placed(depth=4), gang_roles=("actor",)).resized_roles == set()


def moved(slots: str) -> Placement:
    job = make_job(envs=2, slices=4, elastic=True)
    workers = [w.model_copy(update={"slots": slots}) if w.role == "env" else w for w in job.plan.workers]
    return resolve(job.plan.model_copy(update={"workers": workers}), job.spec)


def test_a_worker_in_another_slot_starts_again_there_with_the_commit():
    found = between(OLD, moved("sim/0/0,sim/0/3"), gang_roles=("actor",))
    assert [sorted(s) for s in (found.gone, found.after, found.beside)] == [["env/1"], ["env/1"], []]


def test_a_new_worker_on_a_slot_that_is_held_waits_for_the_commit():
    job = make_job(envs=3, slices=4, elastic=True)
    workers = [
        w.model_copy(update={"slots": "sim/0/2,sim/0/3,sim/0/1"}) if w.role == "env" else w for w in job.plan.workers
    ]
    new = resolve(job.plan.model_copy(update={"workers": workers}), job.spec)
    assert "env/2" in between(OLD, new, gang_roles=("actor",)).after


def in_turns(*roles: str) -> Placement:
    """The same workers on the same slots, these roles in turns on those of pool gpu."""
    job = make_job(envs=2, slices=4, elastic=True)
    workers = [w.model_copy(update={"slots": "gpu/0/0"}) if w.role in roles else w for w in job.plan.workers]
    sets = [LeaseSetPlan(name="all", slots="gpu/0/0", turns=[TurnPlan(role=role) for role in roles])]
    plan = job.plan.model_copy(update={"workers": workers, "lease_sets": sets if len(roles) > 1 else []})
    return resolve(plan, job.spec)


def test_who_begins_or_ceases_to_take_turns_on_its_slots_stays_in_its_process_gangs_too():
    alone, shared = OLD, in_turns("rollout", "actor")
    slots = {w.id: w.slots for w in alone.workers}
    stay = {w.id for w in shared.workers if slots[w.id] == w.slots}
    assert {"env/0", "env/1"} < stay < slots.keys(), "one of both comes to the other's slot"
    for old, new in ((alone, shared), (shared, alone)):
        found = between(old, new, gang_roles=())
        assert found.kept == stay
        assert found.gone == found.after == slots.keys() - stay
    gang = next(role for role in ("rollout", "actor") if f"{role}/0" in stay)
    assert not between(alone, shared, gang_roles=(gang,)).gang
