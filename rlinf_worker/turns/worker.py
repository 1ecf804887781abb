"""Turns as a worker sees them: `ctx.turn()`, `ctx.safe_point()`, and the calls of the role's load and offload.

For: runtime.context (the role's side), runtime.agent_link (orders), channels.waiting (waits are safe points too). Who
is to hold the slots is not decided here (rlinf_worker.turns.rule). Where the plan has no lease set over its slots, a
worker holds them for its whole life.

| waits | for | unblocked by |
|---|---|---|
| turn | Membership, then a grant and the load | the agent |
| safe_point, every wait of Waits inside a turn | the next grant, once frozen | the agent |
| a move of `residence` (one at a time) | load or offload of the role | the role |
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from time import monotonic
from typing import Any, Final

from rlinf_api._pb.rlinf.slots.v1alpha1 import slots_pb2 as pb
from rlinf_api.errors import UserError
from rlinf_worker.channels.waiting import Waits
from rlinf_worker.memory import Footprint
from rlinf_worker.phases import Phases
from rlinf_worker.roles.protocol import Offloadable
from rlinf_worker.settings import Settings
from rlinf_worker.spans import OpenSpan, Recorder
from rlinf_worker.sums import MemoryUse
from rlinf_worker.turns.rule import Kind, Standing
from rlinf_worker.turns.stance import Idleness, Stance
from rlinf_worker.turns.term import NONE, Progress, Term

logger = logging.getLogger(__name__)

Piece = Callable[[str], AbstractContextManager[object]]

MEMBERSHIP_TIMEOUT_S: Final = 30.0  # the agent says it in answer to our hello, over a socket of this pod
SLOW_OFFLOAD_S: Final = 0.05  # only then is it said beforehand: the word would stand before the one that is waited for
LOOKS_SHARE: Final = 0.01
"""The share of the time for looks at what is in use: the kernel adds up a process of a gigabyte in 10 ms, and who has
the next turn waits for it. A turn of 20 ms would last 40."""


class Residence:
    """A role on its slots: loaded, or offloaded to make room for others; one move at a time. Where it has nothing to
    offload, only what its channels keep there moves."""

    def __init__(
        self, recorder: Recorder, phases: Phases, *, spill: Callable[[], int], fatal: Callable[[BaseException], None],
        piece: Piece = nullcontext, step: Callable[[], int] = lambda: -1, footprint: Footprint | None = None,
        left: Callable[[int], None] = lambda kept: None,
    ) -> None:  # fmt: skip
        """`spill` moves what channels keep on the slots to host memory; bytes that moved. `piece`: around a move, which
        is work that must end, though the role itself waits meanwhile. `step`: the newest that the role works on. `left`
        is told what an offloaded role was seen to keep."""
        self._recorder, self._phases, self._spill, self._fatal = recorder, phases, spill, fatal
        self._piece, self._step, self._footprint, self._left = piece, step, footprint, left
        self._peak = self._offloaded = 0  # bytes on the slots, at most and when offloaded, as far as the role says
        self.seen: dict[str, int] = {}
        """Bytes on the slots, measured, before and after the last offload that was looked at."""
        self._looks_again_at = -math.inf
        self.role: object = None
        self.is_loaded = True  # a role builds itself on its slots
        self.seconds = {"load": 0.0, "offload": 0.0}
        self._moving = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def is_moving(self) -> bool:
        return self._moving.locked()

    @property
    def memory_bytes(self) -> int:
        return self.role.memory().now if isinstance(self.role, Offloadable) else 0

    def memory(self) -> MemoryUse:
        """On the slots."""
        if not isinstance(self.role, Offloadable):
            return MemoryUse()
        said = self.role.memory()
        self._peak = max(self._peak, said.peak, said.resident, said.now)
        resident = said.resident or (said.now if self.is_loaded else 0)
        return MemoryUse(resident=resident, peak=self._peak, offloaded=self._offloaded)

    def begin(self, move: Coroutine[Any, Any, None]) -> None:
        """Beside the role, behind a move that is under way."""
        task = asyncio.ensure_future(move)
        self._tasks.add(task)
        task.add_done_callback(self._moved)

    def _moved(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fatal(error)

    async def load(self) -> None:
        async with self._moving:
            if not self.is_loaded and isinstance(self.role, Offloadable):
                loading, before = self._recorder.begin("load", step=self._step()), self.memory_bytes
                try:
                    with self._phases.during("load"), self._piece("load"):
                        await self.role.load()
                finally:
                    seconds = loading.end()
                    self.seconds["load"] += seconds
                self._recorder.sums.moved("load", seconds, self.memory_bytes - before)
            self.is_loaded = True

    async def offload(self, *, stays: bool = False) -> None:
        """`stays`: only what channels keep there leaves."""
        async with self._moving:
            if stays:
                self._spill()
                return
            is_there = self.is_loaded and isinstance(self.role, Offloadable)
            begun = monotonic()
            is_looked_at = is_there and begun >= self._looks_again_at
            before = await self._look() if is_looked_at else None  # outside of the span: it is no part of the move
            looked = monotonic() - begun
            offloading, said, was_loaded = self._recorder.begin("offload", step=self._step()), 0, self.is_loaded
            try:
                self._spill()  # first, as it needs the device as it is
                if isinstance(self.role, Offloadable) and self.is_loaded:
                    said = self.memory_bytes
                    with self._phases.during("load"), self._piece("offload"):
                        await self.role.offload()
                    self.is_loaded = False
            finally:
                seconds = offloading.end()
                self.seconds["offload"] += seconds
            if was_loaded and not self.is_loaded:
                if is_looked_at:
                    begun = monotonic()
                    self._compare(before, await self._look(), said=said)
                    self._looks_again_at = monotonic() + (looked + monotonic() - begun) / LOOKS_SHARE
                self._peak, self._offloaded = max(self._peak, said), self.memory_bytes
                self._recorder.sums.moved("offload", seconds, said - self._offloaded)

    async def try_moves(self) -> None:
        """What a change of turn would cost a role that takes none: off and on again, for the profile. Twice, as the
        first time makes the host's buffers; the second is what is told."""
        role = self.role
        if not isinstance(role, Offloadable):
            return
        async with self._moving:
            for is_told in (False, True):
                for what, move in (("offload", role.offload), ("load", role.load)):
                    before, begun = self.memory_bytes, monotonic()
                    with self._phases.during("load"), self._piece(what):
                        await move()
                    if is_told:
                        moved = abs(self.memory_bytes - before)
                        self._recorder.sums.moved(what, monotonic() - begun, moved)
                    if is_told and what == "offload":
                        self._peak, self._offloaded = max(self._peak, before), self.memory_bytes

    async def _look(self) -> int | None:
        return await asyncio.to_thread(self._footprint.now) if self._footprint is not None else None

    def _compare(self, before: int | None, after: int | None, *, said: int) -> None:
        if self._footprint is None or before is None or after is None:
            return
        self.seen = {"loaded": before, "offloaded": after}
        kept = self._footprint.kept(before, after, said=said)
        if kept is not None:
            self._left(kept)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class Speech:
    """What was said last, so that only news is said; and the moment in which nothing is."""

    def __init__(self, look: Callable[[], None]) -> None:
        self._look = look
        self._last: tuple[object, ...] = ()
        self._rest: asyncio.TimerHandle | None = None

    @property
    def rests(self) -> bool:
        return self._rest is not None

    def rest(self, seconds: float) -> None:
        """What is said in the end may come within that time: the word before it would only stand in its way."""
        self._rest = asyncio.get_running_loop().call_later(seconds, self._rested)

    def _rested(self) -> None:
        self._rest = None
        self._look()

    def wake(self) -> None:
        if self._rest is not None:
            self._rest.cancel()
            self._rest = None

    def is_news(self, *said: object) -> bool:
        before, self._last = self._last, said
        return said != before

    def forget(self) -> None:
        """It is said again, though nothing changes."""
        self._last = ()


