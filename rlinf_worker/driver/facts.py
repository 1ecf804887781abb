"""What roles share with each other (`ctx.share`): told to all, kept for whoever comes later.

For: core.py. The workers' end is runtime/facts.py.
"""

from __future__ import annotations

from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_api.names import WorkerId
from rlinf_api.report import Failure
from rlinf_worker.driver.job import Job


class FactBook:
    def __init__(self, job: Job) -> None:
        self._job = job
        self._known: dict[str, str] = {}

    def known(self) -> list[pb.Fact]:
        return [pb.Fact(name=name, json=value) for name, value in self._known.items()]

    def heard(self, worker: WorkerId, fact: pb.Fact) -> None:
        """A second worker of the role must know the same."""
        known = self._known.setdefault(fact.name, fact.json)
        if known != fact.json:
            text = f"{worker} says {fact.name} is {fact.json[:200]}, another worker said {known[:200]}"
            self._job.fail("UserError", text, Failure(role="driver", reason="FactsDiffer", message=text))
        for record in self._job.members.everybody():
            self._job.sessions.tell(record.placed.id, fact=fact)
