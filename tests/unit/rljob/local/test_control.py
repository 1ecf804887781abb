"""What `rljob plan` is answered by a run that goes on: over a store where no operator works."""

import asyncio

import pytest

from rlinf_api.errors import UserError
from rljob import plan as command
from rljob.local.control import Control
from rljob.local.store import MemoryStore

LABELS = {"rlinf.io/job": "j"}


@pytest.fixture
async def store():
    made = MemoryStore()
    await made.create(
        {
            "apiVersion": "rlinf.io/v1alpha1",
            "kind": "RLJob",
            "metadata": {"name": "j"},
            "spec": {"placement": {"mode": "Auto"}},
        }
    )
    for revision in (1, 2, 3):
        metadata = {"name": f"j-p{revision}", "labels": LABELS}
        await made.create(
            {"apiVersion": "rlinf.io/v1alpha1", "kind": "RLPlan", "metadata": metadata, "spec": {"revision": revision}}
        )
    return made


@pytest.fixture
async def control(store, tmp_path):
    async with Control(store, job="j", namespace="default", work_dir=tmp_path) as opened:
        yield opened


async def says(store, status, reason, *, current, message=""):
    """As the operator would, of the spec as it stands."""
    generation = (await store.get("RLJob", "j"))["metadata"]["generation"]
    condition = {
        "type": "PlanApplied", "status": status, "reason": reason, "message": message,
        "observedGeneration": generation, "lastTransitionTime": "2026-01-01T00:00:00Z",
    }  # fmt: skip
    patch = {"status": {"conditions": [condition], "plan": {"current": current}}}
    await store.patch("RLJob", "j", patch=patch, subresource="status")


async def placement(store):
    return (await store.get("RLJob", "j"))["spec"]["placement"]


async def pinning(store, tmp_path, name):
    """`rljob plan pin`, once its pin has been written."""
    call = asyncio.create_task(asyncio.to_thread(command.pin, tmp_path, name, timeout_s=20.0))
    async with asyncio.timeout(10):
        while (await placement(store)).get("pin") != name:
            await asyncio.sleep(0.01)
    return call


@pytest.mark.usefixtures("control")
@pytest.mark.parametrize(
    ("placed", "sentence"),
    [
        ({"pin": "j-p3"}, "j-p3 was pinned meanwhile, before j-p2 came into force"),
        ({"mode": "Auto", "pin": None}, "the pin was taken back meanwhile, before j-p2 came into force"),
    ],
)
async def test_a_pin_that_another_has_overtaken_is_not_waited_for(placed, sentence, store, tmp_path):
    call = await pinning(store, tmp_path, "j-p2")
    await store.patch("RLJob", "j", patch={"spec": {"placement": placed}})
    async with asyncio.timeout(10):
        assert await call == (False, sentence)


@pytest.mark.usefixtures("control")
async def test_what_is_wrong_with_the_pin_that_came_after_is_not_told_of_this_one(store, tmp_path):
    call = await pinning(store, tmp_path, "j-p2")
    await store.patch("RLJob", "j", patch={"spec": {"placement": {"pin": "j-p3"}}})
    await says(store, "False", "PinRefused", current="j-p1", message="j-p3 is refused")
    async with asyncio.timeout(10):
        is_in_force, said = await call
    assert not is_in_force
    assert said.startswith("j-p3 was pinned meanwhile")


@pytest.mark.usefixtures("control")
async def test_a_plan_that_came_into_force_before_the_next_pin_is_said_to_be(store, tmp_path):
    call = await pinning(store, tmp_path, "j-p2")
    await says(store, "True", "PlanInForce", current="j-p2", message="by hand")
    await store.patch("RLJob", "j", patch={"spec": {"placement": {"pin": "j-p3"}}})
    async with asyncio.timeout(10):
        assert await call == (True, "by hand")


@pytest.mark.usefixtures("control")
async def test_a_name_that_no_plan_bears_is_not_pinned(store, tmp_path):
    async with asyncio.timeout(10):
        is_in_force, said = await asyncio.to_thread(command.pin, tmp_path, "j-p22", timeout_s=20.0)
    assert not is_in_force
    assert said == "this job has no plan 'j-p22': wanted one of j-p1, j-p2, j-p3; nothing was changed"
    assert await placement(store) == {"mode": "Auto"}, "what is on its way goes on"


async def plan_from(store, name, *, revision, of):
    metadata = {"name": name, "labels": LABELS}
    spec = {"revision": revision, "basedOn": {"revision": of}}
    await store.create({"apiVersion": "rlinf.io/v1alpha1", "kind": "RLPlan", "metadata": metadata, "spec": spec})


@pytest.mark.usefixtures("control")
async def test_a_rollback_pins_what_the_plan_in_force_came_from(store, tmp_path):
    await plan_from(store, "j-p4", revision=4, of=2)
    await says(store, "True", "PlanInForce", current="j-p4")
    call = asyncio.create_task(asyncio.to_thread(command.roll_back, tmp_path, timeout_s=20.0))
    async with asyncio.timeout(10):
        while (await placement(store)).get("pin") != "j-p2":
            await asyncio.sleep(0.01)
    await says(store, "True", "PlanInForce", current="j-p2", message="j-p2: as before")
    assert await call == (True, "j-p2: as before")


@pytest.mark.usefixtures("control")
@pytest.mark.parametrize(("current", "got"), [("j-p1", "j-p1 came from no other"), ("", "no plan in force")])
async def test_there_may_be_nothing_to_go_back_to(store, tmp_path, current, got):
    await says(store, "True", "PlanInForce", current=current)
    async with asyncio.timeout(10):
        is_in_force, said = await asyncio.to_thread(command.roll_back, tmp_path, timeout_s=20.0)
    assert not is_in_force
    assert said == f"there is nothing to go back to: got {got}; pin one of `rljob plan history`"
    assert await placement(store) == {"mode": "Auto"}


@pytest.mark.usefixtures("control")
async def test_a_plan_is_approved_once_and_by_whom_is_not_written_over(store, tmp_path):
    async def approve(name, by):
        async with asyncio.timeout(10):
            return await asyncio.to_thread(command.approve, tmp_path, name, by=by)

    assert await approve("j-p2", "ada") == (True, "j-p2 is approved by ada")
    assert await approve("j-p2", "bob") == (True, "j-p2 was approved by ada already")
    annotations = (await store.get("RLPlan", "j-p2"))["metadata"]["annotations"]
    assert annotations == {"rlinf.io/approved-by": "ada"}
    assert await approve("j-p22", "ada") == (False, "this job has no plan 'j-p22'; nothing was changed")


@pytest.mark.usefixtures("control")
async def test_a_pin_is_taken_back_and_what_is_in_force_stays(store, tmp_path):
    pin = {"spec": {"placement": {"mode": "Pinned", "pin": "j-p2"}}}
    await store.patch("RLJob", "j", patch=pin)
    await says(store, "True", "PlanInForce", current="j-p2")
    async with asyncio.timeout(10):
        done = await asyncio.to_thread(command.unpin, tmp_path, mode="Disaggregated")
        assert done == (True, "j-p2 is not pinned any more: the scheduler goes on from j-p2")
        assert await placement(store) == {"mode": "Disaggregated"}
        assert await asyncio.to_thread(command.unpin, tmp_path, mode="Auto") == (True, "no plan is pinned")
        assert await placement(store) == {"mode": "Disaggregated"}
        with pytest.raises(UserError, match="planned so: got 'Pinned', wanted Auto, Collocated, Disaggregated"):
            await asyncio.to_thread(command.unpin, tmp_path, mode="Pinned")
