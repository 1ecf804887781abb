"""Watches: order, namespaces, gaps that are told instead of hidden."""

import asyncio

import pytest

from rlinf_api.errors import InvariantBroken
from rlinf_api.store import Expired
from rljob.local import store as store_module
from rljob.local.store import MemoryStore


def pod(name, **labels):
    return {"kind": "Pod", "metadata": {"name": name, "labels": labels}, "spec": {}}


async def read(watch, count):
    events = [await asyncio.wait_for(anext(watch), 2) for _ in range(count)]
    return [(event.type, event.object["metadata"]["name"]) for event in events]


async def test_a_watch_without_a_version_starts_with_what_exists():
    store = MemoryStore()
    await store.create(pod("a"))
    watch = store.watch("Pod")
    await store.create(pod("b"))
    await store.delete("Pod", "a")
    assert await read(watch, 3) == [("ADDED", "a"), ("ADDED", "b"), ("DELETED", "a")]


async def test_a_watch_of_a_namespace_sees_no_other():
    store = MemoryStore()
    watch = store.watch("Pod", namespace="team")
    await store.create(pod("a"))
    await store.create({**pod("b"), "metadata": {"name": "b", "namespace": "team"}})
    await store.patch("Pod", "b", namespace="team", patch={"metadata": {"labels": {"x": "1"}}})
    await store.delete("Pod", "a")
    await store.delete("Pod", "b", namespace="team")
    assert await read(watch, 3) == [("ADDED", "b"), ("MODIFIED", "b"), ("DELETED", "b")]


async def test_a_slow_watcher_is_told_to_list_again_and_costs_nobody_anything(monkeypatch):
    monkeypatch.setattr(store_module, "WATCH_CAPACITY", 3)
    store = MemoryStore()
    slow, quick = store.watch("Pod"), store.watch("Pod")
    for n in range(4):
        await store.create(pod(f"p{n}"))
        assert await read(quick, 1) == [("ADDED", f"p{n}")]
    with pytest.raises(Expired, match="list, then watch again"):
        await anext(slow)
    for n in range(3):
        await store.delete("Pod", f"p{n}")
    assert await read(store.watch("Pod"), 1) == [("ADDED", "p3")]


async def test_a_closed_watch_ends_and_one_watch_has_one_reader():
    store = MemoryStore()
    watch = store.watch("Pod")
    reader = asyncio.create_task(anext(watch))
    await asyncio.sleep(0)
    with pytest.raises(InvariantBroken, match="open a watch for each"):
        await anext(watch)
    watch.close()
    with pytest.raises(StopAsyncIteration):
        await asyncio.wait_for(reader, 2)


async def test_a_quiet_patch_wakes_nobody():
    store = MemoryStore()
    await store.create(pod("a", x="1"))
    watch = store.watch("Pod")
    assert await read(watch, 1) == [("ADDED", "a")]
    await store.patch("Pod", "a", patch={"metadata": {"labels": {"x": "1"}}})
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(watch), 0.05)


async def test_a_watch_may_be_closed_twice_and_hears_no_more():
    store = MemoryStore()
    watch = store.watch("Pod")
    watch.close()
    watch.close()
    await store.create(pod("a"))
    with pytest.raises(StopAsyncIteration):
        await asyncio.wait_for(anext(watch), 2)
