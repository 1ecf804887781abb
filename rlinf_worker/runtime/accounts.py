"""Closes the account of each step at the moment of its commit, and tells the driver.

For: runtime.session, with every StepCommit. A commit reaches all workers, not the gang alone: their steps end together.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_worker.channels.host import Host

SAME_CLOCK_S: Final = 0.1
"""A commit that is heard of within this is taken to have happened when the driver says: one machine, or two whose
clocks are kept together."""
DELAYS_KEPT: Final = 64  # the smallest of them is the difference between clocks that are not


class Accounts:
    def __init__(self, host: Host) -> None:
        self._host = host
        self._closed = (-1, -1)  # (branch, step)
        self._delays: deque[float] = deque(maxlen=DELAYS_KEPT)

    def close(self, commit: pb.StepCommit) -> None:
        done = (commit.version.branch, commit.step)
        if done <= self._closed or not commit.time:
            return  # told again
        self._closed = done
        recorder = self._host.recorder
        now = recorder.now()
        self._delays.append(now - commit.time)
        apart = min(self._delays)
        at = commit.time if abs(apart) < SAME_CLOCK_S else commit.time + apart
        account = recorder.close_step(
            commit.step, branch=done[0], at=min(at, now), lasted_s=commit.seconds or float("inf")
        )
        between = {"between": account.between_s} if account.between_s else {}  # driver/recovery.py reads it
        self._host.tell(
            pb.WorkerMessage(
                account=pb.Account(
                    step=commit.step,
                    branch=done[0],
                    window_s=account.window_s,
                    seconds={**{str(kind): value for kind, value in account.seconds.items()}, **between},
                    instrument_s=account.instrument_s,
                    busy_s=account.busy_s,
                    busy=[at for stretch in account.busy for at in stretch],
                )
            )
        )
