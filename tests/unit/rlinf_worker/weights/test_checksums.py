"""Of each view of each version one checksum, whoever says it; and of how many versions it is remembered."""

import pytest

from rlinf_api.errors import InvariantBroken
from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.weights.checksums import OWN, REMEMBERED, Checksums

V1, V2 = PolicyVersion(0, 1), PolicyVersion(0, 2)


def test_each_view_of_each_version_has_its_own_checksum():
    known = Checksums()
    for version, view, checksum in [(V1, OWN, 1), (V1, b"view", 2), (V2, OWN, 3), (V1, OWN, 1)]:
        known.note(version, view, checksum)
    assert [known.knows(*key) for key in [(V1, OWN), (V1, b"view"), (V2, OWN), (V2, b"view")]] == [True] * 3 + [False]
    assert known.conflicts == 0


def test_other_bytes_under_the_same_version_break_the_promise_and_the_first_ones_stay():
    known = Checksums()
    known.note(V1, OWN, 0xAB)
    for count in (1, 2):
        with pytest.raises(InvariantBroken, match="exist twice with different bytes") as broken:
            known.note(V1, OWN, 0xCD)
        assert "00000000000000cd" in str(broken.value)
        assert "00000000000000ab" in str(broken.value)
        assert known.conflicts == count
    known.note(V1, OWN, 0xAB)


def test_the_oldest_is_forgotten_when_there_are_too_many():
    known = Checksums()
    versions = [PolicyVersion(0, number) for number in range(REMEMBERED + 1)]
    for version in versions[:-1]:
        known.note(version, OWN, 7)
    assert known.knows(versions[0], OWN)
    known.note(versions[-1], OWN, 7)
    assert [known.knows(version, OWN) for version in versions] == [False] + [True] * REMEMBERED


def test_the_highest_branch_is_that_of_any_version_seen():
    known = Checksums()
    assert known.highest_branch == 0
    for branch in (4, 9, 2):
        known.note(PolicyVersion(branch, 1), OWN, branch)
    assert known.highest_branch == 9
