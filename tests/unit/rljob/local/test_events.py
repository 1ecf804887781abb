"""Events of the local kubelet: what is tried again is one object, whatever numbers and names its message has."""

from datetime import UTC, datetime

import pytest

from rljob.local import dump
from rljob.local.containers import warn_of
from rljob.local.store import MAX_EVENTS, MemoryStore
from tests.local_pods import pod


async def told(store):
    return (await store.list("Event")).items


async def test_each_try_on_a_full_disk_counts_up_in_one_event_that_says_the_newest():
    store = MemoryStore()
    made = await store.create(pod("a", "true"))
    for free in range(40):
        message = (
            f'MountVolume.SetUp failed for volume "tls": No space left (/dev/shm/..{free:x}z, {free} of 9 bytes free)'
        )
        await warn_of(store, made, reason="FailedMount", message=message)
    await warn_of(store, made, reason="Failed", message='secret "s" not found')
    failed, mount = sorted(await told(store), key=lambda event: event["reason"])
    assert (mount["count"], mount["message"]) == (40, message)
    assert (failed["count"], failed["message"]) == (1, 'secret "s" not found')


async def test_pods_of_one_name_have_events_of_their_own():
    store = MemoryStore()
    for _ in range(2):
        made = await store.create(pod("a", "true"))
        await warn_of(store, made, reason="FailedMount", message="no room")
        await store.delete("Pod", "a")
    assert [event["count"] for event in await told(store)] == [1, 1]


async def test_the_events_that_were_said_longest_ago_are_forgotten():
    store = MemoryStore(clock=lambda: datetime(2026, 11, 22, tzinfo=UTC))
    first = await store.create(pod("first", "true"))
    await warn_of(store, first, reason="FailedMount", message="no room")
    for number in range(MAX_EVENTS + 20):
        made = await store.create(pod(f"p{number}", "true"))
        await warn_of(store, made, reason="FailedMount", message="no room")
        await warn_of(store, first, reason="FailedMount", message="no room")
    kept = {event["involvedObject"]["name"] for event in await told(store)}
    assert len(kept) == MAX_EVENTS
    assert kept == {"first", *(f"p{number}" for number in range(21, MAX_EVENTS + 20))}


async def test_an_event_that_is_forgotten_leaves_watches_and_the_view():
    store = MemoryStore()
    made = await store.create(pod("a", "true"))
    watch = store.watch("Event")
    for number in range(MAX_EVENTS + 1):
        await warn_of(store, made, reason=f"R{number}", message="")
    seen = [await anext(watch) for _ in range(MAX_EVENTS + 2)]
    assert [event.type for event in seen[-2:]] == ["ADDED", "DELETED"]
    assert seen[-1].object["reason"] == "R0"
    assert not any(obj.get("reason") == "R0" for obj in store.snapshot())
    watch.close()


def test_what_a_full_disk_took_of_a_file_is_taken_back(tmp_path):
    (tmp_path / "event.yaml").mkdir()  # what os.replace refuses
    with pytest.raises(OSError, match=r"event\.yaml"):
        dump.write_atomically(tmp_path / "event.yaml", "text")
    assert [path.name for path in tmp_path.iterdir()] == ["event.yaml"]
