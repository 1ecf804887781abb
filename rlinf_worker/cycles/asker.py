"""The end of a cycle that asks, in a worker: questions go to whoever the driver names, answers come back.

For: runtime.context, which hands it to the role as `Asking`. The rules of a conversation are conversation.py's.

A question goes to whoever has least to do, of those with room; or, under an affinity, to whoever had the one before it.
When the driver ends a route, or the life at its other end is over, what is unanswered goes to the others, in order, or
waits for the next; an answer that still comes by the old way is left out. Only this end is told of routes: who answers
does so on the conversation that the question came by.

A new driver knows nothing of routes to lives that died with the one before it: these end when the worker has another
life, or, where the new driver has not named it, when the peer is not reached. Routes are numbered, and the end of one
leaves alone the conversation of a later one.

| waits | for | unblocked by |
|---|---|---|
| ask | somebody with room | an answer; a new route; peer_wait_s |
| take | an answer | data; the worker's stop |
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Final

from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_api.errors import UserError
from rlinf_api.names import WorkerId
from rlinf_worker.channels.account import Level
from rlinf_worker.channels.host import Host
from rlinf_worker.channels.payload_type import PayloadType
from rlinf_worker.channels.protocol import Item, LineageKey, PolicyVersion
from rlinf_worker.cycles.conversation import Asked
from rlinf_worker.cycles.ends import CycleEnd
from rlinf_worker.links import frames
from rlinf_worker.links.endpoint import Endpoint
from rlinf_worker.links.errors import PayloadError
from rlinf_worker.links.message import Message
from rlinf_worker.links.peers import Peer

MAX_AFFINITIES: Final = 16_384  # names: conversations of many turns that one worker has under way, and some more
MAX_UNTAKEN: Final = 65_536  # answers that lie here: a role that has so many never takes any

Life = tuple[str, int]


@dataclass(slots=True)
class OpenQuestion:
    """A question until it is answered: its encoding, which is sent again under another head."""

    key: str
    step: int
    branch: int
    version: PolicyVersion
    affinity: str
    body: bytes
    buffers: Sequence[Any]
    nbytes: int
    was_sent: bool = False
    since: float = field(default_factory=monotonic)


class AskingEnd:
    """With one life of one answerer."""

    def __init__(self, asker: Asker, peer: Peer, *, number: int, credit: int, route: int) -> None:
        """`route`: its number, as the driver gave it last."""
        self.peer, self.asked, self.route = peer, Asked[OpenQuestion](number, credit=credit), route
        self.source = WorkerId(peer.worker)
        self._asker = asker
        peer.asking[number] = self
        self.replay()

    def replay(self) -> None:
        asked, asker = self.asked, self._asker
        again = asked.opened()
        head = frames.Open(asked.number, asker.name, [number for number, _ in again], asker.declared)
        self.peer.post(Message(frames.encode(head)))
        for number, question in again:
            self._post(number, question, Message(b"", body=question.body, buffers=question.buffers))

    def ask(self, question: OpenQuestion, message: Message) -> None:
        self._post(self.asked.ask(question), question, message)

    def _post(self, number: int, question: OpenQuestion, message: Message) -> None:
        """While there is no link it goes nowhere, and is asked again on the next."""
        message.head = self._head(number, question)
        self._asker.account_out.resent += question.was_sent
        question.was_sent |= self.peer.link is not None
        self.peer.post(message)

    def _head(self, number: int, question: OpenQuestion) -> bytes:
        branch, version = question.version.branch, question.version.number
        asked = self.asked
        return frames.encode(
            frames.Ask(asked.number, number, question.key, question.step, question.branch, branch, version, asked.got())
        )

    def on_answer(self, frame: frames.Answer, message: Message) -> None:
        question = self.asked.answered(frame.number, load=frame.load)
        if question is None:
            self._asker.account_in.duplicates += 1
            message.release()
            return
        self._asker.on_answer(self, question, frame, message)

    def end(self) -> list[OpenQuestion]:
        """What it leaves unanswered."""
        del self.peer.asking[self.asked.number]
        self.peer.post(Message(frames.encode(frames.Close(self.asked.number))))
        return self.asked.take_back()


Answered = tuple[AskingEnd, OpenQuestion, frames.Answer]


class Asker(CycleEnd[Answered]):
    """`Asking` over conversations. One per cycle and worker."""

    def __init__(self, host: Host, spec: pb.ChannelSpec) -> None:
        questions, answers = PayloadType.of(spec.payload), PayloadType.of(spec.answers)
        super().__init__(host, spec.name, gives=questions, takes=answers, what="an answer")
        self._room = host.waits.signal()
        self._with: dict[Life, AskingEnd] = {}
        self._of_old_driver: set[Life] = set()  # the driver of today has not named them
        self._homeless: deque[OpenQuestion] = deque()
        self._had_last: OrderedDict[str, Life] = OrderedDict()  # by affinity

    # --- the driver's word --------------------------------------------------------------------------------------------
    def on_route(self, endpoint: Endpoint, *, credit: int, number: int = 0) -> None:
        """Told again for the same life, nothing changes but the credit. `number`: another for each time that the route
        is given; 0 of a driver that does not number them."""
        life = (endpoint.worker, endpoint.attempt)
        known = self._with.get(life)
        if known is not None and known.route != number and life not in self._of_old_driver:
            self._end(life)  # the word of its end was lost with a stream to the driver
            known = None
        self._of_old_driver.discard(life)
        peer = self._host.peers.want(endpoint, by=self.name, at_once=True)
        if known is None:
            known = self._with[life] = AskingEnd(
                self, peer, number=self._host.new_conversation(), credit=1, route=number
            )
        known.route, known.asked.credit = number, max(1, credit)
        self._ask_again()

    def on_unroute(self, worker: str, attempt: int, *, number: int = 0) -> None:
        known = self._with.get((worker, attempt))
        if known is not None and not known.route > number > 0:
            self._end((worker, attempt))
            self._ask_again()

    def on_new_driver(self) -> None:
        self._of_old_driver = {*self._with}

    def on_unreachable(self, peer: Peer) -> None:
        if (peer.worker, peer.attempt) in self._of_old_driver:
            self.on_unroute(peer.worker, peer.attempt)

    def on_superseded(self, peer: Peer) -> None:
        self.on_unroute(peer.worker, peer.attempt)

    def _end(self, life: Life) -> None:
        conversation = self._with.pop(life)
        self._of_old_driver.discard(life)
        self._homeless.extend(conversation.end())
        self._host.peers.unwant(conversation.peer, by=self.name)

    def _ask_again(self) -> None:
        """Somebody has more room, or is new: what has lost its own goes first, in order, then what waits in `ask`."""
        while self._homeless and (found := self._find(self._homeless[0].affinity)) is not None:
            question = self._homeless.popleft()
            self._give(found, question, Message(b"", body=question.body, buffers=question.buffers))
        self._room.notify()

    # --- asking -------------------------------------------------------------------------------------------------------
    async def ask(
        self,
        payload: Any,
        *,
        key: LineageKey | str,
        step: int,
        branch: int = 0,
        version: PolicyVersion | None = None,
        affinity: str = "",
    ) -> None:
        self._host.check_begun("ask", self.name)
        account = self.account_out
        said, message, nbytes = self._checked(payload, key=key, step=step, branch=branch, version=version)
        found = self._find(affinity)
        if found is None:
            with account.waiting():
                found = await self._somebody_with_room(affinity)
        body, buffers = message.encoded()
        question = OpenQuestion(said.key, said.step, said.branch, said.version, affinity, body, buffers, nbytes)
        self._give(found, question, message)
        account.items += 1
        account.bytes += nbytes

    def _give(self, conversation: AskingEnd, question: OpenQuestion, message: Message) -> None:
        conversation.ask(question, message)
        if question.affinity:
            self._had_last[question.affinity] = (conversation.peer.worker, conversation.peer.attempt)
            self._had_last.move_to_end(question.affinity)
            while len(self._had_last) > MAX_AFFINITIES:
                self._had_last.popitem(last=False)

    def _find(self, affinity: str) -> AskingEnd | None:
        """With room, now: whoever had the last question of this affinity, else who has least to do."""
        if affinity and (known := self._with.get(self._had_last.get(affinity, ("", 0)))) is not None:
            return known if known.asked.room > 0 else None
        free = [c for c in self._with.values() if c.asked.room > 0]
        return min(free, key=lambda c: (c.asked.load, -c.asked.room)) if free else None

    async def _somebody_with_room(self, affinity: str) -> AskingEnd:
        host, found = self._host, list[AskingEnd]()

        def look() -> bool:
            found[:] = [one] if (one := self._find(affinity)) is not None else []
            return bool(found)

        await host.waits.until(
            look,
            self._room,
            what=f"room for a question of {host.worker} in cycle {self.name!r}",
            timeout_s=self._host.peer_wait_s,
            missing=lambda: "an answer of " + ", ".join(w for w, _ in self._with) if self._with else "a route",
        )
        return found[0]

    # --- answers ------------------------------------------------------------------------------------------------------
    def on_answer(
        self, conversation: AskingEnd, question: OpenQuestion, frame: frames.Answer, message: Message
    ) -> None:
        if len(self.inbox) >= MAX_UNTAKEN:
            raise UserError(
                f"role {self._host.role!r} asks in cycle {self.name!r} and takes no answers",
                got=f"{len(self.inbox)} that lie here", next="take() as many as it asks",
            )  # fmt: skip
        self.inbox.put((conversation, question, frame), message)
        self._ask_again()

    def _item(self, entry: Answered, message: Message) -> Item:
        (conversation, question, frame), account, nbytes = entry, self.account_in, message.nbytes - len(message.head)
        _, buffers = message.encoded()
        try:
            payload = message.value()
            if self._takes is not None and frame.declared != self._takes.fingerprint and not frame.is_dropped:
                self._takes.check(payload, self.name, question.key)
        except PayloadError as error:
            account.dropped[error.reason] += 1
            raise
        item = Item(
            channel=self.name,
            key=LineageKey(question.key),
            payload=payload,
            step=question.step,
            branch=question.branch,
            source=conversation.source,
            version=PolicyVersion(frame.version_branch, frame.version_number),
            cancelled=frame.is_dropped,
        )
        if frame.is_dropped:
            account.dropped["Unanswered"] += 1
        if buffers:
            message.release()
            item._borrows = True
        account.items += 1
        account.bytes += nbytes
        return item

    # --- looking in ---------------------------------------------------------------------------------------------------
    @property
    def unanswered(self) -> list[OpenQuestion]:
        return [*(question for c in self._with.values() for question in c.asked.unanswered), *self._homeless]

    def _level_out(self) -> Level:
        left = self.unanswered
        since = min((question.since for question in left), default=monotonic())
        return Level(len(left), sum(question.nbytes for question in left), monotonic() - since)
