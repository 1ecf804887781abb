"""What a pass takes for seen, and for decided, where nobody says anything: nothing is there, and nothing is done."""

import dataclasses

import pytest

from rlinf_operator.policies import pod_view
from rlinf_operator.reconcile import state

DEFAULTS = {
    pod_view.PodPlace: {"pool": "", "ordinal": 0},
    pod_view.PodView: {
        "pool": "", "ordinal": 0, "attempt": 1, "life": 1, "inputs": "", "phase": "Pending", "lingers": False,
        "ready": False, "node": "",
        "ip": "", "started_at": None, "deleted_at": None, "disruption": "", "exit_code": None, "exit_reason": "",
        "exit_message": "", "failed_init": "", "finished_at": None, "waiting_reason": "", "waiting_message": "",
        "unschedulable": "", "scheduled_at": None, "pod_reason": "", "pod_message": "",
    },
    state.PlanView: {"uid": "", "problem": "", "approved_by": "", "stays": ""},
    state.ConfigView: {"issuer": ""},
    state.PolicyView: {},
    state.DriverView: {"report": None, "silent_s": 0.0},
    state.Observed: {
        "pods": (), "plans": (), "has_service": False, "network_policy": None, "disruption_budget": "",
        "config": None, "driver": None,
        "unknown": (), "trusted": (), "runtime": None, "queue": None, "progress_due": True,
    },
    state.Event: {"pod": ""},
    state.Instruct: {"switches": 0, "uid": ""},
    state.DeletePod: {"for_successor": False, "makes_room": "", "grace_period_s": None},
    state.Decision: {
        "request_plan": "", "highest_revision": 0, "plan_within": None, "queue": None,
        "service": None, "network_policy": None, "delete_network_policy": "", "disruption_budget": None,
        "delete_disruption_budget": "",
        "certificates": (), "renew_certificates": False, "write_config": False, "create_pods": (),
        "late_pods": frozenset(), "later_pods": (), "delete_pods": (), "instruct": None, "adjust": None, "drain": None,
        "plan_statuses": (), "delete_plans": (),
        "delete_job": False, "ruled": (), "events": (), "events_of_made": (), "requeue_after_s": None,
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", DEFAULTS, ids=lambda kind: kind.__name__)
def test_what_nobody_says_is_nothing(kind):
    fields = dataclasses.fields(kind)
    assert {f.name: f.default for f in fields if f.default is not dataclasses.MISSING} == DEFAULTS[kind]
