"""torch's distributed checkpoints (DCP) for a trainer that is sharded: each rank writes and reads its own part.

    async def build(self, ctx):        self._shards = await Shards.of_gang(ctx.gang)    # after mesh.of_gang
    def state(self):                   return copied({"model": self._tensors, "step": self._step})
    def write(self, folder, state):    self._shards.write(folder, state)
    def read_shards(self, saved):      self._shards.read(saved, into={"model": self._tensors, ...})

Called by trainers. What they get of it: DCP knows by names and offsets which bytes of which file a rank needs, so the
ranks that read may be more or fewer than those that wrote. A tensor that one rank wrote in one piece is read in one
piece, and let go before the next.
"""

from __future__ import annotations

import asyncio
import datetime
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from io import IOBase
from pathlib import Path
from typing import Any, Final, cast

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from rlinf_api.errors import UserError
from rlinf_worker.checkpoints.store import Checkpoint
from rlinf_worker.roles.protocol import Gang

WRITE_TIMEOUT_S: Final = 300.0  # for the slowest rank's disk: as long as the phase in which the next save waits


class Shards:
    """One per process. `group`: of all ranks, for nothing else; None: there is one rank."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group

    @classmethod
    async def of_gang(cls, gang: Gang) -> Shards:
        """After `mesh.of_gang`, on every rank."""
        return cls(await asyncio.to_thread(_group) if gang.world > 1 else None)

    def write(self, folder: Path, state: dict[str, Any]) -> None:
        """Every rank, in any thread. Files are not synced here: whoever takes them in does."""
        writer = FileSystemWriter(folder, sync_files=False)
        with _refusals(f"checkpoint {folder}"):
            save(state, storage_writer=writer, process_group=self._group, no_dist=self._group is None)

    def read(self, saved: Checkpoint, *, into: dict[str, Any]) -> None:
        """Every rank. Tensors of `into` are set in place, other values of it are replaced."""
        with _refusals(f"checkpoint {saved.place.at(saved.at)}"):
            load(into, storage_reader=_Reader(saved), process_group=self._group, no_dist=self._group is None)


def copied(state: Mapping[str, Any]) -> dict[str, Any]:
    """On the host: what the next step changes, it does not change. Nothing is gathered."""
    return {name: _copied(value) for name, value in state.items()}


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    return copied(value) if isinstance(value, Mapping) else value


def _group() -> dist.ProcessGroup:
    """A second one: what is written beside a step must not meet the step's own collectives."""
    timeout = datetime.timedelta(seconds=WRITE_TIMEOUT_S)
    return cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=timeout))


class _Reader(FileSystemReader):
    """DCP's, over the place of this job's checkpoints."""

    def __init__(self, saved: Checkpoint) -> None:
        super().__init__("")
        self.fs = _Files(saved)


class _Files(FileSystem):
    def __init__(self, saved: Checkpoint) -> None:
        self._saved = saved

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[IOBase, None, None]:
        with self._saved.open(os.fspath(path)) as stream:
            yield cast(IOBase, stream)


@contextmanager
def _refusals(what: str) -> Generator[None, None, None]:
    """DCP's word for any rank's error is a BaseException, and has its traceback as text."""
    try:
        yield
    except CheckpointException as error:
        found = {rank: wrapped[0] for rank, wrapped in error.failures.items()}
        rank, first = min(found.items(), key=lambda one: one[0])
        said = f"rank {rank}: {type(first).__name__}: {first}"
        if any(isinstance(one, OSError) for one in found.values()):
            raise OSError(said) from error  # of a disk or a store, and not of the model
        raise UserError(
            f"{what} does not fit", got=said[:500], wanted="the tensors of this trainer",
            next="use another checkpoint uri, or the model it was made with",
        ) from error  # fmt: skip
