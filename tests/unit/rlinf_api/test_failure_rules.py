"""spec.failurePolicy.rules: which rule a failure meets, and which rules are refused, with what to write."""

from typing import Any

import pytest

from rlinf_api import failure_rules, supported
from rlinf_api.job import FailureAction, FailureRule
from tests.builders import ppo_job


def said(*rules):
    return [str(p) for p in supported.validate(ppo_job().with_spec(failurePolicy={"rules": list(rules)}).build())[1]]


AT = "spec.failurePolicy.rules[0]"
ANY = {"action": "Ignore"}
WRONG: dict[str, tuple[list[dict[str, Any]], str]] = {
    "a role that is not there": (
        [{"role": "critic", "action": "FailJob"}],
        f"{AT}.role: got 'critic', which is none of spec.roles (env, rollout, actor); correct it",
    ),
    "a pool that is not there": (
        [{"pool": "gpu", "action": "FailJob"}],
        f"{AT}.pool: got 'gpu', which is none of spec.pools (sim, train); correct it",
    ),
    "a pool that does not run the role": (
        [{"pool": "sim", "role": "actor", "action": "FailJob"}],
        f"{AT}: pool 'sim' does not run role 'actor', so the rule meets nothing; correct one",
    ),
    "a bound of what restarts nothing": (
        [{"action": "FailJob", "maxRestarts": 3}],
        f"{AT}.maxRestarts: got 3, but action FailJob counts no restarts; remove it, or write RestartWorker or "
        "RestartPod or RestartJob",
    ),
    "a pause of what starts nothing": (
        [{"action": "Suspend", "backOffSeconds": 3}],
        f"{AT}.backOffSeconds: got 3, but action Suspend starts nothing again; remove it",
    ),
    "a worker's restart for a pod's end": (
        [{"action": "RestartWorker", "reasons": ["OOMKilled", "NodeLost"]}],
        f"{AT}.action: got RestartWorker, but NodeLost is of a whole pod; write RestartPod",
    ),
    "an exit code of what has none": (
        [{"action": "RestartPod", "exitCodes": [3], "reasons": ["Unschedulable"]}],
        f"{AT}: has exitCodes and Unschedulable, which is no exit, so it meets nothing; write two rules",
    ),
    "an exit code twice": (
        [{"action": "RestartPod", "exitCodes": [3, 3]}],
        f"{AT}: names an exit code or a reason twice; remove one",
    ),
    "a name twice": (
        [{"name": "a", "role": "env", "action": "Ignore"}, {"name": "a", "action": "Ignore"}],
        "spec.failurePolicy.rules[a].name: 'a' is the name of another rule; rename one",
    ),
    "a rule that none comes past": (
        [ANY, {"role": "env", "action": "FailJob"}],
        f"{AT}: names nothing and so meets every failure, but 1 rules stand behind it and are never looked at; "
        "move it to the end",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_rule_that_can_mean_nothing_is_refused_with_what_to_write(case):
    rules, sentence = WRONG[case]
    assert said(*rules) == [sentence]


@pytest.mark.parametrize(
    ("rule", "sentence"),
    [
        ({"action": "Restart"}, "got 'Restart', wanted 'RestartWorker', 'RestartPod', 'RestartJob', 'FailJob', "),
        ({}, "action: is missing; write it"),
        ({"action": "Ignore", "exitCodes": [0]}, "got 0, wanted at least 1"),
        ({"action": "Ignore", "exitCodes": [256]}, "got 256, wanted at most 255"),
        ({"action": "Ignore", "reasons": ["OOM"]}, "got 'OOM', wanted "),
        ({"action": "Ignore", "name": "A B"}, "got 'A B', wanted text that matches"),
        ({"action": "Ignore", "exitcodes": [1]}, "did you mean 'exitCodes'?"),
    ],
)
def test_a_value_that_is_none_is_refused(rule, sentence):
    assert any(sentence in problem for problem in said(rule)), said(rule)


def test_each_action_and_reason_is_taken():
    rules = [{"action": a, "role": "env"} for a in ("RestartWorker", "RestartPod", "RestartJob", "FailJob", "Suspend")]
    reasons = ["OOMKilled", "Evicted", "NodeLost", "ImagePull", "Unschedulable", "DeadlineExceeded"]
    assert said(*rules, {"name": "rest", "reasons": reasons, "action": "Ignore"}, ANY) == []


FAILURE: dict[str, Any] = {"roles": ["env"], "pool": "sim", "exit_code": 3, "reason": "Exit3"}


def met(rules, **failure):
    found = failure_rules.met(
        [FailureRule.model_validate(rule) for rule in rules],
        **(FAILURE | failure),
    )
    return found.called if found is not None else None


def test_the_first_rule_of_which_all_is_true_counts_and_is_called_by_its_name_or_place():
    rules = [
        {"role": "actor", "action": "FailJob"},
        {"pool": "train", "action": "FailJob"},
        {"exitCodes": [4], "action": "FailJob"},
        {"reasons": ["OOMKilled"], "action": "FailJob"},
        {"role": "env", "exitCodes": [3, 9], "action": "Ignore"},
        {"name": "rest", "action": "Suspend"},
    ]
    assert met(rules) == "4"
    assert met(rules, roles=["rollout", "actor"]) == "0"
    assert met(rules, pool="train") == "1"
    assert met(rules, exit_code=4) == "2"
    assert met(rules, exit_code=137, reason="OOMKilled") == "3"
    assert met(rules, exit_code=5) == "rest"
    assert met(rules[:-1], exit_code=5) is None


def key(**rule):
    return failure_rules.key_of(FailureRule.model_validate({"role": "env", "action": "RestartPod"} | rule))


def test_what_is_counted_goes_by_the_name_or_by_what_the_rule_meets_and_not_by_its_place_or_bound():
    assert key(name="a", exitCodes=[3]) == "a"
    assert key() == key(maxRestarts=7, backOffSeconds=3) == key(exitCodes=[], reasons=[])
    assert key(exitCodes=[3, 4]) == key(exitCodes=[4, 3])
    others = ({"role": "actor"}, {"pool": "sim"}, {"exitCodes": [3]}, {"reasons": ["Evicted"]}, {"action": "Ignore"})
    assert len({key(), *(key(**other) for other in others)}) == 6


def test_of_two_rules_that_meet_the_same_the_first_one_counts():
    twice = [FailureRule(action=FailureAction.RESTART_POD, max_restarts=most) for most in (1, 9)]
    assert [rule.max_restarts for rule in failure_rules.by_key(twice).values()] == [1]
    assert failure_rules.called(twice, failure_rules.key_of(twice[1])) == "0"
    assert failure_rules.called(twice, "gone") == "gone"


@pytest.mark.parametrize(
    ("said_by_kubernetes", "reason"),
    [
        ("EvictionByEvictionAPI", "Evicted"),
        ("PreemptionByScheduler", "Evicted"),
        ("TerminationByKubelet", "Evicted"),
        ("Evicted", "Evicted"),
        ("DeletionByTaintManager", "NodeLost"),
        ("NodeLost", "NodeLost"),
        ("DeadlineExceeded", "DeadlineExceeded"),
    ],
)
def test_what_kubernetes_says_has_a_reason(said_by_kubernetes, reason):
    others = {"OOMKilled", "Evicted", "NodeLost", "DeadlineExceeded"} - {reason}
    rules = [{"reasons": sorted(others), "action": "Ignore"}, {"name": "own", "reasons": [reason], "action": "Ignore"}]
    assert met(rules, reason=said_by_kubernetes) == "own"


def test_a_pod_that_waits_meets_a_rule_that_names_it_once_its_time_has_come_and_no_other():
    rules = [
        {"name": "late", "reasons": ["Unschedulable"], "afterSeconds": 60, "action": "Suspend"},
        {"name": "soon", "reasons": ["Unschedulable"], "afterSeconds": 10, "action": "RestartPod"},
        {"name": "rest", "action": "FailJob"},
    ]
    seen = [met(rules, exit_code=-1, reason="Unschedulable", waited_s=s) for s in (9.0, 10.0, 59.0, 60.0)]
    assert seen == [None, "soon", "soon", "late"]


def test_an_exit_without_a_code_meets_no_rule_that_names_codes():
    assert met([{"exitCodes": [1, 255], "action": "Ignore"}], exit_code=-1, reason="NodeLost") is None
