"""torch's process group of a gang: its ranks find each other over the gang's own words, so no store has a port.

Called by roles that hold torch's collectives, once, as they load. gloo asks for each rank's address once for each
group; nothing is asked of the store later (torch 2.13: FSDP2 and its state dicts use the group that there is).
"""

from __future__ import annotations

import asyncio
import datetime
import threading
from collections.abc import Sequence
from typing import Final

import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rlinf_api.errors import InvariantBroken
from rlinf_worker.roles.protocol import Gang, Place

COLLECTIVE_TIMEOUT_S: Final = 60.0  # all ranks are there: what is left is their work on equal shares
BEFORE_MESH: Final[Place] = (-2, 0, 0)  # before all that the step loop meets for


_kept: list[Store] = []
"""For further groups: torch keeps C++'s half of a store alone, which can do nothing without Python's. One a process."""


async def of_gang(gang: Gang) -> DeviceMesh | None:
    """All ranks, after `form`; None where there is one. The process group, of which there is one in a process."""
    if gang.world == 1:
        return None
    await gang.meet(BEFORE_MESH)
    store = _GangStore(gang)
    return await asyncio.to_thread(_mesh, store, gang.rank, gang.world)


def _mesh(store: Store, rank: int, world: int) -> DeviceMesh:
    timeout = datetime.timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    _kept.append(store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
    return init_device_mesh("cpu", (world,))


class _GangStore(Store):
    """What torch calls from a thread beside the event loop, which carries the words."""

    def __init__(self, gang: Gang) -> None:
        super().__init__()
        self._gang, self._loop, self._thread = gang, asyncio.get_running_loop(), threading.get_ident()

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode("latin-1") if isinstance(value, str) else bytes(value)
        self._loop.call_soon_threadsafe(self._gang.keep, key, data)

    def get(self, key: str) -> bytes:
        if threading.get_ident() == self._thread:
            raise InvariantBroken(f"torch asks for {key!r} on the event loop, which would wait for itself")
        return asyncio.run_coroutine_threadsafe(self._gang.kept(key), self._loop).result()

    def wait(self, keys: Sequence[str], timeout: datetime.timedelta | None = None) -> None:
        for key in keys:
            self.get(key)
