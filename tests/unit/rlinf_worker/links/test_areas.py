"""Memory for large frames: used again, never under a living view, bounded."""

from __future__ import annotations

import numpy as np
import pytest

from rlinf_worker.links import areas

MIB = 1 << 20


@pytest.fixture(autouse=True)
def empty_pool(monkeypatch):
    monkeypatch.setattr(areas, "_idle", {})


def address(view):
    return np.frombuffer(view, np.uint8).ctypes.data


def test_an_area_is_used_again_when_its_last_view_is_gone():
    view = areas.take(3 * MIB)
    where = address(view)
    array = np.frombuffer(view[100:200], np.uint8)
    del view
    other = areas.take(3 * MIB)
    assert address(other) != where, "an array still views it"
    del array
    assert areas.idle_bytes() == 4 * MIB
    assert address(areas.take(2 * MIB + 1)) == where


def test_idle_areas_are_bounded(monkeypatch):
    monkeypatch.setattr(areas, "KEEP_BYTES", 8 * MIB)
    views = [areas.take(3 * MIB) for _ in range(5)]
    assert areas.idle_bytes() == 0
    views.clear()
    assert areas.idle_bytes() == 8 * MIB


def test_the_size_is_exactly_what_was_asked_for():
    for nbytes in (0, 1, MIB - 1, MIB, MIB + 1, 5 * MIB):
        view = areas.take(nbytes)
        assert (view.nbytes, view.format, view.readonly) == (nbytes, "B", False)
