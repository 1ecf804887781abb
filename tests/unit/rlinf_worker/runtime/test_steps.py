"""What a rank tells of its steps without an answer, and when its driver was away meanwhile."""

import json
from typing import Any, cast
from unittest.mock import Mock

import pytest

from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.runtime.steps import Steps
from rlinf_worker.uplink.outbox import Kept, Lasts, Told


class AwayDriver:
    """The dialling end of an uplink without a stream."""

    def __init__(self) -> None:
        self.kept: Kept[pb.WorkerMessage] = Kept(limit=10)

    def tell(self, message: pb.WorkerMessage, *, lasts: Lasts = Lasts.STREAM) -> None:
        self.kept.add([Told(message, lasts)])

    def repeat(self, key: str, message: pb.WorkerMessage) -> None:
        self.kept.repeat(key, message)

    def forget(self, key: str) -> None:
        self.kept.forget(key)

    def comes(self) -> list[Any]:
        """What the next driver is told."""
        told = [one.message for one in self.kept.welcomed([], is_same_driver=False)]
        return [getattr(message, str(message.WhichOneof("kind"))) for message in told]


@pytest.fixture
def away():
    return AwayDriver()


@pytest.fixture
def steps(away):
    return Steps(Mock(), Mock(), driver=lambda: cast(Any, away))


def test_numbers_of_a_step_wait_for_the_next_driver_and_are_told_once(steps, away):
    steps.report(step=3, branch=1, metrics={"seen_count": 2}, key="env:0@3")
    (report,) = away.comes()
    assert (report.step, report.branch, report.key) == (3, 1, "env:0@3")
    assert json.loads(report.metrics_json) == {"seen_count": 2.0}
    assert away.comes() == []


def test_every_driver_hears_of_the_newest_checkpoint_and_of_one_that_failed_since(steps, away):
    steps.saved(PolicyVersion(0, 2), "/c/2")
    steps.not_saved(PolicyVersion(0, 3), "No space left" * 1000)
    for _ in range(2):
        saved, failed = away.comes()
        assert (saved.uri, saved.version.number, failed.version.number, len(failed.problem)) == ("/c/2", 2, 3, 1000)
    steps.saved(PolicyVersion(0, 4), "/c/4")
    (saved,) = away.comes()
    assert (saved.uri, saved.problem) == ("/c/4", "")
