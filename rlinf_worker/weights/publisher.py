"""What this worker itself publishes: one edition at a time, copied once, and served until the next one is there.

For: channel. Not for: who is sent it (subscribers), nor for what an edition is (edition).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final

from rlinf_api.errors import InvariantBroken
from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.channels.waiting import Signal
from rlinf_worker.links.endpoint import Endpoint
from rlinf_worker.weights import edition as editions
from rlinf_worker.weights import planning
from rlinf_worker.weights.arena import Arenas
from rlinf_worker.weights.checksums import OWN, Checksums
from rlinf_worker.weights.edition import Edition

INLINE_BYTES: Final = 8 << 20  # 2 ms of copying and hashing; below it threads gain nothing
FILLERS: Final = 2 if len(os.sched_getaffinity(0)) > 2 else 1
"""Threads that copy and hash a publication: two fill the memory's bandwidth. On two cores the second one takes its time
from whoever sends, receives and checks: 200 MB between pods in 68 ms instead of 76."""


class Publisher:
    def __init__(
        self, *, arenas: Arenas, moved: Signal, checksums: Checksums, rank: int,
        gang: Callable[[], Sequence[Endpoint]],
    ) -> None:  # fmt: skip
        self._arenas, self._moved, self._checksums = arenas, moved, checksums
        self._rank, self._gang = rank, gang
        self._threads: ThreadPoolExecutor | None = None
        self.edition: Edition | None = None

    def sources(self) -> list[dict[str, Any]]:
        """Where the other ranks are that publish the rest of it."""
        return [e.to_dict() for rank, e in enumerate(self._gang()) if rank != self._rank]

    async def make(self, version: PolicyVersion, tensors: Mapping[str, Any], *, delta: bool) -> Edition:
        edition = Edition(
            version, tensors, rank=self._rank, part_bytes=editions.DELTA_BYTES if delta else editions.PART_BYTES
        )
        self._check_gang(edition)
        if self.edition is not None:
            editions.check_schema(self.edition.schema, edition.schema, version=version)
        nbytes = edition.memory.nbytes
        if self._arenas.makes(nbytes):  # zeroing its pages takes 0.4 s per GB
            edition.lie_in(await asyncio.to_thread(self._arenas.take, nbytes))
        else:
            edition.lie_in(self._arenas.take(nbytes))
        is_again = self._checksums.knows(version, OWN)  # it has to be the same before anybody is sent it
        if not is_again:
            self._show(edition)
        await self._fill(edition)
        self._checksums.note(version, OWN, edition.checksum)
        if is_again:
            self._show(edition)
        if edition.is_whole:
            self._checksums.note(version, planning.RAW_WHOLE, edition.checksum)
        return edition

    def _check_gang(self, edition: Edition) -> None:
        count = len(self._gang())
        if edition.sources > 1 and edition.sources != count:
            raise InvariantBroken(
                f"weights {edition.version} are sharded over other ranks than the gang has",
                got=f"{edition.sources} shards", wanted=f"{count}", next="shard over all ranks, or publish whole",
            )  # fmt: skip

    def _show(self, edition: Edition) -> None:
        """From now on it is what subscribers are sent."""
        old, self.edition = self.edition, edition
        if old is not None:
            old.dead = True
            if old.arena is not None:
                old.arena.held -= 1
        self._moved.notify()

    async def _fill(self, edition: Edition) -> None:
        """In threads, so that parts are sent while others are copied, and that the loop hears the driver meanwhile."""
        if edition.memory.nbytes < INLINE_BYTES:
            edition.fill(filled=self._moved.notify)
        else:
            await self._fill_in_threads(edition)
        edition.finish()
        self._moved.notify()

    async def _fill_in_threads(self, edition: Edition) -> None:
        loop = asyncio.get_running_loop()
        if self._threads is None:
            self._threads = ThreadPoolExecutor(FILLERS, thread_name_prefix="weights")

        def filled() -> None:
            loop.call_soon_threadsafe(self._moved.notify)

        shares = [
            loop.run_in_executor(self._threads, partial(edition.fill, n, FILLERS, filled=filled))
            for n in range(FILLERS)
        ]
        try:
            await asyncio.gather(*shares)
        except BaseException:
            edition.dead = True
            raise

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
