"""/metrics of the driver: read from the core at scrape time, so that there is no second bookkeeping."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from rlinf_worker.driver import status
from rlinf_worker.driver.core import Driver

NOT_READY: Final = ("down", "start", "starting", "load")  # phases of a worker, and states of one that has none


class DriverMetrics:
    """A collector: `registry` is given to the metrics server."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        driver, report = self._driver, status.report(self._driver)
        job, recoveries, spares = driver.job, driver.workforce.recoveries, driver.workforce.spares
        yield gauge("rlinf_job_step", "Steps committed.", report.step)
        yield gauge("rlinf_job_steps", "Steps of the job.", report.steps)
        yield gauge("rlinf_job_branch", "Branch of the policy version.", report.branch)
        yield gauge("rlinf_step_duration_seconds", "Median of recent steps.", report.step_seconds)
        yield gauge("rlinf_job_stalled", "1 while nothing moves, or one does not.", float(driver.stalls.is_stalled))
        yield counter("rlinf_job_stalls", "Workers that were replaced as nothing moved.", driver.stalls.replaced)
        yield counter("rlinf_worker_restarts", "Workers started again after a failure.", report.restarts)
        text = "Workers that met a rule of failurePolicy."
        yield counter("rlinf_failure_rules", text, driver.workforce.toll.rules.count, "action")
        yield counter("rlinf_recoveries", "Losses after which all were back at work.", recoveries.count, "what")
        yield counter("rlinf_recovery_seconds", "From a loss until back at work.", recoveries.seconds, "what")
        yield counter("rlinf_recovery_lost_seconds", "That others waited for it.", recoveries.lost_s, "role")
        text = "Pods that were told to end, by how they went."
        yield counter("rlinf_driver_hand_overs", text, driver.handover.outcomes, "outcome")
        yield gauge("rlinf_driver_spares", "Warm spares by what they do.", spares.counts(), "role", "state")
        yield counter("rlinf_driver_spares_taken", "Starts from a warm spare.", spares.taken, "role")
        yield gauge("rlinf_plan_revision", "Plan in force.", report.plan_revision)
        yield counter("rlinf_plan_switches", "Changes of plan by this driver.", driver.switch.count)
        text = "Changes of plan for which steps were given up that could never end."
        yield counter("rlinf_plan_steps_given_up", text, driver.switch.given_up)
        pause = "From the step boundary of the last change of plan until a unit moved."
        yield gauge("rlinf_plan_switch_pause_seconds", pause, driver.switch.pause.seconds)
        ready = {
            (w.placed.id, job.members.pods[w.placed.pod].pod): (w.progress or w.state.value) not in NOT_READY
            for w in job.members.workers.values()
        }
        yield gauge("rlinf_worker_ready", "1 where the worker may work.", ready, "worker", "pod")
        cores = {channel: queue.core for channel, queue in driver.exchange.queues.items()}
        units = {(channel, state): n for channel, core in cores.items() for state, n in core.counts.items()}
        yield counter("rlinf_queue_units", "Units by what became of them.", units, "channel", "state")
        depths = {channel: len(core.book.entries) for channel, core in cores.items()}
        yield gauge("rlinf_queue_depth", "Units known to the queue.", depths, "channel")
        waiting = {channel: core.book.waiting_count for channel, core in cores.items()}
        yield gauge("rlinf_queue_waiting", "Units that no consumer has yet.", waiting, "channel")
        held = {channel: core.book.queued_bytes for channel, core in cores.items()}
        yield gauge("rlinf_queue_bytes", "Payload bytes of a queue's units.", held, "channel")
        messages = {"in": job.sessions.heard, "out": job.sessions.told}
        yield counter("rlinf_driver_messages", "Messages between driver and workers.", messages, "direction")
        text = "Hellos of pods and workers, and words about plans, that were refused."
        yield counter("rlinf_driver_refused", text, job.sessions.refused, "reason")
        text = "Profiles by what became of them."
        yield counter("rlinf_driver_profiles", text, driver.profiles.outcomes, "outcome")
        yield counter("rlinf_driver_turns", "Turns that began in lease sets over pods.", driver.turns.changes)
        text = "Lines for people that found no room on the disk, or had to make it for newer ones."
        yield counter("rlinf_output_lost_lines", text, job.output.lost, "file")
        yield gauge("rlinf_training_metric", "Numbers of the last step.", dict(sorted(report.metrics.items())), "name")


Values = float | Mapping[Any, float]
"""One number, or numbers by what the labels say: a string, or a tuple of strings where there are several."""


def gauge(name: str, text: str, values: Values, *labels: str) -> Metric:
    return _filled(GaugeMetricFamily(name, text, labels=labels), values)


def counter(name: str, text: str, values: Values, *labels: str) -> Metric:
    return _filled(CounterMetricFamily(name, text, labels=labels), values)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, values: Values) -> Metric:
    by_labels = values if isinstance(values, Mapping) else {(): values}
    for labels, value in by_labels.items():
        family.add_metric([labels] if isinstance(labels, str) else labels, float(value))
    return family
