"""Small plain values that one role knows and others need before they load (`ctx.share`, `ctx.shared`).

They go through the driver, which keeps them for whoever comes later; a new driver is told them again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Final

from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_api.errors import UserError
from rlinf_worker.channels.host import PEER_WAIT_S, Host

MAX_FACT_BYTES: Final = 64 << 10  # shapes and names; weights and data have channels


class Facts:
    def __init__(self, host: Host) -> None:
        self._host = host
        self._news = host.waits.signal()
        self._known: dict[str, str] = {}
        self._mine: dict[str, str] = {}

    def share(self, name: str, value: Any) -> None:
        text = json.dumps(value, sort_keys=True)
        if len(text) > MAX_FACT_BYTES:
            raise UserError(f"fact {name!r} is too large", got=f"{len(text)} bytes", wanted=f"at most {MAX_FACT_BYTES}")
        if self._mine.setdefault(name, text) != text:
            raise UserError(f"fact {name!r} was shared before with another value", got=text[:200])
        self._host.tell(pb.WorkerMessage(fact=pb.Fact(name=name, json=text)))

    async def shared(self, name: str) -> Any:
        await self._host.waits.until(
            lambda: name in self._known,
            self._news,
            what=f"fact {name!r}",
            timeout_s=PEER_WAIT_S,
            missing="a worker of the role that knows it",
        )
        return json.loads(self._known[name])

    def on_welcome(self, facts: Iterable[pb.Fact]) -> None:
        for fact in facts:
            self.on_fact(fact)
        for name, text in self._mine.items():
            self._host.tell(pb.WorkerMessage(fact=pb.Fact(name=name, json=text)))

    def on_fact(self, fact: pb.Fact) -> None:
        self._known[fact.name] = fact.json
        self._news.notify()