class Wish:
    """The wish for the slots: a span from the moment on at which a worker could use a turn."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._span: OpenSpan | None = None
        self.seconds = 0.0
        self.since = 0.0

    def note(self, standing: Standing) -> None:
        if standing is Standing.WANTS and self._span is None:
            self._span, self.since = self._recorder.begin("wait_turn"), monotonic()
        elif standing is Standing.CONTENT:
            self.end()

    def end(self) -> None:
        if self._span is not None:
            self.seconds += self._span.end()
            self._span = None

    def so_far(self) -> float:
        """Seconds, with those of a wish that is not granted yet."""
        return self.seconds + (self._span.lasts() if self._span is not None else 0.0)


class TurnGap:
    """How long slots lie idle between two turns, moves apart: from the last work of one worker to the first of the
    next, or from when that could have worked. Of sets inside a pod, whose processes have one clock."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._paused_at = self._rested_at = self._granted_of = 0.0
        self.free_since = 0.0
        """As it left the slots: what its offload took is none of the change."""

    def paused(self) -> None:
        """The role waits, perhaps for nothing more of this turn."""
        self._paused_at = monotonic()

    def rested(self, *, paused: bool = False) -> None:
        """It works no more in this turn: from now on, or from its last pause on."""
        self._rested_at = (self._paused_at if paused else 0.0) or monotonic()

    def left(self, *, moved_s: float) -> None:
        self.free_since = (self._rested_at or monotonic() - moved_s) + moved_s
        self._rested_at = self._paused_at = 0.0

    def granted(self, free_since: float) -> None:
        self._granted_of = free_since

    def begins(self, *, wanted_since: float, load_s: float) -> None:
        if self._granted_of:
            begun = max(self._granted_of, wanted_since)
            self._recorder.sums.moved("turn", max(0.0, monotonic() - load_s - begun), 0)
            self._granted_of = 0.0


