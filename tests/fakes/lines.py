"""Links that are the test itself: what an end of a channel posts to a peer lies there, decoded, to be looked at.

lines = Lines()
lines.line("rollout/0").said
"""

from __future__ import annotations

from typing import Any, cast

from rlinf_worker.links import frames
from rlinf_worker.links.endpoint import Endpoint
from rlinf_worker.links.hello import Identity
from rlinf_worker.links.message import Message
from rlinf_worker.links.peers import Peer


class Line(Peer):
    """A peer whose link is this test: what is posted lies in `said`."""

    def __init__(self, worker: str, *, attempt: int = 1) -> None:
        super().__init__(Identity(job="j", worker=worker, attempt=attempt))
        self.said: list[tuple[Any, Message]] = []
        self.link = cast(Any, "up")

    def post(self, message: Message) -> None:
        body, buffers = message.encoded()
        self.said.append((frames.decode(message.head), Message(message.head, body=body, buffers=buffers)))

    def heads(self) -> list[Any]:
        """What was posted since the last look."""
        said, self.said = self.said, []
        return [head for head, _ in said]


class Lines:
    """In the place of links.peers.PeerLinks, for an end of a channel."""

    def __init__(self) -> None:
        self.lines: dict[tuple[str, int], Line] = {}
        self.wanted: list[tuple[str, int, str, bool]] = []
        self.unwanted: list[tuple[str, int, str]] = []
        self.has_begun = False

    def want(self, endpoint: Endpoint, *, by: str, at_once: bool) -> Line:
        self.wanted.append((endpoint.worker, endpoint.attempt, by, at_once))
        return self.line(endpoint.worker, endpoint.attempt)

    def unwant(self, peer: Line, *, by: str) -> None:
        self.unwanted.append((peer.worker, peer.attempt, by))

    def line(self, worker: str, attempt: int = 1) -> Line:
        return self.lines.setdefault((worker, attempt), Line(worker, attempt=attempt))

    def find(self, worker: str, attempt: int) -> Line | None:
        return self.lines.get((worker, attempt))
