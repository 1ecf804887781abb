"""The streams that are attached right now: one outbox per agent and per worker. Filled by the core's parts, emptied by
server.py. Telling somebody who is away is no error: on its next hello it says what it holds and is told the rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlinf_api._pb.rlinf.agents.v1alpha1 import agents_pb2
from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_api.errors import RLinfError
from rlinf_api.names import WorkerId
from rlinf_worker.driver.members import PodKey
from rlinf_worker.driver.outbox import Outbox


class Refuse(RLinfError):
    """The hello is answered by a Refusal; the peer exits with `exit_code`."""

    def __init__(self, message: str, *, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True)
class Session:
    outbox: Outbox
    attempt: int


class Sessions:
    def __init__(self) -> None:
        self.agents: dict[PodKey, Session] = {}
        self.workers: dict[WorkerId, Session] = {}

    def tell(self, worker: WorkerId, **kind: Any) -> None:
        """`tell(wid, begin=pb.Begin(...))`."""
        if session := self.workers.get(worker):
            session.outbox.put(pb.DriverMessage(**kind))

    def tell_agent(self, pod: PodKey, message: agents_pb2.DriverMessage) -> None:
        if session := self.agents.get(pod):
            session.outbox.put(message)

    def close_worker(self, worker: WorkerId, why: str) -> None:
        if session := self.workers.pop(worker, None):
            session.outbox.close(why)

    def close_agent(self, pod: PodKey, why: str) -> None:
        if session := self.agents.pop(pod, None):
            session.outbox.close(why)
