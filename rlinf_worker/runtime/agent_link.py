"""The worker's stream to its agent: signs of life, numbers, spans, last words; orders back.

The agent is the parent process: a stream that breaks means that it is dead, and this worker with it.

| task | consumes | waits for | unblocked by |
|---|---|---|---|
| run | orders | an order | the agent; the end of the stream |
| _tick | phase, accounts, spans | 0.5 s; each second the phase is marked | the clock: a blocked loop marks nothing |
| _write | reports | a report | whoever reports |
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Iterable
from time import monotonic
from typing import Any, Final

import grpc
import grpc.aio

from rlinf_api._pb.rlinf.slots.v1alpha1 import slots_pb2 as pb
from rlinf_api._pb.rlinf.slots.v1alpha1 import slots_pb2_grpc
from rlinf_api.errors import WorkerUnreachable
from rlinf_worker.phases import Mark, MarkWriter, Phases
from rlinf_worker.runtime.identity import WorkerIdentity
from rlinf_worker.runtime.work import Work
from rlinf_worker.spans import Recorder
from rlinf_worker.uplink.outbox import Outbox

logger = logging.getLogger(__name__)

FLUSH_INTERVAL_S: Final = 0.5
MARK_INTERVAL_S: Final = 1.0
MARK_LATER_S: Final = 0.1  # of a phase, which stands in its file at once
CONNECT_TIMEOUT_S: Final = 5.0  # a unix socket of our own parent

Number = tuple[str, tuple[str, ...], float]
"""Name, labels as k=v, absolute value of what is counted."""


class AgentLink:
    def __init__(
        self,
        identity: WorkerIdentity,
        *,
        phases: Phases,
        recorder: Recorder,
        work: Work,
        numbers: Callable[[], Iterable[Number]],
        on_stop: Callable[[str, float], None],
        on_turn: Callable[[pb.TurnOrder], None] = lambda order: None,
        on_membership: Callable[[pb.Membership], None] = lambda membership: None,
        on_promote: Callable[[pb.Promote], None] = lambda place: None,
        flush_s: float = FLUSH_INTERVAL_S,
    ) -> None:
        self._identity, self._phases, self._recorder, self._numbers = identity, phases, recorder, numbers
        self._work = work
        self._on_stop = on_stop
        self._on_turn, self._on_membership, self._on_promote = on_turn, on_membership, on_promote
        self._flush_s = flush_s
        self._outbox = Outbox[pb.WorkerReport]()
        self._told: dict[tuple[str, tuple[str, ...]], float] = {}
        self._channel: grpc.aio.Channel | None = None
        self._call: Any = None
        self._tasks: list[asyncio.Task[None]] = []
        self._file: MarkWriter | None = None
        self._mark_due: asyncio.TimerHandle | None = None

    async def open(self) -> None:
        """Says hello. Raises WorkerUnreachable where no agent listens."""
        path = self._identity.slots_socket
        self._channel = grpc.aio.insecure_channel(f"unix:{path}")
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await self._channel.channel_ready()
        except TimeoutError as error:
            raise WorkerUnreachable(
                f"no agent answers at {path}", wanted="the agent that started this worker", next="it is restarted"
            ) from error
        self._call = slots_pb2_grpc.SlotsStub(self._channel).Join()
        me = self._identity
        self._say(hello=pb.Hello(worker=me.worker, attempt=me.attempt, pid=os.getpid()))
        self._declare()
        self.mark()
        self._phases.on_change = self._declare
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(self._write(), name="to the agent"),  # the first: `close` waits for it
            loop.create_task(self._tick(), name="signs of life"),
        ]

    def _say(self, **kind: Any) -> None:
        self._outbox.put(pb.WorkerReport(**kind))

    def _declare(self) -> None:
        """Another phase. In the file first: the loop may be blocked before a message leaves."""
        self._work.moved()
        mark = Mark(self._phases.phase, self._phases.deadline_s(), monotonic())
        try:
            if self._file is None:
                self._file = MarkWriter(self._identity.folder)
            self._file.write(mark)
        except OSError as error:  # a full disk, say: the message is left
            logger.warning("a phase is not in its file", extra={"phase": mark.phase, "error": str(error)})
        if self._mark_due is None:  # a message costs what a change of turns may take: phases of that time share one
            self._mark_due = asyncio.get_running_loop().call_later(MARK_LATER_S, self.mark)

    def mark(self) -> None:
        if self._mark_due is not None:
            self._mark_due.cancel()
            self._mark_due = None
        phases, work = self._phases, self._work
        self._say(
            progress=pb.Progress(
                phase=phases.phase,
                deadline_s=phases.deadline_s(),
                stuck_s=work.stuck_s,
                still_s=work.still_s,
                doing=work.doing,
            )
        )

    def turn(self, report: pb.TurnReport) -> None:
        self._say(turn=report)

    def last_words(self, reason: str, message: str, exit_code: int) -> None:
        self._say(last_words=pb.LastWords(reason=reason, message=message, exit_code=exit_code))

    async def run(self) -> None:
        """Until the stream ends, which raises WorkerUnreachable: without its agent a worker is nobody's."""
        why = "its stream ended"
        try:
            while (order := await self._call.read()) is not grpc.aio.EOF:
                kind = order.WhichOneof("kind")
                if kind == "stop":
                    self._on_stop(order.stop.reason or "the agent says so", order.stop.grace_s)
                elif kind == "turn":
                    self._on_turn(order.turn)
                elif kind == "membership":
                    self._on_membership(order.membership)
                elif kind == "promote":
                    self._on_promote(order.promote)
                else:
                    logger.warning("an order that this version does not know", extra={"kind": kind})
        except grpc.aio.AioRpcError as error:
            why = f"{error.code().name}: {error.details()}"
        raise WorkerUnreachable("the agent of this worker is gone", got=why, next="this worker ends too")

    async def _write(self) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # `run` says why
            while batch := await self._outbox.drain():
                for report in batch:
                    await self._call.write(report)

    async def _tick(self) -> None:
        marked_at, longest_s = monotonic(), 2 * max(MARK_INTERVAL_S, self._flush_s)
        while True:
            await asyncio.sleep(self._flush_s)
            if (seconds := monotonic() - marked_at) >= MARK_INTERVAL_S - 0.1:
                marked_at += seconds
                self._work.tick(min(seconds, longest_s))  # more: the loop was blocked, or the machine stood still
                self.mark()
            self.flush_numbers()

    def flush_numbers(self) -> None:
        """Counters that have moved, and spans."""
        moved = []
        for name, labels, value in self._numbers():
            if self._told.get((name, labels)) != value:
                self._told[(name, labels)] = value
                moved.append(pb.Counter(name=name, labels=labels, value=value))
        if moved:
            self._say(counters=pb.Counters(counters=moved))
        spans = self._recorder.flush()
        if spans or self._recorder.dropped:
            me = self._identity
            dropped, self._recorder.dropped = self._recorder.dropped, 0
            self._say(
                spans=pb.Spans(
                    dropped=dropped,
                    spans=[
                        pb.Span(
                            slot=me.slot,
                            role=me.role,
                            worker=me.worker,
                            kind=s.kind,
                            step=s.step,
                            version=s.version,
                            t0=s.t0,
                            t1=s.t1,
                            units=s.amount.units if s.amount is not None else 0.0,
                            tokens=s.amount.tokens if s.amount is not None else 0.0,
                            channel=s.on.channel,
                        )
                        for s in spans
                    ],
                )
            )

    async def close(self, *, timeout_s: float = 0.5) -> None:
        """What was said is written first, if the agent still reads."""
        if self._call is None:
            return
        self.flush_numbers()
        if self._mark_due is not None:
            self.mark()
        self._outbox.close("this worker ends")
        await asyncio.wait(self._tasks[:1], timeout=timeout_s)
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        # A call that is cancelled at once may take its last message along: the agent ends it when it has read all.
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._call.done_writing()
                await self._call.code()
        self._call.cancel()
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._channel is not None:
            await self._channel.close()
