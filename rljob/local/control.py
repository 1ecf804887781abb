"""The door of a running `rljob run` for other commands of the same user: a unix socket in the work dir, mode 0600.

One connection, one question, one answer, a line of JSON each; `rljob/plan.py` asks, plan_verbs.py answers.

| task | consumes | waits for | unblocked by |
|---|---|---|---|
| one per connection, MAX_CALLS | a question | a line; the plan in force or refused | the peer; its deadline |
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from rlinf_api.errors import UserError
from rljob.local import room
from rljob.local.store import MemoryStore
from rljob.plan_verbs import PlanVerbs

logger = logging.getLogger(__name__)
SOCKET: Final = "control.sock"
MAX_LINE: Final = 4 << 20  # bytes: a plan's largest fields together are below
MAX_CALLS: Final = 16
READ_TIMEOUT_S: Final = 5.0  # a caller that connects has its question at hand
LOOK_S: Final = 0.05  # the store is in memory: a look costs microseconds


@contextlib.contextmanager
def reached(work_dir: Path) -> Iterator[str]:
    """A path to the socket that Linux takes, however long the work dir's own is: by the folder's file descriptor."""
    folder = os.open(work_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{SOCKET}"
    finally:
        os.close(folder)


class Control:
    """`async with Control(store, job=..., namespace=..., work_dir=...)`: open for as long as the block lasts."""

    def __init__(self, store: MemoryStore, *, job: str, namespace: str, work_dir: Path) -> None:
        self._verbs, self._work_dir = PlanVerbs(store, job=job, namespace=namespace, look_s=LOOK_S), work_dir
        self._server: asyncio.Server | None = None
        self._calls: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> Self:
        """UserError where the work dir's file system takes no socket."""
        path = self._work_dir / SOCKET
        mask = os.umask(0o177)
        try:
            path.unlink(missing_ok=True)  # left by a run that was killed; the work dir's lock says that none is alive
            with reached(self._work_dir) as short:
                self._server = await asyncio.start_unix_server(self._serve, path=short, limit=MAX_LINE)
        except OSError as error:
            raise UserError(
                f"work dir {self._work_dir} cannot be used", got=room.told(error, path),
                wanted="a file system with unix sockets", next="choose another --work-dir",
            ) from error  # fmt: skip
        finally:
            os.umask(mask)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._server is not None:
            self._server.close()
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)
        (self._work_dir / SOCKET).unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            if len(self._calls) >= MAX_CALLS:
                await _say(writer, {"ok": False, "message": f"{MAX_CALLS} commands are under way; try again"})
                return
            self._calls.add(task)
            async with asyncio.timeout(READ_TIMEOUT_S):
                line = await reader.readline()
            await _say(writer, await self._verbs.answer(line))
        except asyncio.CancelledError:  # the run ends; raised on, asyncio would log it as a failure of ours
            writer.write(json.dumps({"ok": False, "message": "the run ended before it"}).encode() + b"\n")
        except (TimeoutError, ValueError, ConnectionError) as error:
            logger.info("a command said nothing that can be read", extra={"error": str(error)})
        finally:
            self._calls.discard(task)
            writer.close()


async def _say(writer: asyncio.StreamWriter, answer: dict[str, Any]) -> None:
    writer.write(json.dumps(answer).encode() + b"\n")
    async with asyncio.timeout(READ_TIMEOUT_S):
        await writer.drain()
