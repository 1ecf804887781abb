"""Ranges of slots: what they expand to, and which are refused."""

import pytest

from rlinf_api import quantities, slots
from rlinf_api.errors import InvalidManifest
from rlinf_api.names import WorkerId


@pytest.mark.parametrize(
    ("text", "expanded"),
    [
        ("gpu/0/0", ["gpu/0/0"]),
        ("gpu/[2-2]/1", ["gpu/2/1"]),
        ("gpu/[0-1]/[2-3],cpu/0/0", ["gpu/0/2", "gpu/0/3", "gpu/1/2", "gpu/1/3", "cpu/0/0"]),
        ("gpu/[9-11]/0", ["gpu/9/0", "gpu/10/0", "gpu/11/0"]),
    ],
)
def test_a_range_is_these_slots_in_this_order(text, expanded):
    assert [str(slot) for slot in slots.expand(text)] == expanded


@pytest.mark.parametrize("text", ["gpu/[3-2]/0", "gpu/[-1]/0", "gpu/x/0", "gpu/0", "gpu/0/0/0", "gpu/1234567890/0"])
def test_what_is_no_range_is_refused(text):
    with pytest.raises(InvalidManifest):
        slots.expand(text)


def test_a_range_has_at_most_a_hundred_thousand_slots():
    assert len(list(slots.expand("gpu/[0-9999]/[0-9]"))) == 100_000
    with pytest.raises(InvalidManifest, match="100"):
        slots.expand("gpu/[0-9999]/[0-9],cpu/0/0")


@pytest.mark.parametrize(
    ("text", "is_within"), [("1m", True), ("0.9m", False), ("2", True), ("2001m", False), (" 1 ", True), ("x", False)]
)
def test_a_quantity_between_two_may_be_either(text, is_within):
    assert quantities.is_within(text, least=quantities.parse("1m"), most=2) is is_within


@pytest.mark.parametrize(
    "text",
    ["gpu/0/0", "gpu/[0-3]/[0-7]", "gpu/[0-1]/2,cpu/0/[1-2]", "gpu/0/[0-1],gpu/1/[1-2]", "gpu/0/1,gpu/2/1",
     "gpu/0/1,gpu/0/0", "a/0/0,b/0/1", "a/0/0,b/1/0", "gpu/0/0,gpu/1/1", ""],
)  # fmt: skip
def test_slots_are_written_as_short_as_they_can_be_read(text):
    assert slots.compress(slots.expand(text)) == text


def test_workers_have_consecutive_slots_of_one_pod_each():
    groups = slots.for_workers("gpu/0/[0-3]", 2, slots_per_worker=2, what="role 'a'")
    assert [[str(slot) for slot in group] for group in groups] == [["gpu/0/0", "gpu/0/1"], ["gpu/0/2", "gpu/0/3"]]
    assert slots.PlacedWorker(id=WorkerId("a/0"), role="a", rank=0, world=1, slots=groups[1]).pod == ("gpu", 0)
    with pytest.raises(InvalidManifest, match=r"role 'a' needs 2 x 2 slots: got 3 in 'gpu/0/\[0-2\]'"):
        slots.for_workers("gpu/0/[0-2]", 2, slots_per_worker=2, what="role 'a'")
    for text in ("gpu/0/0,gpu/0/1,gpu/1/1,gpu/0/2", "gpu/0/0,gpu/0/1,gpu/0/2,cpu/0/2"):
        with pytest.raises(InvalidManifest, match="role 'a': the slots of worker 1 lie in several pods"):
            slots.for_workers(text, 2, slots_per_worker=2, what="role 'a'")
