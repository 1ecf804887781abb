"""Events that are told again count up; of many of one reason a few stand by themselves."""

import dataclasses

import pytest

from rlinf_api.errors import RLinfError
from rlinf_operator.reconcile import telling
from rlinf_operator.reconcile.state import Event
from rlinf_operator.reconcile.telling import COMBINED, TOLD_APART, WINDOW_S, EventRecorder
from rljob.local.store import MemoryStore
from tests.builders import NOW, ppo_job


class World:
    def __init__(self):
        self.store, self.now = MemoryStore(clock=lambda: NOW), 0.0
        self.observed = ppo_job().world().created().observed()
        self.recorder = EventRecorder(self.store, clock=lambda: self.now)

    async def tell(self, *messages, reason="PodEnded", pod=""):
        told = [Event(type="Warning", reason=reason, message=message, pod=pod) for message in messages]
        await self.recorder.tell(self.observed, told, now=NOW)

    async def events(self):
        items = (await self.store.list("Event")).items
        return sorted((e["reason"], e["message"], e["count"]) for e in items)


async def test_what_is_told_again_is_one_event_with_a_higher_count():
    world = World()
    for _ in range(3):
        await world.tell("it ended")
    await world.tell("it ended", "it ended")
    await world.tell("another one ended")
    await world.tell("it ended", reason="Other")
    assert await world.events() == [
        ("Other", "it ended", 1), ("PodEnded", "another one ended", 1), ("PodEnded", "it ended", 5),
    ]  # fmt: skip


async def test_the_same_words_about_another_pod_or_of_another_job_are_another_event():
    world = World()
    await world.tell("it ended", pod="math-sim-0-a1")
    await world.tell("it ended", pod="math-sim-1-a1")
    job = dataclasses.replace(world.observed.job, uid="of another job")
    world.observed = dataclasses.replace(world.observed, job=job)
    await world.tell("it ended", pod="math-sim-0-a1")
    assert len(await world.events()) == 3


async def test_of_many_of_one_reason_the_first_stand_apart_and_the_rest_are_counted_in_one():
    world = World()
    await world.tell(*(f"pod {number} ended" for number in range(2000)))
    found = await world.events()
    assert len(found) == TOLD_APART + 1
    [combined] = [event for event in found if event[1].startswith(COMBINED)]
    assert combined == ("PodEnded", f"{COMBINED}pod 1999 ended", 2000 - TOLD_APART)
    await world.tell("pod 2000 ended", "pod 3 ended")
    found = await world.events()
    assert ("PodEnded", f"{COMBINED}pod 2000 ended", 2001 - TOLD_APART) in found
    assert ("PodEnded", "pod 3 ended", 2) in found, "one that stands apart goes on"
    assert len(found) == TOLD_APART + 1


async def test_trouble_of_a_while_ago_is_no_part_of_what_is_told_now():
    world = World()
    await world.tell(*(f"pod {number} ended" for number in range(TOLD_APART)))
    world.now = WINDOW_S
    await world.tell("still combined")
    world.now = WINDOW_S + 1
    await world.tell("apart again")
    found = await world.events()
    assert ("PodEnded", f"{COMBINED}still combined", 1) in found
    assert ("PodEnded", "apart again", 1) in found


async def test_an_event_that_the_api_server_has_forgotten_is_made_again():
    world = World()
    await world.tell("it ended")
    await world.tell("it ended")
    [event] = (await world.store.list("Event")).items
    await world.store.delete("Event", event["metadata"]["name"], namespace="team")
    await world.tell("it ended")
    assert await world.events() == [("PodEnded", "it ended", 1)]


async def test_an_event_that_is_refused_ends_nothing_and_a_bug_does(caplog):
    world = World()

    async def refuse(obj):
        raise RLinfError("no")

    world.store.create = refuse  # type: ignore[method-assign]
    await world.tell("it ended")
    assert "event lost" in caplog.text

    async def broken(obj):
        raise KeyError("kind")

    world.store.create = broken  # type: ignore[method-assign]
    with pytest.raises(KeyError):
        await world.tell("it ended")


async def test_no_more_is_remembered_than_the_bound(monkeypatch):
    monkeypatch.setattr(telling, "KEPT", 3)
    world = World()
    for number in range(5):
        await world.tell("a", reason=f"R{number}")
    assert (len(world.recorder._known), len(world.recorder._reasons)) == (3, 3)
    await world.tell("a", reason="R4")
    await world.tell("a", reason="R0")
    assert [count for reason, _, count in await world.events() if reason == "R4"] == [2]
    assert [count for reason, _, count in await world.events() if reason == "R0"] == [1, 1], "it was forgotten"
