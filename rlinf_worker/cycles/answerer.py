"""The end of a cycle that answers, in a worker: questions come over the links, each answer goes where it was asked.

For: runtime.context, which hands it to the role as `Answering`. The rules of a conversation are conversation.py's.

The driver says nothing here: a conversation begins as an asker opens it, and is over when that asker closes it, opens
another, or has a successor. Then its questions that nobody has taken are left out, those in hand are marked
`cancelled`, and what is still answered of them goes nowhere: whoever asked has asked somebody else.

| waits | for | unblocked by |
|---|---|---|
| take | a question | data; the worker's stop |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_api.errors import UserError
from rlinf_api.names import WorkerId
from rlinf_worker.channels.account import Level
from rlinf_worker.channels.host import Host
from rlinf_worker.channels.payload_type import PayloadType
from rlinf_worker.channels.protocol import Item, LineageKey, PolicyVersion
from rlinf_worker.cycles.conversation import Heard
from rlinf_worker.cycles.ends import CycleEnd
from rlinf_worker.links import frames
from rlinf_worker.links.errors import PayloadError
from rlinf_worker.links.message import Message
from rlinf_worker.links.peers import Peer


@dataclass(slots=True, kw_only=True, eq=False)
class Question(Item):
    """As the role has it."""

    conversation: AnsweringEnd
    number: int


class KeptAnswer(NamedTuple):
    """An answer until it is known to have come."""

    frame: frames.Answer
    body: bytes
    buffers: Sequence[Any]
    nbytes: int


class AnsweringEnd:
    """With one life of one asker."""

    def __init__(self, answerer: Answerer, peer: Peer, *, number: int) -> None:
        self.peer, self.number, self.heard = peer, number, Heard[KeptAnswer]()
        self.source = WorkerId(peer.worker)
        self.is_checked: bool  # its asker checks questions by the declaration that this end has; said as it opens
        self.taken: dict[int, Question] = {}
        self._answerer = answerer
        peer.hearing[number] = self

    def on_ask(self, frame: frames.Ask, message: Message) -> None:
        if self.heard.is_new(frame.number, frame.got):
            self._answerer.on_question(self, frame, message)
        else:
            self._answerer.account_in.duplicates += 1
            message.release()

    def on_close(self) -> None:
        self._answerer.end(self)

    def answer(self, said: KeptAnswer, message: Message) -> None:
        self.heard.answer(said.frame.number, said)
        del self.taken[said.frame.number]
        message.head = frames.encode(said.frame)
        self.peer.post(message)

    def opened(self, unanswered: list[int]) -> None:
        """On a link that is new."""
        for _, said in self.heard.opened(unanswered):
            self._answerer.account_out.resent += 1
            self.peer.post(Message(frames.encode(said.frame), body=said.body, buffers=said.buffers))


class Answerer(CycleEnd[tuple[AnsweringEnd, frames.Ask]]):
    """`Answering` over conversations. One per cycle and worker."""

    def __init__(self, host: Host, spec: pb.ChannelSpec) -> None:
        questions, answers = PayloadType.of(spec.payload), PayloadType.of(spec.answers)
        super().__init__(host, spec.name, gives=answers, takes=questions, what="a question")
        self._with: dict[str, AnsweringEnd] = {}  # by worker: its newest life's
        self.in_hand = 0  # questions that the role has taken and is not through with
        self._load = 0  # questions of open conversations that are not answered

    # --- conversations ------------------------------------------------------------------------------------------------
    def on_open(self, peer: Peer, frame: frames.Open) -> None:
        known = self._with.get(peer.worker)
        if known is not None and known.peer is peer and frame.conversation < known.number:
            return  # of a link before: it is over
        if known is None or known.peer is not peer or known.number != frame.conversation:
            if known is not None:
                self.end(known)
            known = self._with[peer.worker] = AnsweringEnd(self, peer, number=frame.conversation)
        known.is_checked = self._takes is None or frame.declared == self._takes.fingerprint
        known.opened(frame.unanswered)

    def on_superseded(self, peer: Peer) -> None:
        known = self._with.get(peer.worker)
        if known is not None and known.peer is peer:
            self.end(known)

    def end(self, conversation: AnsweringEnd) -> None:
        if self._with.get(conversation.peer.worker) is conversation:
            del self._with[conversation.peer.worker]
        conversation.peer.hearing.pop(conversation.number, None)
        self._load -= conversation.heard.end()
        for question in conversation.taken.values():
            question.cancel()
        self.inbox.leave_out(lambda entry: entry[0] is conversation)

    # --- questions ----------------------------------------------------------------------------------------------------
    def on_question(self, conversation: AnsweringEnd, frame: frames.Ask, message: Message) -> None:
        self._load += 1
        self.inbox.put((conversation, frame), message)

    def _item(self, entry: tuple[AnsweringEnd, frames.Ask], message: Message) -> Question:
        (conversation, frame), account, nbytes = entry, self.account_in, message.nbytes - len(message.head)
        _, buffers = message.encoded()
        question = Question(
            channel=self.name,
            key=LineageKey(frame.key),
            payload=None,
            step=frame.step,
            branch=frame.branch,
            source=conversation.source,
            version=PolicyVersion(frame.version_branch, frame.version_number),
            conversation=conversation,
            number=frame.number,
        )
        conversation.taken[frame.number] = question
        self.in_hand += 1
        try:
            question.payload = message.value()
            if not conversation.is_checked and self._takes is not None:
                self._takes.check(question.payload, self.name, frame.key)
        except PayloadError as error:
            self.drop(question, error.reason)
            raise
        if buffers:
            message.release()
            question._borrows = True
        account.items += 1
        account.bytes += nbytes
        return question

    # --- answers ------------------------------------------------------------------------------------------------------
    def answer(self, question: Item, payload: Any, *, version: PolicyVersion | None = None) -> None:
        account, (key, step, branch) = self.account_out, (question.key, question.step, question.branch)
        said, message, nbytes = self._checked(payload, key=key, step=step, branch=branch, version=version)
        if self._say(question, message, version=said.version):
            account.items += 1
            account.bytes += nbytes
        else:
            account.dropped["PeerGone"] += 1

    def drop(self, question: Item, reason: str) -> None:
        self.account_in.drop(reason)
        self._say(question, None, version=question.version)

    def _say(self, question: Item, message: Message | None, *, version: PolicyVersion) -> bool:
        """None: there will be no answer. False: nobody waits for it."""
        if not isinstance(question, Question) or question.is_settled:
            raise UserError(
                f"cycle {self.name!r} was given an answer to what is no question of it, or is answered",
                got=f"item {question.key!r} of channel {question.channel!r}",
                next="give each item that take() returns once to answer() or drop()",
            )
        conversation = question.conversation
        self.in_hand -= 1
        question.settle()
        if conversation.heard.is_over:
            return False
        self._load -= 1
        said, is_dropped = message or Message(b""), message is None
        frame = frames.Answer(
            conversation.number, question.number, version.branch, version.number, self._load, self.declared, is_dropped
        )
        body, buffers = said.encoded()
        conversation.answer(KeptAnswer(frame, body, buffers, said.nbytes), said)
        return True

    # --- looking in ---------------------------------------------------------------------------------------------------
    def _level_out(self) -> Level:
        """Without an age: the last answers are kept until another question comes, and nobody waits for that."""
        kept = [said for c in self._with.values() for said in c.heard.answers]
        return Level(len(kept), sum(said.nbytes for said in kept))
