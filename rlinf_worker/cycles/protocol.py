"""A cycle as its two roles see it: one asks, the other answers, and the answer is the acknowledgement.

    env      asking = ctx.asking("actions")
             await asking.ask({"obs": obs}, key="s3/0/17", step=4)       # waits while too much is unanswered
             answer = await asking.take()                                # answer.key == "s3/0/17"

    rollout  answering = ctx.answering("actions")
             async for question in answering:
                 answering.answer(question, {"action": action}, version=held)

A question is answered once: it is asked again, elsewhere, only where whoever had it is gone, and what the first then
still says of it is left out. Whoever answers may find `question.cancelled`: nobody waits for its answer any more.

No message of the driver goes with a question. A worker that stops raises ChannelClosed in whatever waits here.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Protocol

from rlinf_worker.channels.protocol import Item, LineageKey, PolicyVersion


class Asking(Protocol):
    """The end that asks."""

    @property
    def name(self) -> str: ...

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
        """Waits while everybody who may answer has as much as the plan allows (the wait is a span `wait_data`).

        `version`: the oldest policy that may answer. `affinity`: questions of one name go to one and the same, as long
        as it lives (a conversation of many turns, whose answers keep a cache warm); without it, to whoever has least to
        do. After `ask` the payload must not be changed."""

    async def take(self) -> Item:
        """The next answer, under the question's key, step and branch; `version` is the policy that gave it. One that is
        `cancelled` has no payload: there will be none, by decision of whoever was asked. A payload may view memory of a
        link: `release()` it, or let go of it, once it is used."""

    def take_now(self) -> Item | None:
        """The next answer, if it is here already."""

    def __aiter__(self) -> AsyncIterator[Item]:
        """Answers, until the worker stops."""


class Answering(Protocol):
    """The end that answers."""

    @property
    def name(self) -> str: ...

    async def take(self) -> Item:
        """The next question. Each is to be given to `answer` or to `drop`, in any order."""

    def take_now(self) -> Item | None:
        """The next question, if it is here already."""

    def __aiter__(self) -> AsyncIterator[Item]:
        """Questions, until the worker stops."""

    def answer(self, question: Item, payload: Any, *, version: PolicyVersion | None = None) -> None:
        """Never waits: whoever asks bounds what it asks. After it the payload must not be changed."""

    def drop(self, question: Item, reason: str) -> None:
        """No answer will come, by decision. Counted under `reason`."""
