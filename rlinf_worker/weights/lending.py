"""A version of the weights, read by child processes of the worker that has it, where it lies.

For: channel (`Lender`), and whatever runs in a child (`BorrowedWeights`): a rank of a tensor-parallel engine sets its
own tensors from the memory into which the version was received, each its own part. Nothing is sent, and the host has
the version once for all of them. Not for: workers, which subscribe (receiver), nor for how a child is told (a role's
own way).

    in the worker    async with ctx.weights.lent(version) as lent:      LentWeights: small, can be pickled
                         await asyncio.gather(*(child.ask(load=lent) for child in children))
    in each child    mine = BorrowedWeights()                           once: it keeps what it has mapped
                     mine.copy(lent, into=model, view=View(rank, shardings))

lent ──memory is not used again──► the block is left, and every child has said that it is through.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Mapping
from typing import Any

from rlinf_api.errors import UserError
from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.weights import edition as editions
from rlinf_worker.weights import tensors
from rlinf_worker.weights.arena import Arena, Arenas, Shared, anonymous
from rlinf_worker.weights.edition import Assembly
from rlinf_worker.weights.planning import WHOLE, LentWeights, View


class Lender:
    """At the worker. One version at a time: memory that no other process can map is copied to some that can, which is
    kept, and there is one of it."""

    def __init__(self) -> None:
        self._lending = asyncio.Lock()
        self._copy: Arena | None = None

    @contextlib.asynccontextmanager
    async def lend(self, here: Assembly) -> AsyncIterator[LentWeights]:
        kept, source = here.lent, here.arena  # it is held, whatever comes meanwhile
        assert source is not None
        async with self._lending:
            memory = source.readable
            if memory is None:
                memory = await asyncio.to_thread(self._copied, kept)
            yield LentWeights(
                version=here.version, memory=memory, entries=here.entries, layout=here.memory, plain=here.plain
            )

    def _copied(self, kept: memoryview) -> Shared:
        """A copy, for a worker without shared memory, or of few bytes."""
        if self._copy is None or self._copy.nbytes < kept.nbytes:
            self._copy = anonymous(kept.nbytes)
        self._copy.memory[: kept.nbytes] = kept
        found = self._copy.readable
        assert found is not None
        return found


class BorrowedWeights:
    """The weights that a child has borrowed, for one of its threads."""

    def __init__(self) -> None:
        self._arenas = Arenas(None)

    def arrays(self, lent: LentWeights, *, view: View = WHOLE) -> dict[str, Any]:
        """Read-only, over the worker's memory, for as long as the version is lent. `view`: of what the worker has, this
        child's shards alone."""
        memory = self._arenas.map(lent.memory)
        if memory is None:
            raise UserError(
                f"weights {lent.version} cannot be read by process {os.getpid()}",
                got=f"no memory of inode {lent.memory[3]} at process {lent.memory[0]}",
                wanted="a process of the worker's pod and user, while the version is lent",
                next="leave the block `async with ctx.weights.lent(...)` when all children are through",
            )  # fmt: skip
        found = editions.arrays_over(memory.lend(), lent.entries, lent.layout, lent.plain)
        return {name: _cut(value, view, name=name) for name, value in found.items()}

    def copy(self, lent: LentWeights, *, into: Mapping[str, Any], view: View = WHOLE) -> PolicyVersion:
        """Sets tensors, on any device, all or none: other names, shapes or dtypes are SchemaChanged. Returns the
        version that they are."""
        found = self.arrays(lent, view=view)
        editions.check_targets(into, found, version=lent.version)
        editions.copy_all(into, found)
        return lent.version


def _cut(value: Any, view: View, *, name: str) -> Any:
    if name not in view.shardings:
        return tensors.read_only(value)
    shape = (len(value),) if isinstance(value, memoryview) else tuple(int(n) for n in value.shape)
    return tensors.read_only(value[tuple(slice(start, end) for start, end in view.box(name, shape))])
