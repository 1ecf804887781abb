"""Patches, the dump."""

import yaml

from rljob.local.dump import Dump
from rljob.local.objects import clone, merge_patch
from rljob.local.store import MemoryStore


def test_merge_patch_removes_by_null_and_replaces_lists():
    assert merge_patch({"a": 1, "b": {"c": [1, 2], "d": 3}}, {"a": None, "b": {"c": [9]}}) == {"b": {"c": [9], "d": 3}}
    target = {"a": {"b": 1}}
    merge_patch(target, {"a": {"b": 2}})
    assert target == {"a": {"b": 1}}


def test_a_clone_shares_nothing():
    original = {"a": [{"b": 1}]}
    clone(original)["a"][0]["b"] = 2
    assert original == {"a": [{"b": 1}]}


async def test_the_dump_follows_the_store_and_hides_secrets(tmp_path):
    store, dump = MemoryStore(), Dump(tmp_path / "objects")
    await store.create({"kind": "Secret", "metadata": {"name": "s"}, "data": {"tls.key": "cHJpdmF0ZQ=="}})
    await store.create({"kind": "Pod", "metadata": {"name": "p"}, "spec": {"containers": []}})
    (tmp_path / "objects").mkdir()
    (tmp_path / "objects" / "notes.yaml").write_text("mine: true\n")
    dump.write(store.snapshot())
    secret = yaml.safe_load((tmp_path / "objects" / "secret-default-s.yaml").read_text())
    assert secret["data"] == {"tls.key": "<redacted: 12 characters>"}
    assert yaml.safe_load((tmp_path / "objects" / "pod-default-p.yaml").read_text())["spec"] == {"containers": []}
    written = (tmp_path / "objects" / "pod-default-p.yaml").stat().st_mtime_ns
    await store.delete("Secret", "s")
    dump.write(store.snapshot())
    assert sorted(path.name for path in (tmp_path / "objects").iterdir()) == ["notes.yaml", "pod-default-p.yaml"]
    assert (tmp_path / "objects" / "pod-default-p.yaml").stat().st_mtime_ns == written, (
        "an unchanged object is not rewritten"
    )
