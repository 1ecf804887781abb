"""What roles share with each other by name (`ctx.share`): small values, as JSON. A second worker must know the same.

For: core.py, which hears of them and welcomes workers; flow.py, which waits for some.
"""

from __future__ import annotations

from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_api.conditions import Reason
from rlinf_api.errors import UserError
from rlinf_api.names import WorkerId
from rlinf_api.report import Failure
from rlinf_worker.channels import plain
from rlinf_worker.driver.job import Job


class SharedFacts:
    def __init__(self, job: Job) -> None:
        self._job = job
        self._known: dict[str, str] = {}

    def get(self, name: str) -> str | None:
        return self._known.get(name)

    def all(self) -> list[pb.Fact]:
        """For who comes later."""
        return [pb.Fact(name=name, json=value) for name, value in self._known.items()]

    def share(self, wid: WorkerId, fact: pb.Fact) -> None:
        known = self._known.setdefault(fact.name, fact.json)
        if known != fact.json:
            text = f"{wid} says {fact.name} is {fact.json[:200]}, another worker said {known[:200]}"
            self._job.fail(Reason.USER_ERROR, text, Failure(role="driver", reason="FactsDiffer", message=text))
        try:
            plain.check_facts(self._known, new=fact.name, who=f"worker {wid}")
        except UserError as error:  # of roles that share at once, each of which has room
            self._job.fail(Reason.USER_ERROR, str(error))
        for record in self._job.members.everybody():
            self._job.sessions.tell(record.placed.id, fact=fact)
