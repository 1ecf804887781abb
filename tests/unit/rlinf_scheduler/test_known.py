"""What is known of a job as its next plan is decided: whose steps count, what is left, who gets no more pods."""

import pytest

from rlinf_api.job import RLJobSpec
from rlinf_api.plan import RLPlanSpec
from rlinf_api.profile import Profile
from rlinf_scheduler.replan.evidence import own_of
from rlinf_scheduler.replan.known import Case, Known, PlanRecord, pods_of

ROLES = [{"name": "env", "kind": "my.roles:Role"}, {"name": "actor", "kind": "my.roles:Role"}]


def job(*, steps: int = 100, profile_steps: int = 5) -> RLJobSpec:
    return RLJobSpec.model_validate(
        {
            "flow": {"name": "my.flow:main", "steps": steps},
            "roles": ROLES,
            "pools": [{"name": name, "roles": ["env", "actor"], "pods": {"min": 1, "max": 9}} for name in ("a", "b")],
            "placement": {"profileSteps": profile_steps},
        }
    )


def planned(revision: int, *, of: int = 1, a: int = 1, b: int = 1, code: str = "Initial") -> RLPlanSpec:
    return RLPlanSpec.model_validate(
        {
            "job": {"name": "mine", "uid": "u"}, "revision": revision, "basedOn": {"revision": of},
            "pools": [{"name": "a", "pods": a}, {"name": "b", "pods": b}],
            "workers": [{"role": "env", "count": 1, "slots": "a/0:0"}], "reason": {"code": code},
        }
    )  # fmt: skip


def report(last: int, *, steps: int = 1, revision: int = 1) -> Profile:
    return Profile.model_validate(
        {
            "key": "sha256:" + 64 * "a", "job": {"name": "mine", "uid": "u"}, "revision": revision,
            "firstStep": last - steps + 1, "lastStep": last, "steps": steps,
            "stepSeconds": {"value": float(last), "count": steps},
            "roles": [{"name": "env", "pool": "a", "workers": 1, "seconds": {}}],
        }
    )  # fmt: skip


def known(*reports: Profile, plans: tuple[PlanRecord, ...] = (PlanRecord(spec=planned(1)),), **more) -> Known:
    return Known(Case(job=more.pop("job", job()), plans=plans, profiles=reports or (report(1),), **more))


@pytest.mark.parametrize(
    ("reports", "own", "newest"),
    [
        ([(1, 1)], [1], [1]),
        ([(1, 1), (2, 1)], [2], [2]),
        ([(3, 3), (4, 1)], [3, 4], [3, 4]),
        ([(1, 1), (4, 3), (7, 3)], [4, 7], [4, 7]),
        ([(1, 1), (4, 3), (6, 2), (9, 3)], [4, 6, 9], [6, 9]),
        ([(1, 1), (4, 3), (5, 1), (6, 1), (9, 3)], [4, 5, 6, 9], [5, 6, 9]),
        ([(1, 1), (6, 5), (11, 5)], [6, 11], [11]),
    ],
)
def test_the_report_in_which_a_plan_warmed_up_does_not_count_and_the_newest_make_five_steps(reports, own, newest):
    """By their last steps."""
    found = known(report(90, revision=2), *(report(last, steps=steps) for last, steps in reports))
    assert [p.last_step for p in found.own] == own
    assert [p.last_step for p in found.newest] == newest
    assert [p.last_step for p in own_of(found.case.profiles, 2)] == [90]
    assert own_of(found.case.profiles, 3) == ()


def test_steps_are_all_of_a_plan_until_it_is_settled_and_then_the_newest():
    reports = (report(1), report(4, steps=3), report(9, steps=5))
    assert not known(*reports).is_settled
    assert not known(*reports, considered=9, settled=2).is_settled, "another revision was looked at"
    assert known(*reports, considered=2, settled=1).is_settled
    assert known(*reports, considered=9, settled=2).now.mean == pytest.approx((3 * 4.0 + 5 * 9.0) / 8)
    assert known(*reports, considered=2, settled=1).now.mean == pytest.approx(9.0)


def test_what_is_left_of_a_job_and_how_many_steps_and_which_revision_come_next():
    assert [known(report(last)).remaining for last in (1, 99, 100, 101)] == [99, 1, 0, 0]
    assert [known(job=job(profile_steps=n)).wanted_steps for n in (2, 3, 5)] == [1, 2, 4]
    probe = (PlanRecord(spec=planned(1, code="Probe")),)
    assert [known(job=job(profile_steps=n), plans=probe).wanted_steps for n in (1, 2, 3, 5)] == [1, 1, 2, 2]
    two = (PlanRecord(spec=planned(1)), PlanRecord(spec=planned(4)))
    assert [known(plans=two, highest=highest).next_revision for highest in (0, 4, 7)] == [5, 5, 8]
    assert known(plans=two).record == two[0]
    assert known(plans=two).plan == two[0].spec
    assert known(report(3, revision=2), plans=two).record is None
    assert [pods_of(planned(1, a=2, b=3), pool) for pool in ("a", "b", "c")] == [2, 3, 0]


def later(revision: int, *, a: int = 2, b: int = 1, of: int = 1, at: float = 0.0, failed: bool = False) -> PlanRecord:
    return PlanRecord(spec=planned(revision, of=of, a=a, b=b), failed=failed or at > 0, no_node_at=at)


LOST = [later(n, at=1000.0 * n) for n in range(2, 9)]


@pytest.mark.parametrize(
    ("records", "now", "wanted"),
    [
        ([], 0.0, {}),
        ([LOST[0]], 2001.0, {"a": 2600.0}),
        ([LOST[0]], 2599.0, {"a": 2600.0}),
        ([LOST[0]], 2600.0, {}),
        (LOST[:2], 3001.0, {"a": 3000 + 1200.0}),
        (LOST[:5], 6001.0, {"a": 6000 + 9600.0}),
        (LOST, 8001.0, {"a": 8000 + 9600.0}),  # at most 160 minutes
        ([LOST[0], later(3)], 2001.0, {}),  # there was a node since
        ([LOST[0], later(3), later(4, at=4000.0)], 4001.0, {"a": 4600.0}),
        ([LOST[0], later(3, failed=True)], 2001.0, {"a": 2600.0}),  # it failed for something else
        ([LOST[0], later(3, a=1)], 2001.0, {"a": 2600.0}),  # it needed none
        ([later(2, a=1, at=2000.0)], 2001.0, {}),  # it asked for no more than there were
        ([later(2, of=9, at=2000.0)], 2001.0, {}),  # nobody knows what there were
        ([later(2, b=2, at=2000.0)], 2001.0, {"a": 2600.0, "b": 2600.0}),
        ([LOST[0], later(3, of=2, a=2, b=3, at=3000.0)], 2001.0, {"a": 2600.0, "b": 3600.0}),
    ],
)
def test_a_pool_without_a_node_is_asked_for_no_more_pods_for_ten_minutes_then_twenty(records, now, wanted):
    found = known(plans=(PlanRecord(spec=planned(1)), *records), now=now)
    assert dict(found.no_pods_until) == wanted
    assert dict(found.most_pods) == dict.fromkeys(wanted, 1), "as many as the plan in force has"
