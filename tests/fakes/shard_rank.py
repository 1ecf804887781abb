"""One of two ranks that write and read shards, as a process: `python -m tests.fakes.shard_rank FOLDER URI RANK`.

Both write b0-20, each its half; rank 0 alone reads it, and writes it as b0-40; both read that, and each its half of
b0-20. FOLDER/told-RANK.json: bytes that were written and read by it each time, and whether what it had was right.
"""

import datetime
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.checkpoints.store import ALONE, Checkpoint, Checkpoints, Writer
from rlinf_worker.roles.shards import Shards, copied

WITHIN_S = 60.0
ROWS, COLUMNS, TENSORS = 64, 1000, 4
FIRST = torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS)
WHOLE = {f"layer-{n}": FIRST + n for n in range(TENSORS)}


def inherited() -> dict[str, str]:
    """Of the environment, without who this machine is to a store."""
    return {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}


class Rank:
    def __init__(self, folder: Path, uri: str, rank: int) -> None:
        self.folder, self.rank, self.told = folder, rank, dict[str, Any]()
        self.store = Checkpoints(uri)
        self.read = self.most = 0
        seen = Checkpoint.open

        def counted(saved: Checkpoint, name: str) -> Any:
            stream = seen(saved, name)
            inner = stream.read

            def read(size: int = -1) -> bytes:
                words = inner(size)
                self.read += len(words)
                self.most = max(self.most, len(words))
                return words

            return _Counted(stream, read)

        Checkpoint.open = counted  # type: ignore[method-assign, assignment]

    def join(self, number: int) -> None:
        timeout = datetime.timedelta(seconds=WITHIN_S)
        store = f"file://{self.folder}/store-{number}"
        dist.init_process_group("gloo", init_method=store, rank=self.rank, world_size=2, timeout=timeout)

    def tensors(self, *, filled: bool, is_sharded: bool) -> dict[str, Any]:
        found = {name: tensor.clone() if filled else torch.zeros_like(tensor) for name, tensor in WHOLE.items()}
        if not is_sharded:
            return found
        mesh = init_device_mesh("cpu", (2,))
        return {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in found.items()}

    def save(self, number: int, shards: Shards, writer: Writer, *, is_sharded: bool) -> None:
        version = PolicyVersion(0, number)
        state = copied({"model": self.tensors(filled=True, is_sharded=is_sharded), "step": number})
        folder = self.store.begin(version, writer)
        shards.write(folder, state)
        self.told[f"written {number}"] = sum(path.stat().st_size for path in folder.rglob("*.distcp"))
        self.store.finish(version, "{}", writer)

    def load(self, number: int, shards: Shards, *, is_sharded: bool) -> None:
        self.read = 0
        into: dict[str, Any] = {"model": self.tensors(filled=False, is_sharded=is_sharded), "step": 0}
        shards.read(self.store.of(f"b0-{number}"), into=into)
        rows = slice(self.rank * ROWS // 2, (self.rank + 1) * ROWS // 2) if is_sharded else slice(None)
        local = {n: t.to_local() if isinstance(t, DTensor) else t for n, t in into["model"].items()}
        right = all(torch.equal(local[name], whole[rows]) for name, whole in WHOLE.items()) and into["step"] == number
        self.told[f"read {number} by {2 if is_sharded else 1}"] = (self.read, right)


class _Counted:
    def __init__(self, stream: Any, read: Any) -> None:
        self._stream, self.read = stream, read

    def readinto(self, buffer: Any) -> int:
        words = self.read(len(buffer))
        buffer[: len(words)] = words
        return len(words)

    def __enter__(self) -> "_Counted":
        return self

    def __exit__(self, *error: object) -> None:
        self._stream.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def main(folder: Path, uri: str, number: int) -> None:
    torch.set_num_threads(1)
    rank = Rank(folder, uri, number)
    rank.join(1)
    two = Shards(dist.new_group(backend="gloo"))
    rank.save(20, two, Writer(number, 2), is_sharded=True)
    dist.barrier()
    dist.destroy_process_group()
    if number == 0:
        rank.load(20, Shards(None), is_sharded=False)
        rank.save(40, Shards(None), ALONE, is_sharded=False)
    rank.join(2)
    dist.barrier()
    two = Shards(dist.new_group(backend="gloo"))
    rank.load(40, two, is_sharded=True)
    rank.load(20, two, is_sharded=True)
    rank.told["most at once"] = rank.most
    (folder / f"told-{number}.json").write_text(json.dumps(rank.told))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
    os._exit(0)  # torch's threads are at times not joined as the interpreter takes itself down
