"""Checkpoints in a folder: of this machine, or of a volume that all pods of a job mount.

<root>/b0-40/.actor.0-of-2/...    a draft: what a rank is writing
<root>/b0-40/actor/...            taken in: fsync, rename
<root>/.new-...                   a file that is being put; a process that was killed there leaves it
"""

from __future__ import annotations

import errno
import io
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import BinaryIO, Final

from rlinf_worker.checkpoints.place import Owed

NEW: Final = ".new-"
NEXT: Final = "look at the volume in spec.checkpoint.uri"
PIECE_BYTES: Final = 32 * 2**20
"""That are read of a file at once, between two words that work moves: a disk that gives 0.1 MB/s is one that hangs."""


class Folder:
    """`Folder(Path("/ckpt"))`. `moved` is called as bytes come, from any thread."""

    def __init__(self, root: Path, *, moved: Callable[[], None] = lambda: None) -> None:
        self._root, self._moved = root, moved
        self.what = f"the checkpoint folder {root}"

    def at(self, name: str) -> str:
        return str(self._root / name)

    def owed(self, error: OSError, *, to_read: bool = False) -> Owed:
        wanted = "that uid {} may read and write" if to_read else "with room that uid {} may write to"
        return Owed(got=error.strerror or str(error), wanted=f"a folder {wanted.format(os.geteuid())}", next=NEXT)

    # --- reading ------------------------------------------------------------------------------------------------------
    def top(self) -> list[str]:
        try:
            return os.listdir(self._root)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def sizes(self, folder: str) -> dict[str, int]:
        at = self._root / folder
        return {path.relative_to(at).as_posix(): path.stat().st_size for path in _files(at, drafts=False)}

    def exists(self, name: str) -> bool:
        return (self._root / name).exists()

    def read(self, name: str) -> str:
        return (self._root / name).read_text(encoding="utf-8")

    def open(self, name: str) -> BinaryIO:
        return io.BufferedReader(_InPieces((self._root / name).open("rb", buffering=0), self._moved))

    def folder(self, name: str, files: Mapping[str, int]) -> AbstractContextManager[Path]:
        return nullcontext(self._root / name)

    # --- writing ------------------------------------------------------------------------------------------------------
    def try_writing(self) -> None:
        _make(self._root)
        descriptor, name = tempfile.mkstemp(prefix=NEW, dir=self._root)
        try:
            os.write(descriptor, b"x")
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
            Path(name).unlink(missing_ok=True)

    def put(self, name: str, text: str) -> None:
        to = self._root / name
        new = to.with_name(f"{NEW}{to.name}-{uuid.uuid4().hex}")  # others may put the same one now
        new.write_text(text, encoding="utf-8")
        _fsync(new)
        new.rename(to)
        _fsync(to.parent)

    def draft(self, name: str) -> Path:
        self.discard(name)
        _make(self._root / name)
        return self._root / name

    def take_in(self, draft: str, into: str) -> dict[str, int]:
        at, to, sizes = self._root / draft, self._root / into, dict[str, int]()
        os.stat(at)  # where there is no draft, it is not an empty one
        files = _files(at)
        for path in files:
            _fsync(path)
        _make(to)
        for path in files:
            name = path.relative_to(at)
            _make((to / name).parent)
            sizes[name.as_posix()] = path.stat().st_size
            path.rename(to / name)
        for folder in {(to / name).parent for name in sizes}:
            _fsync(folder)
        self.discard(draft)
        return sizes

    def discard(self, draft: str) -> None:
        shutil.rmtree(self._root / draft, ignore_errors=True)

    def remove(self, name: str) -> None:
        (self._root / name).unlink(missing_ok=True)

    def remove_all(self, folder: str) -> None:
        at = self._root / folder
        try:
            (at / "COMMIT").unlink()
            _fsync(at)
        except FileNotFoundError:
            pass  # it has none, or another process that removes it was here first
        shutil.rmtree(at, ignore_errors=True)
        if at.parent != self._root:
            with suppress(OSError):  # others have something in it, or begin to: it is no tree to be removed
                at.parent.rmdir()

    def tidy(self) -> None:
        for path in self._root.glob(f"{NEW}*"):
            path.unlink(missing_ok=True)


class _InPieces(io.RawIOBase):
    """A file of which no more is read at once. It has no descriptor, by which numpy would read all."""

    def __init__(self, file: io.FileIO, moved: Callable[[], None]) -> None:
        self._file, self._moved = file, moved

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        count = self._file.readinto(memoryview(buffer)[:PIECE_BYTES])
        self._moved()
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


def _files(folder: Path, *, drafts: bool = True) -> list[Path]:
    """Sorted; none where there is no such folder. Of drafts right below, which others take in meanwhile, only where it
    is said."""
    found = []
    for at, folders, files in os.walk(folder, onerror=_unless_gone):
        if at == str(folder) and not drafts:
            folders[:] = [name for name in folders if not name.startswith(".")]
            files = [name for name in files if not name.startswith(".")]
        found += [Path(at, name) for name in files]
    return sorted(found)


def _unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def _make(folder: Path) -> None:
    """With the folders on the way. Each is fsynced into the one that holds it: what lies in a folder that the disk has
    forgotten is forgotten with it."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:  # mkdir's word for a file where the folder should be
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder)) from error
    for path in missing:
        _fsync(path.parent)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
