"""What a worker tells the driver and gets no answer to: checkpoints, numbers of steps. Kept while there is no driver.

For: runtime.session, which says when a driver is there, and runtime.context.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Final

from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_worker.channels import messages
from rlinf_worker.channels.host import Host
from rlinf_worker.channels.protocol import PolicyVersion

MAX_REPORTS: Final = 1000  # kept while the driver is away; one per step and role
MAX_PROBLEM: Final = 1000  # characters of a sentence for people


class Tidings:
    def __init__(self, host: Host, *, branch: Callable[[], int]) -> None:
        """`branch`: the highest that this worker has heard of."""
        self._host, self._branch = host, branch
        self._is_connected = False
        self._saved: pb.Saved | None = None  # told with each connection: a new driver cannot know
        self._not_saved: pb.Saved | None = None  # since then; also told again, as a plan may wait for either word
        self._reports: list[pb.Report] = []
        self.reports_dropped = 0

    def disconnected(self) -> None:
        self._is_connected = False

    def connected(self) -> None:
        self._is_connected = True
        for word in (self._saved, self._not_saved):
            if word is not None:
                self._host.tell(pb.WorkerMessage(saved=word))
        reports, self._reports = self._reports, []
        for report in reports:
            self._host.tell(pb.WorkerMessage(report=report))

    def saved(self, version: PolicyVersion, uri: str) -> None:
        self._saved, self._not_saved = pb.Saved(version=messages.version_to_pb(version), uri=uri), None
        self._host.tell(pb.WorkerMessage(saved=self._saved))

    def not_saved(self, version: PolicyVersion, problem: str) -> None:
        self._not_saved = pb.Saved(version=messages.version_to_pb(version), problem=problem[:MAX_PROBLEM])
        self._host.tell(pb.WorkerMessage(saved=self._not_saved))

    def report(self, *, step: int, metrics: Mapping[str, float], key: str = "") -> None:
        numbers = json.dumps({name: float(value) for name, value in metrics.items()})
        report = pb.Report(metrics_json=numbers, step=step, branch=self._branch(), key=key)
        if self._is_connected:
            self._host.tell(pb.WorkerMessage(report=report))
        elif len(self._reports) < MAX_REPORTS:
            self._reports.append(report)
        else:
            self.reports_dropped += 1
