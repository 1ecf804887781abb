"""What a person reads while a job runs: every change once, and no noise."""

import io

from rljob.losable import Losable
from rljob.progress import ProgressLines, summary


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Shown:
    def __init__(self, stream=None):
        self.stream, self.now = stream or io.StringIO(), 0.0
        self.progress = ProgressLines(Losable(self.stream), clock=lambda: self.now)

    def show(self, *conditions, step=0, **status):
        keys = ("type", "status", "reason", "message")
        found = [dict(zip(keys, (*c, "")[:4], strict=True)) for c in conditions]
        self.progress.show({"spec": {"flow": {"steps": 10}}, "status": {"conditions": found, "step": step, **status}})

    def lines(self):
        return [line.partition("s  ")[2] for line in self.stream.getvalue().splitlines()]


def test_a_condition_is_said_when_it_changes_and_not_again():
    shown = Shown()
    for _ in range(3):
        shown.show(("Valid", "True", "Accepted"), ("PodsReady", "False", "PodsStarting", "waiting for driver"))
    shown.show(("PodsReady", "True", "PodsReady", "all 2 pods are ready"))
    assert shown.lines() == [
        "Valid=True Accepted",
        "PodsReady=False PodsStarting: waiting for driver",
        "PodsReady=True PodsReady: all 2 pods are ready",
    ]


def test_the_same_words_with_other_numbers_are_no_news():
    shown = Shown()
    for seconds in (10, 11, 12):
        shown.show(("Running", "True", "Stepping", f"worker env/0 has shown no sign for {seconds} s in phase step"))
    assert len(shown.lines()) == 1


def test_a_worker_that_is_started_again_is_told_once():
    shown = Shown()
    why = "worker env/0 is started again: it was killed"
    shown.show(("Running", "False", "Recovering", why), ("Degraded", "True", "WorkerRestarting", why))
    assert shown.lines() == [f"Running=False Recovering: {why}"]


def test_what_every_job_begins_and_ends_with_is_not_said():
    shown = Shown()
    shown.show(("Degraded", "False", "Healthy"), ("Suspended", "False", "NotSuspended"))
    shown.show(("PodsReady", "False", "Stopped"), ("Complete", "True", "FlowFinished", "10 steps are done"))
    assert shown.lines() == []


def test_steps_come_every_two_seconds_into_a_file_and_the_last_one_always():
    shown = Shown()
    for step in range(1, 11):
        shown.now = 1.0 + step * 0.5
        shown.show(step=step)
    assert [line.split("  ")[0] for line in shown.lines()] == ["step 2/10", "step 6/10", "step 10/10"]
    assert "\x1b" not in shown.stream.getvalue()
    assert "\r" not in shown.stream.getvalue()


def test_on_a_terminal_one_line_is_rewritten_until_something_is_said():
    shown = Shown(Terminal())
    shown.now = 1.0
    shown.show(step=1)
    shown.now = 2.0
    shown.show(step=2)
    shown.progress.say("stopping")
    assert shown.stream.getvalue() == "\r\x1b[2Kstep 1/10\r\x1b[2Kstep 2/10\n    2.0s  stopping\n"


def test_a_summary_says_where_the_time_goes():
    metrics = {"return_mean": "41.5", "env_steps": "1024", "step_s": "0.1", "collect_s": "0.06", "update_s": "0.04"}
    status = {"step": 3, "metrics": [{"name": n, "value": v} for n, v in metrics.items()]}
    text = "step 3/10  return 41.5  env steps 1024  100 ms/step (collect 60%, update 40%)  7 s left"
    assert summary({**status, "estimatedRemainingSeconds": 7}, steps=10) == text
