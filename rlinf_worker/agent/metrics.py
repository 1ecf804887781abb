"""The numbers of one pod for /metrics: what its workers count, over all their attempts, and the agent's own.

`WorkerCounters` is pure and sums; `AgentMetrics` shows it to Prometheus. Fed by `slots.py` and `main.py`.
A worker reports absolute values that begin at zero with each attempt; what is shown never falls.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from rlinf_api import names

_HELP: Final = {
    "rlinf_worker_seconds_total": "Seconds that workers spent, by kind of span",
    "rlinf_worker_account_seconds_total": "Seconds of steps, each moment once, by the kind of span that has it",
    "rlinf_worker_instrument_seconds_total": "CPU seconds that recording spans took in the worker",
    "rlinf_channel_items_total": "Items that went through a channel's end in this pod",
    "rlinf_channel_bytes_total": "Payload bytes that went through a channel's end in this pod",
    "rlinf_channel_wait_seconds_total": "Seconds that a channel's end in this pod waited",
    "rlinf_channel_resent_items_total": "Items sent again on a new link",
    "rlinf_channel_duplicate_items_total": "Items that had been received before and were left out",
    "rlinf_channel_dropped_items_total": "Items that a role ended by decision, by reason",
    "rlinf_channel_refused_items_total": "Items that a role put and that were refused, by error",
    "rlinf_channel_depth": "Items at a channel's end: kept until acknowledged, or assigned and not taken",
    "rlinf_channel_held_bytes": "Payload bytes of these",
    "rlinf_channel_oldest_seconds": "Age of the oldest of these",
    "rlinf_weights_seconds_total": "Seconds that publishing and pulling weights took",
    "rlinf_weights_versions_total": "Versions of the weights that were published, or arrived whole and verified",
    "rlinf_weights_late_total": "Receivers that did not confirm a version in time: nobody waits for them until they do",
    "rlinf_weights_sent_bytes_total": "Bytes of weights sent over links; mapped memory is not sent",
    "rlinf_weights_refused_total": "Versions of the weights that a receiver could not use",
    "rlinf_weights_retries_total": "Times that a receiver asked for a version, or the rest of one, again",
    "rlinf_weights_conflicts_total": "Versions of the weights that were seen with two checksums",
    "rlinf_worker_turn_switches_total": "Turns that workers were granted",
    "rlinf_worker_turn_wait_seconds_total": "Seconds that workers with work waited for a turn",
    "rlinf_worker_turn_load_seconds_total": "Seconds of loading on a grant",
    "rlinf_worker_turn_offload_seconds_total": "Seconds of offloading on a release",
    "rlinf_worker_turn_memory_bytes": "Memory in use on a worker's slots around its last offload",
    "rlinf_worker_dials_total": "Links that a worker dialled",
    "rlinf_links": "Links that are up, by kind",
    "rlinf_link_messages_total": "Messages that went over links",
    "rlinf_link_bytes_total": "Bytes of these",
    "rlinf_link_send_wait_seconds_total": "Seconds that senders waited for room in a link",
    "rlinf_link_bulk_messages_total": "Sent messages whose buffers took the second connection",
    "rlinf_link_device_messages_total": "Sent messages whose buffers went from GPU to GPU",
    "rlinf_link_refused_messages_total": "Messages that a link refused to send",
    "rlinf_link_breaks_total": "Links that ended otherwise than in good order",
    "rlinf_link_fallbacks_total": "Links that were made in a slower way than both ends share, by reason",
    "rlinf_link_refused_dials_total": "Dials that this worker refused, by reason",
    "rlinf_worker_stale_instructions_total": "Instructions of an older roster or plan, left out",
    "rlinf_worker_driver_batches_total": "Batches of messages from a worker to the driver",
    "rlinf_worker_driver_connections_total": "Streams to the driver after the first one",
    "rlinf_worker_reports_dropped_total": "Reports for metrics.jsonl that found no room",
    "rlinf_worker_restarts_total": "Starts of a worker after its first one in this pod",
    "rlinf_worker_exits_total": "Ends of workers by reason, asked ones included",
}
_NAME: Final = re.compile(r"rlinf_[a-z0-9_]{1,80}")
_LABEL: Final = re.compile(r"[a-z_][a-z0-9_]{0,30}")
_MAX_LABEL_VALUE: Final = 100


@dataclass(frozen=True, slots=True, order=True)
class Series:
    name: str
    labels: tuple[tuple[str, str], ...]


@dataclass(slots=True)
class _WorkerAccount:
    attempt: int = 0
    ended: dict[Series, float] = field(default_factory=dict)  # by earlier attempts
    current: dict[Series, float] = field(default_factory=dict)


class WorkerCounters:
    """`report` absolute values, `add` increments; `totals` is what they come to."""

    def __init__(self, *, limit: int) -> None:
        self._limit = limit
        self._accounts: dict[str, _WorkerAccount] = {}
        self._known: set[Series] = set()
        self.dropped = 0

    def report(self, worker: str, attempt: int, *, values: Iterable[tuple[str, tuple[str, ...], float]]) -> None:
        """Names that are not ours, labels that are not k=v and series beyond the limit are dropped and counted."""
        account = self._account(worker, attempt)
        for name, labels, value in values:
            series = self._series(worker, name, labels)
            if series is None:
                continue
            if value < account.current.get(series, 0.0) and name.endswith("_total"):
                account.ended[series] = account.ended.get(series, 0.0) + account.current[series]
            account.current[series] = value

    def add(self, worker: str, attempt: int, *, name: str, labels: tuple[str, ...] = (), value: float = 1.0) -> None:
        account = self._account(worker, attempt)
        if series := self._series(worker, name, labels):
            account.current[series] = account.current.get(series, 0.0) + value

    def totals(self) -> dict[Series, float]:
        found: dict[Series, float] = {}
        for account in self._accounts.values():
            for part in (account.ended, account.current):
                for series, value in part.items():
                    found[series] = found.get(series, 0.0) + value
        return found

    def _account(self, worker: str, attempt: int) -> _WorkerAccount:
        account = self._accounts.setdefault(worker, _WorkerAccount(attempt=attempt))
        if attempt > account.attempt:
            account.attempt = attempt
            for series, value in account.current.items():
                if series.name.endswith("_total"):  # anything else is a level, which died with the attempt
                    account.ended[series] = account.ended.get(series, 0.0) + value
            account.current = {}
        return account

    def _series(self, worker: str, name: str, labels: tuple[str, ...]) -> Series | None:
        pairs = [("role", names.split_worker_id(worker)[0]), ("worker", worker)]
        for label in labels:
            key, equals, value = label.partition("=")
            known = key in ("role", "worker")  # ours to say
            if not equals or known or not _LABEL.fullmatch(key) or len(value) > _MAX_LABEL_VALUE:
                self.dropped += 1
                return None
            pairs.append((key, value))
        series = Series(name, tuple(pairs))
        if series not in self._known:
            if len(self._known) >= self._limit or not _NAME.fullmatch(name):
                self.dropped += 1
                return None
            self._known.add(series)
        return series


Levels = Callable[[], dict[str, tuple[str, float]]]
"""Name of a metric of the agent itself to (help, value now); a name in `_total` is a counter."""


class AgentMetrics:
    """A collector: nothing is kept for Prometheus but asked for when it comes."""

    def __init__(self, counters: WorkerCounters, levels: Levels) -> None:
        self._counters, self._levels = counters, levels
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for series, value in sorted(self._counters.totals().items()):
            if series.name not in families:
                kind = CounterMetricFamily if series.name.endswith("_total") else GaugeMetricFamily
                families[series.name] = kind(series.name, _HELP.get(series.name, "Reported by workers"))
            families[series.name].add_sample(series.name, dict(series.labels), value)
        yield from families.values()
        for name, (text, value) in self._levels().items():
            counter = name.endswith("_total")
            yield CounterMetricFamily(name, text, value) if counter else GaugeMetricFamily(name, text, value)
