"""What makes a folder of the cache whole: every file is on the disk, and a list of their sizes tells.

A folder is moved into place at its end, but a power cut may keep the move and lose what the files hold. binaries.py,
images.py and prometheus.py call this. Python alone, as binaries.py needs.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

SEAL = ".sizes"


def seal(folder: Path) -> None:
    """Before the folder is moved into place: nothing may lie on the disk later than its name does."""
    scratch = folder.with_name(f".{folder.name}{SEAL}-{os.getpid()}")  # a seal that is seen is whole, or torn for good
    scratch.write_text(json.dumps(_sizes(folder), indent=0, sort_keys=True), encoding="utf-8")
    scratch.replace(folder / SEAL)
    for where, _, files in os.walk(folder, topdown=False):
        for path in [*(Path(where) / name for name in files), Path(where)]:
            if path.is_file() or path.is_dir():
                _sync(path)


def move(folder: Path, where: Path) -> None:
    """Seals `folder` and gives it the name `where`."""
    seal(folder)
    folder.replace(where)
    _sync(where.parent)


def is_whole(folder: Path) -> bool:
    """It is there with every file as it was sealed."""
    if not folder.is_dir():
        return False
    found = _sizes(folder)
    try:
        return bool(json.loads((folder / SEAL).read_bytes()) == found)
    except FileNotFoundError:
        # A version that sealed nothing has made it. A file that was torn has most often nothing in it.
        if not found or 0 in found.values():
            return False
        with contextlib.suppress(PermissionError):  # somebody else's cache does as it is
            seal(folder)
        return True
    except ValueError:
        return False


def _sizes(folder: Path) -> dict[str, int]:
    """The bytes of every file of its own, by path; a link has none."""
    paths = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in paths if path != folder / SEAL}


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
