"""The driver's program, with a count of the beats that it has heard and of those it heard too late: for scale.py.

`python -m tools.bench.runtime_parts.heard FILE` is `python -m rlinf_worker driver`, and FILE holds two numbers that
grow. A beat of scale.py carries the time at which it was sent in its sequence number, and both processes read
CLOCK_MONOTONIC, which is one clock for the whole machine. A beat is missed when the driver gets round to it later than
an interval after it was sent: the next one is due by then. What counting takes is on the driver's account: 1 us a beat.
"""

from __future__ import annotations

import mmap
import sys
import time
from pathlib import Path
from typing import Final, Self

from rlinf_api._pb.rlinf.agents.v1alpha1 import agents_pb2
from rlinf_worker import __main__ as program
from rlinf_worker.driver.agents import Agents
from rlinf_worker.driver.members import PodKey
from rlinf_worker.settings import Settings

LATE_NS: Final = int(1e9 * Settings().heartbeat_interval_s)
BYTES: Final = 16
HEARD, MISSED = 0, 1


class Tally:
    """Two numbers in a file: one process adds, another reads.

    >>> tally = Tally.of(Path("beats"), new=True); tally.numbers[HEARD] += 1
    """

    def __init__(self, file: mmap.mmap) -> None:
        self.numbers = memoryview(file).cast("q")

    @classmethod
    def of(cls, path: Path, *, new: bool = False) -> Self:
        if new:
            path.write_bytes(bytes(BYTES))
        with path.open("r+b") as file:
            return cls(mmap.mmap(file.fileno(), BYTES))

    def add(self, sent_ns: int) -> None:
        self.numbers[HEARD] += 1
        self.numbers[MISSED] += time.monotonic_ns() - sent_ns > LATE_NS


def main(path: Path) -> int:
    tally, hear = Tally.of(path), Agents.heard

    def heard(self: Agents, key: PodKey, message: agents_pb2.AgentMessage) -> bool:
        changed = hear(self, key, message)
        if message.HasField("heartbeat"):
            tally.add(message.heartbeat.sequence)
        return changed

    Agents.heard = heard  # type: ignore[method-assign]  # the program itself counts no beats
    return program.main(["driver"])


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