class Turns:
    """One per worker process. `say` is None where there is no agent, which tests do: then there are no lease sets."""

    def __init__(
        self,
        *,
        waits: Waits,
        recorder: Recorder,
        phases: Phases,
        settings: Settings,
        fatal: Callable[[BaseException], None],
        progress: Callable[[], Progress] = Progress,
        has_input: Callable[[], bool] = lambda: True,
        say: Callable[[pb.TurnReport], None] | None = None,
        spill: Callable[[], int] = lambda: 0,
        piece: Piece = nullcontext,
        footprint: Footprint | None = None,
        left: Callable[[int], None] = lambda kept: None,
        tries_moves: Callable[[], bool] = lambda: False,
        stays: Callable[[], bool] = lambda: False,
    ) -> None:
        """`has_input`: whether a role that was stopped at a safe point has something to go on with. `spill` moves what
        channels keep on the slots to host memory; bytes that moved. `tries_moves`: whether a role that takes no turns
        is moved off its slots and back once, as it may take some under another plan. `stays`: whether the plan in force
        leaves the role resident while others have the turn."""
        self._waits, self._recorder = waits, recorder
        self._progress, self._tell = progress, say
        self._tries_moves = tries_moves
        self.residence = Residence(
            recorder,
            phases,
            spill=spill,
            fatal=fatal,
            piece=piece,
            step=lambda: progress().step,
            footprint=footprint,
            left=left,
        )
        self._stays, self._stayed = stays, False
        self.term = Term(progress)
        self._known = say is None
        self.lease_set = ""
        self._changed = waits.signal()
        self.yield_wanted = asyncio.Event()
        self._has_tried = False
        self._stance = Stance(waits, has_input=has_input)
        self._idle = Idleness(
            self._stance, waits, recorder, after_s=settings.turn_idle_s, found=lambda: self._freeze(Standing.IDLE)
        )
        self._seen = 0
        self._leave_asked = 0  # number of an OFFLOAD that came while the role was at work
        self._speech, self._wish, self._gap = Speech(self.look), Wish(recorder), TurnGap(recorder)
        recorder.on_end = self._something_ended
        self.switches = 0

    # --- the role's side ----------------------------------------------------------------------------------------------
    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        if self._stance.inside:
            raise UserError("a role asks for a turn inside its turn", next="leave the block first, or use safe_point()")
        await self._wait(lambda: self._known, "the agent's word on lease sets", timeout_s=MEMBERSHIP_TIMEOUT_S)
        self._stance.inside = True
        try:
            if self.lease_set:
                self._stance.entering = True
                self.look()
                await self._regain()
                self._stance.entering = False
            elif not self._has_tried and self._tries_moves():
                self._has_tried = True
                await self.residence.try_moves()
            yield
        finally:
            self._stance.inside = self._stance.entering = False
            self._wish.end()
            if self.lease_set and self._waits.stopped is None and (self._stance.is_on or self._stance.granted):
                self._gap.rested()
                await self._go_off(self._seen)

    async def safe_point(self, *, oldest: int | None = None) -> None:
        if not self._stance.inside or not self.lease_set:
            return
        if self._stance.works and self.term.is_due(oldest=oldest):
            self._freeze(Standing.DUE)
        if not self.is_open:
            await self._regain()

    async def _regain(self) -> None:
        waiting = self._recorder.begin("wait_data")  # as long as there is nothing that it wants a turn for
        try:
            await self._wait(lambda: self.is_open, f"a turn of lease set {self.lease_set!r}", timeout_s=None)
        finally:
            waiting.end()

    async def _wait(self, condition: Callable[[], bool], what: str, *, timeout_s: float | None) -> float:
        return await self._waits.until(
            condition, self._changed, what=what, timeout_s=timeout_s, missing="the agent", gated=False
        )

    def consider(self, took: int = NONE) -> None:
        """Whether the next safe point ends this turn, as somebody waits for it: the role may hear so beside its work.
        Called with whatever may change that: orders, what the role takes, the end of its step. `took`: of a unit or a
        round, its step; a question of a cycle ends no turn."""
        self.term.took(took)
        if not self.lease_set:
            return
        is_told = self._stance.told is not None or self._leave_asked > 0
        if is_told and self._stance.inside and self._stance.works and self.term.is_due():
            self.yield_wanted.set()
        else:
            self.yield_wanted.clear()

    def step_ended(self) -> None:
        """The step that this rank has told done is committed."""
        self.term.step_ended()
        self.consider()

    # --- the gate of every wait ---------------------------------------------------------------------------------------
    @property
    def is_open(self) -> bool:
        """Whether the role may go on."""
        return not (self._stance.inside and self.lease_set) or self._stance.works

    def waiting(self) -> None:
        """A wait has begun: perhaps nothing is left to do."""
        self._gap.paused()
        self._idle.suspect()

    def _something_ended(self) -> None:
        """A span."""
        self._gap.paused()
        self._idle.work_ended()

    def _freeze(self, standing: Standing) -> None:
        self._stance.frozen = standing
        self._gap.rested(paused=standing is Standing.IDLE)
        if self._leave_asked:
            number, self._leave_asked = self._leave_asked, 0
            self.residence.begin(self._go_off(number))
        else:
            self._leave_if_told()
        self.look()

    def _leave_if_told(self) -> None:
        if self._stance.may_leave_unasked():
            self._stance.leave()
            if self._stance.told is Kind.LEAVE:  # it is alone in its role
                self._speech.rest(SLOW_OFFLOAD_S)
            self.residence.begin(self._go_off(0))

    # --- what is said -------------------------------------------------------------------------------------------------
    def look(self) -> None:
        """Says where this worker stands, if that has changed."""
        self._waits.gate_moved()
        self.consider()
        if self._tell is None or not self.lease_set or self._speech.rests:
            return
        standing, ripe = self._stance.standing()
        self._wish.note(standing)
        loaded = self.residence.is_loaded  # with a load its memory is another
        if not self._speech.is_news(self.lease_set, standing, ripe, self._seen, loaded):
            return
        self._tell(
            pb.TurnReport(
                lease_set=self.lease_set,
                standing=standing,
                ripe=ripe,
                seen=self._seen,
                items=self._progress().items,
                memory_bytes=self.residence.memory_bytes,
                stays=self._stayed,
                free_since=0.0 if self._stance.granted else self._gap.free_since,
            )
        )

    # --- orders -------------------------------------------------------------------------------------------------------
    def on_membership(self, membership: pb.Membership) -> None:
        before, self.lease_set = self.lease_set, membership.lease_set
        was_known, self._known = self._known, True
        self._waits.gate = self if self.lease_set else None
        self._speech.forget()
        if self.lease_set and not before and self._stance.inside:
            self._stance.join()
        elif self.lease_set and not before and was_known and self.residence.is_loaded:
            self._stance.leave()
            self.residence.begin(self._go_off(self._seen))
        elif before and not self.lease_set:
            self._stance.secede()
            self._stayed = False
            self.yield_wanted.clear()
            self._wish.end()
            self.residence.begin(self._come_on())  # behind an offload that is under way
        self._notify()
        self.look()

    def on_order(self, order: pb.TurnOrder) -> None:
        if order.lease_set != self.lease_set or order.number <= self._seen:
            return
        match order.kind:
            case Kind.GRANT:
                self._seen, self._stayed = order.number, False
                self._stance.grant(yielding=order.yielding)
                self._gap.granted(order.free_since)
                self.term.begin(until_units=order.until_units)
                self.switches += 1
                if self.residence.is_loaded and not self.residence.is_moving:
                    self._begin_work()
                else:
                    self.residence.begin(self._come_on())
            case Kind.YIELD | Kind.FINISH | Kind.LEAVE | Kind.END:
                self._seen, self._stance.told = order.number, Kind(order.kind)
                if order.kind == Kind.END:
                    self.term.end()
                self._idle.look()
                self._leave_if_told()
            case Kind.RESUME:
                self._seen = order.number
                if self._stance.frozen is Standing.DUE:
                    self.term.begin()
                self._stance.resume(yielding=order.yielding)
                self._notify()
                self.waiting()
            case Kind.OFFLOAD if self._stance.works:
                self._leave_asked = order.number
            case Kind.OFFLOAD:
                self.residence.begin(self._go_off(order.number))
            case Kind.PRELOAD:
                self.residence.begin(self._preload(order.number))
            case _:
                logger.warning("an order that this version does not know", extra={"kind": order.kind})
        self.look()

    def _notify(self) -> None:
        self._changed.notify()
        self._waits.notify_gated()

    # --- on and off the slots -----------------------------------------------------------------------------------------
    async def _come_on(self) -> None:
        begun = monotonic()
        await self.residence.load()
        self._begin_work(load_s=monotonic() - begun)

    def _begin_work(self, *, load_s: float = 0.0) -> None:
        self._stance.is_on = True
        self._gap.begins(wanted_since=self._wish.since, load_s=load_s)
        self._wish.end()
        self._notify()
        self.look()
        self.waiting()

    async def _preload(self, number: int) -> None:
        await self.residence.load()
        self._seen = max(self._seen, number)
        self.look()

    def replanned(self, then: Callable[[], None]) -> None:
        """Another plan is in force: `then` once the role is off slots on which it was to stay and is not any more. No
        step opens before."""
        if self._stayed and not self._stays():
            self._stayed = False
            self.residence.begin(self._stay_no_more(then))
        else:
            then()

    async def _stay_no_more(self, then: Callable[[], None]) -> None:
        await self.residence.offload()
        self.look()
        then()

    async def _go_off(self, number: int) -> None:
        self._stayed = self._stays()  # before the move: another plan may come meanwhile
        begun = monotonic()
        await self.residence.offload(stays=self._stayed)
        self._gap.left(moved_s=monotonic() - begun)
        self._speech.wake()
        self._stance.left()
        self._waits.watcher = self._watch if self._stance.is_halted else None
        self._seen = max(self._seen, number)
        self._speech.forget()
        self.look()

    def _watch(self) -> None:
        """Something has come, perhaps what a role that is halted can go on with: it does not look itself."""
        if self._stance.is_halted:
            self.look()
        else:
            self._waits.watcher = None

    def numbers(self) -> Iterator[tuple[str, tuple[str, ...], float]]:
        """For /metrics, as runtime.numbers."""
        if self.lease_set or self.switches:
            yield "rlinf_worker_turn_switches_total", (), float(self.switches)
            for what, seconds in (("wait", self._wish.so_far()), *self.residence.seconds.items()):
                yield f"rlinf_worker_turn_{what}_seconds_total", (), seconds
            for state, nbytes in self.residence.seen.items():
                yield "rlinf_worker_turn_memory_bytes", (f"state={state}",), float(nbytes)

    async def close(self) -> None:
        self._idle.close()
        self._speech.wake()
        await self.residence.close()
