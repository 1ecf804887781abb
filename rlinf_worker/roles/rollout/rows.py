"""The rows of a data file: JSONL, or Parquet. Opened once, read row by row; nothing of it is kept in memory but where
its rows begin.

For: the rollout role. Not for: which row is whose turn (flows/grpo.py), what is made of one (language.py).
"""

from __future__ import annotations

import hashlib
import json
import mmap
from abc import abstractmethod
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
    if at.is_dir():
        raise UserError(
            f"{field} {path!r} is a folder", got="a folder", wanted="a .jsonl or .parquet file",
            next="folders of the library datasets are not read in this version: save it by to_json or to_parquet",
        )  # fmt: skip
    if not at.is_file():
        raise UserError(
            f"{field} {path!r} is not there", wanted="a file that every pod that has the rollout mounts",
            next="correct the path, or mount it by the pool's template",
        )  # fmt: skip
    rows: Rows = _Parquet(at, field) if at.suffix == ".parquet" else _JsonLines(at, field)
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

        self._path, digest = path, hashlib.blake2b(digest_size=12)
        with path.open("rb") as file:
            while chunk := file.read(CHUNK):
                digest.update(chunk)
        self.digest = digest.hexdigest()
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
        [found] = self._kept[1].slice(index - start, 1).to_pylist()
        return dict(json.loads(json.dumps(found, default=str)))  # times and decimals as text: a row is a message
