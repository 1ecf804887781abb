"""The collective of a synthetic gang: before each round every rank says how long its part takes, rank 0 answers how
long the round is. A real exchange over a real connection, so that a slow or dead rank holds up or ends the others.

| waits | for | unblocked by |
|---|---|---|
| Meeting.agree | every rank's word for this round | the others; a connection that breaks; ROUND_TIMEOUT_S |
| connecting | rank 0's server | rank 0; CONNECT_TIMEOUT_S |

Lines of JSON on the port of the gang's store, as torch's own rendezvous has none of TLS either: within a job's network.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from typing import Any, Final

from rlinf_api.errors import DeadlineExceeded, WorkerUnreachable
from rlinf_worker.roles.protocol import GangStore

CONNECT_TIMEOUT_S: Final = 30.0  # rank 0 opens its server as soon as it has the roster
RETRY_S: Final = 0.05
ROUND_TIMEOUT_S: Final = 600.0  # a rank may wait that long for the payload of its units
MAX_LINE: Final = 4096

Round = tuple[int, int, int]  # branch, step, number


class Meeting:
    """`total` turns the longest part into the length of the round; rank 0 alone calls it."""

    def __init__(self, store: GangStore, *, total: Callable[[float], float]) -> None:
        self._store, self._total = store, total
        self._parts: dict[Round, dict[int, float]] = {}
        self._answers: dict[Round, asyncio.Future[float]] = {}
        self._server: asyncio.Server | None = None
        self._streams: list[asyncio.StreamWriter] = []
        self._reader: asyncio.StreamReader | None = None
        self._broken: str = ""

    async def open(self) -> None:
        store = self._store
        if store.world == 1:
            return
        if store.rank == 0:
            self._server = await asyncio.start_server(self._serve, store.host, store.port, limit=MAX_LINE)
            return
        deadline = asyncio.get_running_loop().time() + CONNECT_TIMEOUT_S
        while True:
            try:
                self._reader, writer = await asyncio.open_connection(store.host, store.port, limit=MAX_LINE)
                break
            except OSError as error:
                if asyncio.get_running_loop().time() > deadline:
                    raise WorkerUnreachable(
                        f"rank 0 of {store.prefix} does not answer at {store.host}:{store.port}", got=str(error),
                        wanted=f"a connection within {CONNECT_TIMEOUT_S:g} s", next="the gang is formed anew",
                    ) from error  # fmt: skip
                await asyncio.sleep(RETRY_S)
        self._streams.append(writer)
        self._write(writer, {"prefix": store.prefix, "rank": store.rank})

    async def agree(self, number: Round, seconds: float) -> float:
        """How long this round lasts. Raises WorkerUnreachable where a rank is gone."""
        if self._store.world == 1:
            return self._total(seconds)
        try:
            async with asyncio.timeout(ROUND_TIMEOUT_S):
                if self._store.rank == 0:
                    return await self._collect(number, seconds)
                self._write(self._streams[0], {"round": number, "seconds": seconds})
                return await self._answer(number)
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"round {number} of {self._store.prefix}", timeout_s=ROUND_TIMEOUT_S, missing="a rank's word"
            ) from error

    # --- rank 0 -------------------------------------------------------------------------------------------------------
    async def _collect(self, number: Round, seconds: float) -> float:
        self._check()
        answer = self._answers.setdefault(number, asyncio.get_running_loop().create_future())
        self._hear(number, 0, seconds)
        try:
            return await answer
        finally:
            self._answers.pop(number, None)

    def _hear(self, number: Round, rank: int, seconds: float) -> None:
        parts = self._parts.setdefault(number, {})
        parts[rank] = seconds
        if len(parts) < self._store.world:
            return
        del self._parts[number]
        total = self._total(max(parts.values()))
        for writer in self._streams:
            self._write(writer, {"round": number, "seconds": total})
        self._answers[number].set_result(total)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            hello = await self._line(reader)
            if hello.get("prefix") != self._store.prefix:
                writer.close()  # of an older roster: it is being ended
                return
            self._streams.append(writer)
            while True:
                said = await self._line(reader)
                branch, step, index = said["round"]
                self._hear((branch, step, index), int(hello["rank"]), float(said["seconds"]))
        except (OSError, EOFError, ValueError, KeyError) as error:
            self._break(f"a rank has hung up: {error!r}")

    def _break(self, why: str) -> None:
        self._broken = self._broken or why
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(self._gone())

    def _check(self) -> None:
        if self._broken:
            raise self._gone()

    def _gone(self) -> WorkerUnreachable:
        return WorkerUnreachable(
            f"the gang of {self._store.prefix} is not whole", got=self._broken, wanted=f"{self._store.world} ranks",
            next="it is formed anew",
        )  # fmt: skip

    # --- the others ---------------------------------------------------------------------------------------------------
    async def _answer(self, number: Round) -> float:
        assert self._reader is not None
        try:
            while True:
                said = await self._line(self._reader)
                if tuple(said["round"]) == number:
                    return float(said["seconds"])
        except (OSError, EOFError, ValueError, KeyError) as error:
            self._broken = f"rank 0 has hung up: {error!r}"
            raise self._gone() from error

    @staticmethod
    async def _line(reader: asyncio.StreamReader) -> dict[str, Any]:
        line = await reader.readline()
        if not line.endswith(b"\n"):
            raise EOFError("the connection ended")
        return dict(json.loads(line))

    @staticmethod
    def _write(writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
        writer.write(json.dumps(message).encode() + b"\n")

    async def close(self) -> None:
        for writer in self._streams:
            writer.close()
        if self._server is not None:
            self._server.close()
            with contextlib.suppress(OSError):
                await self._server.wait_closed()
