"""What a person sees while a job runs: one line per change of condition, and the step, return and times as they come.

For: `rljob run`, on a terminal (the last line is rewritten) or into a file (a line every few seconds). Pure but for the
stream that it writes to, which loses what it cannot tell and raises nothing (losable.py): a job hangs on it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from rljob.losable import Losable

SHOWN_CONDITIONS: Final = ("Valid", "PodsReady", "Running", "Degraded", "Suspended")
"""Complete and Failed are the end, which whoever shows the run says with its numbers."""
NOT_AT_FIRST: Final = ("Degraded", "Suspended")
"""False is how every job begins, and is shown only where it was True before."""
LINE_INTERVAL_S: Final = 2.0  # into a file; a terminal's line is rewritten at most ten times a second


class ProgressLines:
    def __init__(self, stream: Losable, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock = stream, clock
        self._terminal = stream.isatty()
        self._started = clock()
        self._said: dict[str, tuple[str, str, str]] = {}
        self._line_at, self._line_step, self._open_line = 0.0, -1, False

    def show(self, job: Mapping[str, Any]) -> None:
        status = job.get("status") or {}
        for condition in status.get("conditions", ()):
            self._condition(condition)
        self._progress(status, steps=int(job["spec"]["flow"].get("steps", 0)))

    def say(self, text: str) -> None:
        if self._open_line:
            self._stream.write("\n")
            self._open_line = False
        self._stream.write(f"{self._clock() - self._started:7.1f}s  {text}\n")
        self._stream.flush()

    def _condition(self, condition: Mapping[str, Any]) -> None:
        kind, status, reason = condition["type"], condition["status"], condition["reason"]
        message = condition.get("message", "")
        told = (status, reason, re.sub(r"[0-9.]+", "#", message))  # the same words with other numbers are no news
        before = self._said.get(kind)
        if kind not in SHOWN_CONDITIONS or before == told:
            return
        self._said[kind] = told
        if before is None and status == "False" and kind in NOT_AT_FIRST:
            return
        if reason == "Stopped" or (before and before[:2] == told[:2] and not message):
            return  # what a job's end does to the others; or all is well again, which steps say better
        if message and any(other != kind and said[2] == told[2] for other, said in self._said.items()):
            return  # Running and Degraded say the same of a worker that is started again
        self.say(f"{kind}={status} {reason}" + (f": {message}" if message else ""))

    def _progress(self, status: Mapping[str, Any], *, steps: int) -> None:
        step, now = int(status.get("step", 0)), self._clock()
        if step <= 0 or step == self._line_step:
            return
        if now - self._line_at < (0.1 if self._terminal else LINE_INTERVAL_S) and step < steps:
            return
        self._line_at, self._line_step = now, step
        text = summary(status, steps=steps)
        if self._terminal:
            self._stream.write("\r\x1b[2K" + text)
            self._open_line = True
            self._stream.flush()
        else:
            self.say(text)


def summary(status: Mapping[str, Any], *, steps: int) -> str:
    """
    >>> summary({"step": 3, "metrics": [{"name": "return_mean", "value": "41.5"}]}, steps=10)
    'step 3/10  return 41.5'
    """
    metrics = {m["name"]: float(m["value"]) for m in status.get("metrics", ())}
    parts = [f"step {status.get('step', 0)}/{steps}"]
    if "return_mean" in metrics:
        parts.append(f"return {metrics['return_mean']:.1f}")
    if "reward_mean" in metrics:
        parts.append(f"reward {metrics['reward_mean']:.3f}")
    if "env_steps" in metrics:
        parts.append(f"env steps {metrics['env_steps']:.0f}")
    whole = metrics.get("step_s", 0.0)
    if whole > 0:
        shares = {
            n.removesuffix("_s"): metrics[n] / whole for n in ("collect_s", "update_s", "publish_s") if n in metrics
        }
        times = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
        parts.append(f"{whole * 1000:.0f} ms/step" + (f" ({times})" if times else ""))
    left = status.get("estimatedRemainingSeconds")
    if left:
        parts.append(f"{left} s left")
    return "  ".join(parts)
