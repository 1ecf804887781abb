"""What operator and scheduler ask of the API server: where, and of which objects by name."""

from rlinf_operator import access


def test_in_its_own_namespace_the_operator_has_the_lease_and_two_secrets_by_name():
    """`create` cannot be limited to a name."""
    own = [(rule.resource, rule.verbs, rule.names) for rule in access.OPERATOR if rule.scope == "own"]
    assert own == [
        ("leases", ("create",), ()),
        ("leases", ("get", "update"), ("rlinf-operator",)),
        ("secrets", ("create",), ()),
        ("secrets", ("get", "patch"), ("rlinf-operator-ca",)),
        ("secrets", ("patch",), ("rlinf-scheduler-tls",)),
    ]


def test_where_jobs_are_the_operator_reads_no_secret_and_no_right_is_by_name():
    in_jobs = [rule for rule in access.OPERATOR if rule.scope == "jobs"]
    assert {rule.resource: rule.verbs for rule in in_jobs}["secrets"] == ("create", "patch")
    assert [rule.resource for rule in in_jobs if rule.names] == []
    assert {rule.resource for rule in in_jobs} == {
        "rljobs", "rljobs/status", "rljobs/finalizers", "rlplans", "rlplans/status", "pods", "services",
        "networkpolicies", "poddisruptionbudgets", "configmaps", "secrets", "events", "workloads", "workloads/status",
        "podgroups",
    }  # fmt: skip


def test_namespaces_are_watched_where_they_are_selected_by_labels_and_nowhere_else():
    rules = [rule for rule in access.OPERATOR if rule.resource == "namespaces"]
    assert [(rule.scope, rule.verbs) for rule in rules] == [("selected", ("list", "watch"))]


def test_the_scheduler_makes_plans_where_jobs_are_and_nothing_else():
    found = [(rule.scope, rule.resource, rule.verbs, rule.names) for rule in access.SCHEDULER]
    assert found == [
        ("jobs", "rlplans", ("create", "get", "list", "patch"), ()),
        ("jobs", "rlprofiles", ("create", "delete", "get", "list", "patch"), ()),
        ("jobs", "rljobs", ("get",), ()),
        ("jobs", "rljobs/finalizers", ("update",), ()),
    ]
