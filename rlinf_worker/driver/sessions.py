"""The streams that are attached right now: one outbox per agent and per worker. Filled by the core's parts, emptied by
server.py. Telling somebody who is away is no error: on its next hello it says what it holds and is told the rest."""

from __future__ import annotations

from collections import Counter
from typing import Any

from rlinf_api import names
from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_api.errors import RLinfError
from rlinf_api.names import WorkerId
from rlinf_worker.driver.members import PodKey
from rlinf_worker.uplink.serving import Guests


class Refuse(RLinfError):
    """The hello is answered by a Refusal; the peer exits with `exit_code`. Counted under `why`."""

    def __init__(
        self, what: str, *, exit_code: int, why: str = "", got: str = "", wanted: str = "", next: str = ""
    ) -> None:
        super().__init__(what, got=got, wanted=wanted, next=next)
        self.exit_code = exit_code
        self.why = why or {names.EXIT_STALE: "stale", names.EXIT_RETRYABLE: "early"}.get(exit_code, "other")


def check_hello(job_uid: str, protocol: int, *, job: str) -> None:
    """The caller is of this job and speaks our protocol; else it is refused."""
    if job_uid != job:
        raise Refuse(f"this is job {job}, the caller is of job {job_uid}", exit_code=names.EXIT_STALE, why="job")
    check_protocol(protocol, next="run driver and worker pods from images of the same version")


def check_protocol(protocol: int, *, next: str) -> None:
    """An operator, an agent or a worker of another version says another number."""
    if protocol != names.PROTOCOL:
        raise Refuse(
            "the caller speaks another protocol", got=str(protocol), wanted=str(names.PROTOCOL),
            next=next, exit_code=names.EXIT_USER_ERROR, why="protocol",
        )  # fmt: skip


class Sessions:
    def __init__(self) -> None:
        self.agents, self.workers = Guests[PodKey](), Guests[WorkerId]()
        self.told = self.heard = 0  # messages to and from workers
        self.refused: Counter[str] = Counter()  # hellos and words about plans, by why

    def refuse(self, error: RLinfError) -> int:
        """Counts a hello that is not answered by a welcome; the code that the caller exits with."""
        self.refused[error.why if isinstance(error, Refuse) else error.reason] += 1
        return error.exit_code if isinstance(error, Refuse) else names.EXIT_RETRYABLE

    def tell(self, worker: WorkerId, *, can_wait: bool = False, **kind: Any) -> None:
        """`tell(wid, begin=pb.Begin(...))`. `can_wait`: for the next frame to that worker (uplink.outbox)."""
        if worker in self.workers:
            self.told += 1
            self.workers.tell(worker, pb.DriverMessage(**kind), can_wait=can_wait)
