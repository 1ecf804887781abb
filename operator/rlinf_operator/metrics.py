"""What the operator counts about itself, as Prometheus reads it: `rlinf_operator_*`. One object per process, handed to
whoever counts; there is no global registry, so tests have one each.
"""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics

from rlinf_api.job import FailureAction

PASS_BUCKETS_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

RESULTS: Final = ("done", "repeated", "broke")
"""How a pass ends (reconcile/loop.py)."""


class Metrics:
    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series per counter, that nobody asks for
        self.registry = registry or CollectorRegistry()
        own = self.registry
        self.reconcile_seconds = Histogram(
            "rlinf_operator_reconcile_seconds", "One pass over one job", ["result"], buckets=PASS_BUCKETS_S,
            registry=own,
        )  # fmt: skip
        for result in RESULTS:  # a series that begins at 1 has not risen, and no alert on its increase would come
            self.reconcile_seconds.labels(result=result)
        self.queue_depth = Gauge("rlinf_operator_queue_depth", "Jobs that wait for a pass and are due", registry=own)
        self.queue_age = Gauge(
            "rlinf_operator_queue_oldest_due_seconds", "How long the oldest key is due or in work", registry=own
        )
        self.watch_age = Gauge(
            "rlinf_operator_watch_age_seconds", "Since a watch last said anything, bookmarks included", ["kind"],
            registry=own,
        )  # fmt: skip
        self.cached_objects = Gauge("rlinf_operator_cached_objects", "Objects in the cache", ["kind"], registry=own)
        self.relists = Counter(
            "rlinf_operator_relists_total", "Full lists of a kind, by what made them necessary", ["kind", "why"],
            registry=own,
        )  # fmt: skip
        self.api_calls = Counter(
            "rlinf_operator_api_calls_total", "Calls to the API server; code 0: no answer", ["verb", "kind", "code"],
            registry=own,
        )  # fmt: skip
        self.jobs = Gauge("rlinf_operator_jobs", "RLJobs by state", ["state"], registry=own)
        self.missed = Counter(
            "rlinf_operator_missed_deletions_total", "RLJobs that a pass found gone, and no event had told",
            registry=own,
        )  # fmt: skip
        self.refused = Gauge(
            "rlinf_operator_namespace_refused", "1 while the API server refuses a kind in a listed namespace",
            ["namespace", "kind"], registry=own,
        )  # fmt: skip
        self.rules = Counter(
            "rlinf_operator_failure_rules_total", "Pods and workers that met a rule of failurePolicy", ["action"],
            registry=own,
        )  # fmt: skip
        for action in FailureAction:
            self.rules.labels(action=str(action))
        self.queue_orders = Counter(
            "rlinf_operator_queue_orders_total", "What the queue's provider was told, of all jobs", ["order"],
            registry=own,
        )  # fmt: skip
        for order in ("ask", "change", "ready", "lacks", "give_back", "leave", "finish"):
            self.queue_orders.labels(order=order)
        self.leader = Gauge("rlinf_operator_leader", "1 while this replica leads", registry=own)
