"""spec.checkpoint.keep reaches the store that prunes: by the driver's Welcome, into the role's context."""

from __future__ import annotations

from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.checkpoints.store import FileCheckpoints


def test_only_the_newest_checkpoints_are_kept(tmp_path):
    store = FileCheckpoints(str(tmp_path), keep=2)
    for number in (10, 20, 30):
        store.begin(PolicyVersion(0, number))
        store.finish(PolicyVersion(0, number), "{}")
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith("b")) == ["b0-20", "b0-30"]
