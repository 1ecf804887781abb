"""The rows of a data file: JSONL, Parquet, or a folder that the library datasets has saved. Opened once, read row by
row; nothing of it is kept in memory but where its rows begin.

For: the rollout role. Not for: which row is whose turn (flows/grpo.py), what is made of one (prompts.py).
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import json
import mmap
from abc import abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, Protocol

from rlinf_api.errors import UserError

CHUNK: Final = 1 << 20
MOST_PER_ROW: Final = 16 << 20
"""Bytes of a line: it becomes one message of a queue."""


class Rows(Protocol):
    digest: str

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def row(self, index: int) -> dict[str, Any]:
        """Raises UserError that names the row."""


def open_rows(path: str, *, field: str) -> Rows:
    """Raises UserError where it is no file of rows. `field`: of the job, that names it."""
    at = Path(path)
    if not at.exists():
        raise UserError(
            f"{field} {path!r} is not there", wanted="a file that every pod that has the rollout mounts",
            next="correct the path, or mount it by the pool's template",
        )  # fmt: skip
    rows: Rows
    if at.is_dir():
        rows = _Saved(at, field)
    else:
        rows = _Parquet(at, field) if at.suffix == ".parquet" else _JsonLines(at, field)
    if not len(rows):
        raise UserError(
            f"{field} {path!r} is empty", got="0 rows", wanted="a row per prompt", next="write some rows into it"
        )
    return rows


class _JsonLines:
    """Blank lines are no rows."""

    def __init__(self, path: Path, field: str) -> None:
        self._field = field
        self._path, self._starts, digest = path, list[tuple[int, int]](), hashlib.blake2b(digest_size=12)
        with path.open("rb") as file:
            at = 0
            for number, line in enumerate(file, 1):
                digest.update(line)
                if line.strip():
                    self._starts.append((at, number))
                at += len(line)
            self._bytes = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) if at else None
        self.digest = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._starts)

    def row(self, index: int) -> dict[str, Any]:
        start, number = self._starts[index]
        assert self._bytes is not None, "a row has bytes"
        end = self._bytes.find(b"\n", start)
        line = self._bytes[start : end if end >= 0 else len(self._bytes)]
        try:
            if len(line) > MOST_PER_ROW:
                raise ValueError(f"{len(line)} bytes, of at most {MOST_PER_ROW}")
            found = json.loads(line)
        except ValueError as error:
            raise self._wrong(number, str(error)[:200]) from error
        if not isinstance(found, dict):
            raise self._wrong(number, f"a {type(found).__name__}")
        return found

    def _wrong(self, number: int, got: str) -> UserError:
        return UserError(
            f"{self._field} {self._path}, line {number} is no row", got=got, wanted='an object, as {"prompt": "1+2="}',
            next="correct the line",
        )  # fmt: skip


class _Parquet:
    """Row group by row group; the one that was read last is kept."""

    def __init__(self, path: Path, field: str) -> None:
        from pyarrow import ArrowInvalid, parquet  # noqa: PLC0415 - a third of a second, and few jobs have such a file

        self._path, self.digest = path, _digest([path])
        try:
            self._file = parquet.ParquetFile(path, memory_map=True)
        except ArrowInvalid as error:
            raise UserError(
                f"{field} {path} is no Parquet file", got=str(error).splitlines()[0][:200], wanted="a whole file",
                next="write it again",
            ) from error  # fmt: skip
        self._ends = list[int]()
        total = 0
        for number in range(self._file.num_row_groups):
            total += int(self._file.metadata.row_group(number).num_rows)
            self._ends.append(total)
        self._kept: tuple[int, Any] = (-1, None)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def row(self, index: int) -> dict[str, Any]:
        number = next(n for n, end in enumerate(self._ends) if index < end)
        if self._kept[0] != number:
            self._kept = (number, self._file.read_row_group(number))
        start = self._ends[number - 1] if number else 0
        return _message(self._kept[1].slice(index - start, 1))


class _Saved:
    """What Dataset.save_to_disk writes: state.json, and the shards that it names, each a stream of Arrow batches. They
    are mapped and not read."""

    def __init__(self, path: Path, field: str) -> None:
        import pyarrow as pa  # noqa: PLC0415 - as above

        names = self._shards(path, field)
        try:
            self._tables = [pa.ipc.open_stream(pa.memory_map(str(path / name))).read_all() for name in names]
        except (OSError, pa.ArrowInvalid) as error:
            raise UserError(
                f"{field} {path} has a shard that cannot be read", got=str(error).splitlines()[0][:200],
                wanted="the files that state.json names, whole", next="save it again with save_to_disk",
            ) from error  # fmt: skip
        self.digest = _digest(path / name for name in names)
        self._starts: list[int] = [0, *itertools.accumulate(table.num_rows for table in self._tables)]

    def _shards(self, path: Path, field: str) -> list[str]:
        splits = path / "dataset_dict.json"
        wanted = "a .jsonl or .parquet file, or a folder of datasets' save_to_disk"
        if splits.is_file():
            found = json.loads(splits.read_bytes())["splits"]
            raise UserError(
                f"{field} {str(path)!r} has several splits", got=", ".join(found)[:200], wanted="one of them",
                next=f"write {path / found[0]}" if found else "save one with save_to_disk",
            )  # fmt: skip
        try:
            state = json.loads((path / "state.json").read_bytes())
            return [str(file["filename"]) for file in state["_data_files"]]
        except FileNotFoundError as error:
            raise UserError(f"{field} {str(path)!r} is a folder", got="no state.json in it", wanted=wanted) from error
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{field} {str(path)!r} has no list of its files", got=f"state.json without _data_files ({error!r})",
                wanted=wanted, next="save it again with save_to_disk",
            ) from error  # fmt: skip

    def __len__(self) -> int:
        return self._starts[-1]

    def row(self, index: int) -> dict[str, Any]:
        number = bisect.bisect_right(self._starts, index) - 1
        return _message(self._tables[number].slice(index - self._starts[number], 1))


def _digest(paths: Iterable[Path]) -> str:
    digest = hashlib.blake2b(digest_size=12)
    for path in paths:
        with path.open("rb") as file:
            while chunk := file.read(CHUNK):
                digest.update(chunk)
    return digest.hexdigest()


def _message(table: Any) -> dict[str, Any]:
    """Its only row, with times and decimals as text."""
    [found] = table.to_pylist()
    return dict(json.loads(json.dumps(found, default=str)))
