"""Ranges of slots: what they expand to, and which are refused."""

import pytest

from rlinf_api import quantities, slots
from rlinf_api.errors import InvalidManifest


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
