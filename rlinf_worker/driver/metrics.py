"""/metrics of the driver: read from the core at scrape time, so that there is no second bookkeeping."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from rlinf_worker.driver import status
from rlinf_worker.driver.core import Driver


class DriverMetrics:
    """A collector: `registry` is given to the metrics server."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        driver, report = self._driver, status.report(self._driver)
        yield GaugeMetricFamily("rlinf_job_step", "Steps committed.", value=report.step)
        yield GaugeMetricFamily("rlinf_job_steps", "Steps of the job.", value=report.steps)
        yield GaugeMetricFamily("rlinf_job_branch", "Branch of the policy version.", value=report.branch)
        yield GaugeMetricFamily("rlinf_step_duration_seconds", "Median of recent steps.", value=report.step_seconds)
        yield CounterMetricFamily(
            "rlinf_worker_restarts", "Workers started again after a failure.", value=report.restarts
        )
        yield from self._recoveries()
        yield from self._spares()
        yield GaugeMetricFamily("rlinf_plan_revision", "Plan in force.", value=report.plan_revision)
        yield CounterMetricFamily("rlinf_plan_switches", "Changes of plan by this driver.", value=driver.switch.count)
        pause = "From the step boundary of the last change of plan until a unit moved."
        yield GaugeMetricFamily("rlinf_plan_switch_pause_seconds", pause, value=driver.switch.pause_s)
        ready = GaugeMetricFamily("rlinf_worker_ready", "1 where the worker may work.", labels=["worker", "pod"])
        for member in report.members:
            ready.add_metric(
                [member.worker, member.pod], float(member.phase not in ("down", "start", "starting", "load"))
            )
        yield ready
        units = CounterMetricFamily("rlinf_queue_units", "Units by what became of them.", labels=["channel", "state"])
        depth = GaugeMetricFamily("rlinf_queue_depth", "Units known to the queue.", labels=["channel"])
        for channel, counts, length in driver.exchange.counts():
            depth.add_metric([channel], length)
            for state, count in counts.items():
                units.add_metric([channel, state], count)
        yield units
        yield depth
        waiting = GaugeMetricFamily("rlinf_queue_waiting", "Units that no consumer has yet.", labels=["channel"])
        held = GaugeMetricFamily("rlinf_queue_bytes", "Payload bytes of a queue's units.", labels=["channel"])
        for channel, count, size in driver.exchange.levels():
            waiting.add_metric([channel], count)
            held.add_metric([channel], size)
        yield waiting
        yield held
        text = "Messages between driver and workers."
        said = CounterMetricFamily("rlinf_driver_messages", text, labels=["direction"])
        said.add_metric(["in"], driver.job.sessions.heard)
        said.add_metric(["out"], driver.job.sessions.told)
        yield said
        text = "Hellos of pods and workers, and words about plans, that were refused."
        refused = CounterMetricFamily("rlinf_driver_refused", text, labels=["reason"])
        for reason, count in driver.job.sessions.refused.items():
            refused.add_metric([reason], count)
        yield refused
        turns = CounterMetricFamily("rlinf_driver_turns", "Turns that began in lease sets over pods.")
        turns.add_metric([], driver.turns.changes)
        yield turns
        text = "Lines for people that found no room on the disk, or had to make it for newer ones."
        lost = CounterMetricFamily("rlinf_output_lost_lines", text, labels=["file"])
        for name, count in driver.job.output.lost.items():
            lost.add_metric([name], count)
        yield lost
        training = GaugeMetricFamily("rlinf_training_metric", "Numbers of the last step.", labels=["name"])
        for name, value in sorted(report.metrics.items()):
            training.add_metric([name], value)
        yield training

    def _recoveries(self) -> Iterator[Metric]:
        known = self._driver.workforce.recoveries
        count = CounterMetricFamily("rlinf_recoveries", "Losses after which all were back at work.", labels=["what"])
        seconds = CounterMetricFamily("rlinf_recovery_seconds", "From a loss until back at work.", labels=["what"])
        lost = CounterMetricFamily("rlinf_recovery_lost_seconds", "That others waited for it.", labels=["role"])
        for family, values in ((count, known.count), (seconds, known.seconds), (lost, known.lost_s)):
            for label, value in values.items():
                family.add_metric([label], value)
            yield family

    def _spares(self) -> Iterator[Metric]:
        known = self._driver.workforce.spares
        there = GaugeMetricFamily("rlinf_driver_spares", "Warm spares by what they do.", labels=["role", "state"])
        for (role, state), count in known.counts().items():
            there.add_metric([role, state], count)
        yield there
        taken = CounterMetricFamily("rlinf_driver_spares_taken", "Starts from a warm spare.", labels=["role"])
        for role, count in known.taken.items():
            taken.add_metric([role], count)
        yield taken
