"""Which reports of a job are forgotten first."""

import pytest

from rlinf_api.errors import InvalidManifest
from rlinf_api.plan import JobRef
from rlinf_api.profile import Batch, Move, Number, Profile, RoleProfile, forget, read_lines

ONE = Number(value=1.0, count=1)


def report(step, *, moves=(), sizes=(8.0,), role="rollout"):
    own = RoleProfile(
        name=role, pool="gpu", workers=1, seconds={},
        batches=[Batch(size=size, units=size, seconds=ONE) for size in sizes],
        moves=[Move(what=what, seconds=ONE) for what in moves],
    )  # fmt: skip
    return Profile(
        key="sha256:" + "0" * 64, job=JobRef(name="j", uid="u"), revision=1, first_step=step, last_step=step, steps=1,
        step_seconds=ONE, roles=[own],
    )  # fmt: skip


def left(*reports, most):
    found = list(reports)
    forget(found, most=most)
    return [profile.last_step for profile in found]


def test_the_oldest_goes_where_all_say_the_same():
    assert left(*(report(n) for n in range(1, 8)), most=3) == [5, 6, 7]
    assert left(report(1), report(2), most=2) == [1, 2]


def test_what_no_newer_one_tells_stays():
    first = report(1, moves=["load", "offload"])
    assert left(first, *(report(n) for n in range(2, 8)), most=3) == [1, 6, 7]
    assert left(first, *(report(n) for n in range(2, 6)), report(6, moves=["load"]), report(7), most=3) == [1, 6, 7]
    told_again = report(6, moves=["load", "offload"])
    assert left(first, *(report(n) for n in range(2, 6)), told_again, report(7), most=3) == [5, 6, 7]


def test_the_smallest_and_the_largest_batch_stay_but_not_before_moves():
    probe = report(2, sizes=(4.0,))
    assert left(report(1), probe, *(report(n) for n in range(3, 8)), most=2) == [2, 7]
    many = [report(n, sizes=(float(n),)) for n in range(2, 9)]
    assert left(report(1, moves=["load"]), *many, most=3) == [1, 7, 8]


def test_one_role_says_nothing_of_another():
    of_train = report(1, moves=["load"], role="train")
    assert left(of_train, *(report(n, moves=["load"]) for n in range(2, 6)), most=2) == [1, 5]


def test_the_newest_always_stays():
    firsts = [report(n, moves=[what]) for n, what in enumerate(("load", "offload", "publish"), 1)]
    assert left(*firsts, report(4), most=2) == [3, 4]


def test_lines_are_read_and_a_wrong_one_is_named():
    text = f"{report(1).to_json()}\n\n{report(2).to_json()}\n"
    assert read_lines(text) == (report(1), report(2))
    with pytest.raises(InvalidManifest, match="a profile is not JSON"):
        read_lines(text + "{")
