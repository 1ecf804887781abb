"""This worker's place in its gang: the roster, and the words of its ranks, which travel by the workers' own links.

Who is in a gang is the driver's; what a meeting is: gang.meeting; collectives: roles.mesh, over `keep` and `kept`.

A collective blocks a rank's event loop, and a loop that gives no sign for a step's deadline is taken for hung. So a
rank enters collectives only when all the others are about to: until then it waits beside its loop, however long a slow
volume holds up rank 0's checkpoint or a unit that is made again holds up one rank's round.

There is no port for it: a word comes over a link whose other end has shown a certificate of the job, and counts where
that life of that worker is in the roster. ADR 24.

| waits | for | unblocked by |
|---|---|---|
| form | a Roster with this life in it | the driver, when every rank has asked |
| meet | every rank's word that it is there | the others; a rank that cannot be reached; meet_wait_s |
| kept | what a rank keeps for all | that rank; meet_wait_s |
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_api.errors import InvariantBroken, WorkerUnreachable
from rlinf_worker.channels import messages
from rlinf_worker.channels.host import Host
from rlinf_worker.gang.meeting import Meeting, Word
from rlinf_worker.links import frames
from rlinf_worker.links.endpoint import Endpoint
from rlinf_worker.links.message import Message
from rlinf_worker.links.peers import Peer
from rlinf_worker.roles.protocol import Place
from rlinf_worker.runtime.identity import WorkerIdentity

LOST_S: Final = 5.0  # of dialling a rank in vain: the driver hears of a death sooner, and ends the gang in good order
TELL_S: Final = 5.0  # for a word of some hundred bytes to leave this process
BY: Final = "gang"  # who wants the links


class RosteredGang:
    """One per worker."""

    def __init__(self, identity: WorkerIdentity, host: Host) -> None:
        self._me, self._host = identity, host
        self.rank, self.world = identity.rank, identity.world
        self.has_others = False  # other gangs end steps beside this one: they are formed together
        self._news = host.waits.signal()
        self.join: pb.Join | None = None
        """Asked, and not answered by a Roster: to be asked again of the next driver."""
        self._roster: pb.Roster | None = None
        self._meeting = Meeting(rank=self.rank, world=self.world)
        self._standing: tuple[Place, Any] | None = None  # where this rank waits
        self._kept: dict[str, bytes] = {}
        self._ranks: dict[Peer, int] = {}  # the links of this rank: rank 0's to all, the others' to rank 0
        self._early: dict[Peer, frames.GangWord] = {}  # of a roster that the driver has not told us yet
        self._lost: dict[Peer, tuple[float, str]] = {}  # since when it does not answer, and why
        peers = host.peers
        peers.handlers[frames.GangWord] = lambda peer, frame, message: self._on_word(peer, frame)
        peers.on_up.append(self._on_up)
        peers.on_unreachable.append(self._on_unreachable)

    # --- the roster ---------------------------------------------------------------------------------------------------
    async def form(self) -> None:
        if (self.world <= 1 and not self.has_others) or self._roster is not None:
            return
        self.join = pb.Join()
        self._host.tell(pb.WorkerMessage(join=self.join))
        await self._host.waits.until(
            lambda: self._roster is not None,
            self._news,
            what=f"the roster of gang {self._me.role!r} with all {self.world} ranks",
            timeout_s=self._host.peer_wait_s,
            missing="a rank that has not joined, of this gang or one that ends steps with it",
        )

    @property
    def endpoints(self) -> list[Endpoint]:
        """Where all ranks are reached, in their order. Before there is a roster: nobody."""
        members = self._roster.members if self._roster is not None else ()
        return [messages.endpoint_from_pb(m.endpoint) for m in sorted(members, key=lambda m: m.rank)]

    def on_roster(self, roster: pb.Roster) -> None:
        me = self._me
        if not any(m.endpoint.worker == me.worker and m.endpoint.attempt == me.attempt for m in roster.members):
            return  # of the lives before, or after, this one
        self.join = None
        if self._roster is None or roster.number != self._roster.number:
            self._open(roster)
        self._news.notify()

    def _open(self, roster: pb.Roster) -> None:
        """Words of another roster are void; whoever waits says its own again."""
        peers = self._host.peers
        self._roster, self._meeting = roster, Meeting(rank=self.rank, world=self.world)
        for peer in self._ranks:
            peers.unwant(peer, by=BY)
        self._ranks, self._kept = {}, {}
        self._lost.clear()
        for rank, endpoint in enumerate(self.endpoints):
            if rank != self.rank and 0 in (rank, self.rank):
                self._ranks[peers.want(endpoint, by=BY, at_once=False)] = rank
        early, self._early = self._early, {}
        for peer, frame in early.items():
            self._on_word(peer, frame)
        if self._standing is not None:
            self._meeting.come(*self._standing)
        self._say()

    # --- meeting ------------------------------------------------------------------------------------------------------
    async def meet(self, place: Place, value: Any = None) -> list[Any]:
        if self.world <= 1:
            return [value]
        self._standing = (place, value)
        coming = self._host.recorder.begin("comm", step=place[1])
        try:
            before = self._meeting.word
            if self._meeting.come(place, value) is not before:
                self._say()
            what = f"ranks of {self._name} to meet at step {place[1]} of branch {place[0]}"
            await self._until(lambda: self._meeting.met(place) is not None, what, missing=lambda: self._away(place))
            await self._until_told()  # what comes next may block this loop, and what is still to be sent
        finally:
            self._standing = None
            coming.end()
        values = self._meeting.met(place)
        assert values is not None
        return values

    async def _until_told(self) -> None:
        try:
            async with asyncio.timeout(TELL_S):
                for peer in self._ranks:
                    await peer.drained.wait()
        except TimeoutError as error:
            deaf = ", ".join(str(rank) for peer, rank in self._ranks.items() if not peer.drained.is_set())
            raise WorkerUnreachable(
                f"rank {deaf} of {self._name} was not told that all have met", got=f"words that wait for {TELL_S:g} s",
                wanted="a link that takes them", next="the gang is formed anew",
            ) from error  # fmt: skip

    def keep(self, key: str, value: bytes) -> None:
        self._kept[key] = value
        self._say()
        self._news.notify()

    async def kept(self, key: str) -> bytes:
        await self._until(lambda: key in self._kept, f"{key!r}, which a rank of {self._name} keeps")
        return self._kept[key]

    @property
    def _name(self) -> str:
        return f"roster-{self._roster.number}" if self._roster is not None else f"gang {self._me.role!r}"

    async def _until(self, condition: Callable[[], bool], what: str, *, missing: Callable[[], str] = str) -> None:
        """Not a safe point: whoever is off its slots keeps the others waiting."""
        if self._roster is None:
            raise InvariantBroken(f"{what} before the gang is formed", next="await ctx.gang.form() as the role loads")
        await self._host.waits.until(
            lambda: condition() or self._gone() is not None,
            self._news, what=what, timeout_s=self._host.meet_wait_s, missing=missing, gated=False,
        )  # fmt: skip
        if not condition() and (gone := self._gone()) is not None:
            rank, why = gone
            raise WorkerUnreachable(
                f"rank {rank} of {self._name} cannot be reached", got=why, wanted=f"an answer within {LOST_S:g} s",
                next="the gang is formed anew",
            )  # fmt: skip

    def _gone(self) -> tuple[int, str] | None:
        now = asyncio.get_running_loop().time()
        lost = ((self._ranks[peer], why) for peer, (since, why) in self._lost.items() if now - since >= LOST_S)
        return next(lost, None)

    def _away(self, place: Place) -> str:
        away = ", ".join(map(str, self._meeting.away(place)))
        return f"rank {away}" if self.rank == 0 else f"rank {away}, or one that it waits for"

    # --- words --------------------------------------------------------------------------------------------------------
    def _say(self) -> None:
        for peer in self._ranks:
            self._say_to(peer)

    def _say_to(self, peer: Peer) -> None:
        """All that this rank has to say. Lost with a link, it is said again over the next."""
        word = self._meeting.word
        if self._roster is None or (word is None and not self._kept):
            return
        place, values = (word.place, word.values) if word is not None else (None, [])
        frame = frames.GangWord(self._roster.number, place, values, self._kept)
        peer.post(Message(frames.encode(frame)))

    def _on_word(self, peer: Peer, frame: frames.GangWord) -> None:
        rank, number = self._ranks.get(peer), self._roster.number if self._roster is not None else -1
        if frame.roster > number:
            self._early[peer] = frame  # the driver tells one rank before the other
            return
        if rank is None or frame.roster != number:
            return  # of a roster that is over, or of nobody who is in this one
        said, knew = self._meeting.word, len(self._kept)
        self._kept.update(frame.kept)
        if frame.place is not None:
            self._meeting.hear(rank, Word(frame.place, frame.values))
        if self.rank == 0 and (self._meeting.word is not said or len(self._kept) > knew):
            self._say()
        self._news.notify()

    def _on_up(self, peer: Peer) -> None:
        self._lost.pop(peer, None)
        if peer in self._ranks:
            self._say_to(peer)

    def _on_unreachable(self, peer: Peer, why: str) -> None:
        if peer in self._ranks:
            since, _ = self._lost.get(peer, (asyncio.get_running_loop().time(), why))
            self._lost[peer] = (since, why)
            self._news.notify()
