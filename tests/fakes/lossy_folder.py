"""A folder on a disk that may forget what was not fsynced, and a power cut at any operation.

with LossyFolder(tmp_path / "disk", cut_at=7) as disk:      # PowerCut is raised instead of the 8th operation
    Checkpoints(str(disk.root)).begin(...)
for after in disk.survivors(tmp_path / "after"):            # folders as they may be found when power is back
    Checkpoints(str(after)).latest()

What counts as an operation: mkdir, rename, unlink, rmdir, fsync. What a disk may do, by POSIX and a journal: a change
of a folder's entries (a rename is one change) lasts from that folder's fsync on, a file's bytes from the file's;
whatever was done before that may have reached the disk or not, each by itself and in any order. Files that are opened
for writing are noticed at the next operation.
"""

import os
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

WATCHED = ("mkdir", "rename", "replace", "unlink", "remove", "rmdir", "fsync", "fdatasync")
SHUFFLES = 4
"""Ways in which a disk forgets some and keeps some, beside all and nothing: each is another seed."""


class PowerCut(BaseException):
    """No Exception: nobody who cleans up behind an error gets to do so."""


class File:
    def __init__(self) -> None:
        self.durable: bytes | None = None  # None: its bytes were never fsynced


class Folder:
    """`entries` as the running system sees them; `durable` and the changes that have not been fsynced since."""

    def __init__(self) -> None:
        self.entries: dict[str, Node] = {}
        self.durable: dict[str, Node] = {}
        self.pending: list[Mapping[str, Node | None]] = []

    def change(self, change: Mapping[str, "Node | None"]) -> None:
        _apply(self.entries, change)
        self.pending.append(change)

    def fsync(self) -> None:
        self.durable, self.pending = dict(self.entries), []


Node = File | Folder


class LossyFolder:
    """`root` exists and is durable. `cut_at`: how many operations are still carried out; None: power stays."""

    def __init__(self, root: Path, *, cut_at: int | None = None) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self.root, self._cut_at = root.resolve(), cut_at
        self.operations: list[str] = []
        self._top = Folder()
        self._real: dict[str, Callable[..., Any]] = {}
        self._notice(durable=True)

    def __enter__(self) -> "LossyFolder":
        self._real = {name: getattr(os, name) for name in WATCHED}
        for name, real in self._real.items():
            setattr(os, name, self._watch(name, real))
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: TracebackType | None) -> None:
        for name, real in self._real.items():
            setattr(os, name, real)
        self._notice()

    # --- while the system runs ----------------------------------------------------------------------------------------
    def _watch(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def watched(first: Any, *args: Any, **kwargs: Any) -> Any:
            at = self._inside(first, kwargs.get("dir_fd"))
            if at is None:
                return real(first, *args, **kwargs)
            self._notice()
            if len(self.operations) == self._cut_at:
                raise PowerCut
            done = real(first, *args, **kwargs)
            self.operations.append(f"{name} {at}")
            if name in ("fsync", "fdatasync"):
                self._fsynced(at)
            elif name in ("rename", "replace"):
                target = self._inside(args[0], None)
                assert target is not None, f"{at} leaves the disk"
                self._renamed(at, target)
            elif name == "mkdir":
                self._folder(at.parent).change({at.name: Folder()})
            else:
                self._folder(at.parent).change({at.name: None})
            return done

        return watched

    def _inside(self, path: Any, dir_fd: int | None) -> Path | None:
        """Below root, as a relative path; None for what lies elsewhere."""
        if isinstance(path, int):
            whole = os.readlink(f"/proc/self/fd/{path}")
        elif dir_fd is not None:
            whole = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), os.fspath(path))
        else:
            whole = os.path.abspath(os.fspath(path))
        found = Path(os.fsdecode(whole))
        return found.relative_to(self.root) if found.is_relative_to(self.root) else None

    def _folder(self, at: Path) -> Folder:
        node: Node = self._top
        for part in at.parts:
            assert isinstance(node, Folder)
            node = node.entries[part]
        assert isinstance(node, Folder), at
        return node

    def _renamed(self, at: Path, target: Path) -> None:
        """Within a folder it is one change; into another it is two, of which a disk may forget one."""
        node = self._folder(at.parent).entries[at.name]
        if target.parent == at.parent:
            self._folder(at.parent).change({at.name: None, target.name: node})
            return
        self._folder(target.parent).change({target.name: node})
        self._folder(at.parent).change({at.name: None})

    def _fsynced(self, at: Path) -> None:
        if (self.root / at).is_dir():
            self._folder(at).fsync()
            return
        file = self._folder(at.parent).entries[at.name]
        assert isinstance(file, File)
        file.durable = (self.root / at).read_bytes()

    def _notice(self, *, durable: bool = False) -> None:
        """Files (and, as this begins, folders) that somebody has made since the last operation."""
        for folder, folders, files in os.walk(self.root):
            at = Path(folder).relative_to(self.root)
            node = self._folder(at)
            for name in [*folders, *files]:
                if name not in node.entries:
                    assert name in files or durable, f"folder {at / name} was made behind the fake's back"
                    node.change({name: File() if name in files else Folder()})
                    if durable and name in files:
                        self._fsynced(at / name)
            if durable:
                node.fsync()

    # --- when power is back -------------------------------------------------------------------------------------------
    def survivors(self, folder: Path) -> Iterator[Path]:
        """Nothing but what was fsynced; everything; SHUFFLES mixtures."""
        keeps: list[Callable[[], bool]] = [lambda: False, lambda: True]
        keeps += [_coin(seed) for seed in range(SHUFFLES)]
        for number, keep in enumerate(keeps):
            found = folder / str(number)
            self._lay(self._top, found, self.root, keep)
            yield found

    def _lay(self, node: Folder, to: Path, live: Path | None, keep: Callable[[], bool]) -> None:
        to.mkdir(parents=True)
        entries = dict(node.durable)
        for change in node.pending:
            if keep():
                _apply(entries, change)
        for name, child in sorted(entries.items()):
            now = live / name if live is not None and node.entries.get(name) is child else self._find(child)
            if isinstance(child, Folder):
                self._lay(child, to / name, now, keep)
            else:
                (to / name).write_bytes(self._bytes(child, now, keep))

    def _bytes(self, file: File, live: Path | None, keep: Callable[[], bool]) -> bytes:
        now = live.read_bytes() if live is not None else b"gone"
        if file.durable is not None and (live is None or file.durable == now or not keep()):
            return file.durable
        if keep():
            return now
        return bytes(len(now)) if keep() else b""  # its length reached the disk and its bytes did not, or neither

    def _find(self, wanted: Node) -> Path | None:
        """Where it lies now under another name, if it does."""

        def search(node: Folder, at: Path) -> Path | None:
            for name, child in node.entries.items():
                if child is wanted:
                    return at / name
                if isinstance(child, Folder) and (found := search(child, at / name)):
                    return found
            return None

        return search(self._top, self.root)


def _apply(entries: dict[str, Node], change: Mapping[str, Node | None]) -> None:
    for name, node in change.items():
        if node is None:
            entries.pop(name, None)
        else:
            entries[name] = node


def _coin(seed: int) -> Callable[[], bool]:
    draw = random.Random(seed)
    return lambda: draw.random() < 0.5
