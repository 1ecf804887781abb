"""The ranks of an actor's gang: their process group, and where they meet before they work together.

A collective blocks a rank's event loop, and a loop that gives no sign for a step's deadline is taken for hung. So a
rank enters collectives only when all the others are about to: until then it waits beside its loop, however long a slow
volume holds up rank 0's checkpoint or a unit that is made again holds up one rank's round.

| waits | for | unblocked by |
|---|---|---|
| Gang.meet | every rank's word that it is there | the others; a store that breaks; MEET_TIMEOUT_S |
| a look into the store | rank 0's process, in whose threads the store is | its answer; COLLECTIVE_TIMEOUT_S |
"""

from __future__ import annotations

import asyncio
import datetime
from typing import Final

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore

from rlinf_api.errors import DeadlineExceeded, WorkerUnreachable
from rlinf_worker.roles.protocol import GangStore

COLLECTIVE_TIMEOUT_S: Final = 60.0  # all ranks are there: what is left is their work on equal shares
MEET_TIMEOUT_S: Final = 600.0  # a rank may wait that long for the payload of its units, or for its volume
LOOK_S: Final = 0.001  # ranks whose rounds come at the same time are a few milliseconds apart
LOOK_MAX_S: Final = 0.05  # who is later than that costs the others one look in so long, and a step at most so much

Place = tuple[int, int, int]
"""Branch, step, and what in it: greater than the place before."""


class Gang:
    """Every rank calls the same methods with the same places, in the same order."""

    def __init__(self, at: GangStore) -> None:
        """Blocks until rank 0's store is there. Raises RuntimeError of torch where it does not come."""
        self._at = at
        self._timeout = datetime.timedelta(seconds=COLLECTIVE_TIMEOUT_S)
        store = TCPStore(at.host, at.port, is_master=at.rank == 0, timeout=self._timeout, wait_for_workers=False)
        self._collectives, self._words = PrefixStore(at.prefix, store), PrefixStore(f"{at.prefix}/at", store)

    def mesh(self) -> DeviceMesh:
        """The process group, of which there is one in a process."""
        at = self._at
        dist.init_process_group(
            "gloo", store=self._collectives, rank=at.rank, world_size=at.world, timeout=self._timeout
        )
        return init_device_mesh("cpu", (at.world,))

    async def meet(self, place: Place) -> None:
        """Returns when every rank has come to `place`. Raises WorkerUnreachable, DeadlineExceeded."""
        deadline, pause_s = asyncio.get_running_loop().time() + MEET_TIMEOUT_S, LOOK_S
        try:
            self._words.set(str(self._at.rank), ".".join(map(str, place)))
            while away := self._away(place):
                if asyncio.get_running_loop().time() > deadline:
                    raise DeadlineExceeded(
                        f"ranks of {self._at.prefix} to meet at step {place[1]} of branch {place[0]}",
                        timeout_s=MEET_TIMEOUT_S, missing="rank " + ", ".join(map(str, away)),
                    )  # fmt: skip
                await asyncio.sleep(pause_s)
                pause_s = min(LOOK_MAX_S, 1.5 * pause_s)
        except RuntimeError as error:  # torch's, of a store that has gone
            raise WorkerUnreachable(
                f"rank 0 of {self._at.prefix} is gone", got=str(error)[:300], next="the gang is formed anew"
            ) from error

    def _away(self, place: Place) -> list[int]:
        """Ranks that have not come so far."""
        away = []
        for rank in range(self._at.world):
            key = str(rank)
            if not self._words.check([key]) or _place(self._words.get(key)) < place:
                away.append(rank)
        return away


def _place(word: bytes) -> Place:
    branch, step, what = (int(number) for number in word.decode("ascii").split("."))
    return branch, step, what
