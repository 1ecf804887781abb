"""Where checkpoints are kept, as the store sees it: files below one place, by names such as `b0-40/actor/model.bin`.

Called by store.py alone; folder.py is one on a disk, objects.py one in an object store. Not for: what a checkpoint
is, nor when one counts (store.py).

What a place owes: what `put` and `take_in` have returned from is there after a power cut, and `put` is whole or not at
all. Whoever has put a file finds in a listing, from then on, all that others have put before. What it refuses is an
OSError, whose `errno` is of FULL where there is no room.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, Protocol

FULL: Final = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Owed:
    """What people are told of an error: `got "No space left on device", wanted "a folder with room ..."; next`.
    `passes`: it may go away by itself, and says nothing of what is there."""

    got: str
    wanted: str
    next: str
    passes: bool = False


class Place(Protocol):
    what: str
    """For people: `the checkpoint folder /ckpt`."""

    def at(self, name: str) -> str:
        """For people: `/ckpt/b0-40`."""
        ...

    def owed(self, error: OSError, *, to_read: bool = False) -> Owed: ...

    # --- reading ------------------------------------------------------------------------------------------------------
    def top(self) -> list[str]:
        """Names right below the place; none where it is not there yet."""
        ...

    def sizes(self, folder: str) -> dict[str, int]:
        """Every file below, by its name from there: {"actor/model.bin": 7, "COMMIT": 90}."""
        ...

    def exists(self, name: str) -> bool: ...

    def read(self, name: str) -> str: ...

    def open(self, name: str) -> BinaryIO:
        """To read parts of a file; what is not asked for need not come."""
        ...

    def folder(self, name: str, files: Mapping[str, int]) -> AbstractContextManager[Path]:
        """All these files of one folder, on this machine for as long as it is open."""
        ...

    # --- writing ------------------------------------------------------------------------------------------------------
    def try_writing(self) -> None:
        """Raises what a `put` would; leaves nothing."""
        ...

    def put(self, name: str, text: str) -> None: ...

    def draft(self, name: str) -> Path:
        """An empty folder of this machine for the one who writes; seen by no reader."""
        ...

    def take_in(self, draft: str, into: str) -> dict[str, int]:
        """Moves all files of a draft to where they belong. Returns their sizes, by their names from there."""
        ...

    def discard(self, draft: str) -> None: ...

    def remove(self, name: str) -> None:
        """One file, where it is there."""
        ...

    def remove_all(self, folder: str) -> None:
        """What is below, where it is there; its COMMIT has gone for good before any other file may."""
        ...

    def tidy(self) -> None:
        """What a process that was killed has left right below the place."""
        ...
