"""What an agent has yet to tell its driver. Bounded; survives a broken stream and a change of drivers.

Filled by the agent, emptied by `attach.py`. A stream that breaks says nothing about what had arrived, so the last exit
of every worker without a process is told again after each hello; a driver takes exits once by (worker, attempt).
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque

from rlinf_api._pb.rlinf.agents.v1alpha1 import agents_pb2


class Outbox:
    """`put` .... `take`; `again` begins a new stream. What does not fit pushes out the oldest and is counted."""

    def __init__(self, *, limit: int) -> None:
        self._limit = limit
        self._queue: deque[agents_pb2.AgentMessage] = deque()
        self._exits: OrderedDict[str, agents_pb2.AgentMessage] = OrderedDict()
        self.filled = asyncio.Event()
        self.dropped = 0

    def put(self, message: agents_pb2.AgentMessage) -> None:
        if message.WhichOneof("kind") == "exited":
            self._exits.pop(message.exited.worker, None)
            self._exits[message.exited.worker] = message
            while len(self._exits) > self._limit:
                self._exits.popitem(last=False)
        self._queue.append(message)
        while len(self._queue) > self._limit:
            self._queue.popleft()
            self.dropped += 1
        self.filled.set()

    def started(self, worker: str) -> None:
        """It has a process again: its last exit is history, which the hello's attempt says as well."""
        self._exits.pop(worker, None)

    def again(self, *, same_driver: bool) -> None:
        """A new stream begins. Results are for the driver that asked; hangs and exits for any."""
        kinds = {"hung", "result"} if same_driver else {"hung"}
        rest = [m for m in self._queue if m.WhichOneof("kind") in kinds]
        self._queue = deque([*self._exits.values(), *rest])
        if self._queue:
            self.filled.set()

    def take(self) -> agents_pb2.AgentMessage | None:
        if not self._queue:
            self.filled.clear()
            return None
        return self._queue.popleft()

    def __len__(self) -> int:
        return len(self._queue)
