"""Checkpoints as folders: written whole or not at all, pruned, and read back by the newest that can be read.

For: RoleContext.checkpoints of the committing gang; rank 0 calls begin and finish, every rank writes into the folder.
Not for: what is in `actor/` (the role), nor whether to write one (the driver).

    <uri>/.b0-40.partial/actor/...      begin: being written; a crash leaves it, the next begin or prune removes it
    <uri>/b0-40/actor/...               finish: fsync, rename
    <uri>/b0-40/driver.json
    <uri>/b0-40/COMMIT                  last: without it the folder does not count
    <uri>/.b2.opened                    a branch has begun, of which there may be no checkpoint yet

COMMIT lists every file with its size, so that a truncated one is seen before a role trips over it.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, unquote_to_bytes, urlsplit

from rlinf_api.errors import NotSupportedYet, UserError
from rlinf_worker.channels.protocol import PolicyVersion

logger = logging.getLogger(__name__)

KEEP: Final = 3  # as spec.checkpoint.keep: one may be unreadable, one may be read while one is written
FORMAT: Final = 1
PROBE: Final = ".probe-"
FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_NAME: Final = re.compile(r"^b(0|[1-9][0-9]*)-(0|[1-9][0-9]*)$")
_TRACE: Final = re.compile(
    r"^\.?b(0|[1-9][0-9]{0,8})(-[0-9]+(\.partial)?|\.opened)$"
)  # what fits into the wire's int32


class CheckpointUnreadable(UserError):
    """There are checkpoints, and none can be read: starting over would throw work away without asking."""


class CheckpointUnwritable(UserError):
    """A full disk, a missing volume, a wrong permission."""


def parse_name(name: str) -> PolicyVersion | None:
    """
    >>> parse_name("b1-40"), parse_name("b1-040"), parse_name(".b1-40.partial")
    (PolicyVersion(branch=1, number=40), None, None)
    """
    match = _NAME.match(name)
    return PolicyVersion(int(match[1]), int(match[2])) if match else None


def folder_of(uri: str) -> Path:
    """The folder that a file uri or an absolute path names. Of a uri all counts: two folders must not become one, in
    which each job takes the other's checkpoints for its own."""
    parsed = urlsplit(uri)
    if parsed.scheme == "file" and parsed.netloc in ("", "localhost"):
        if left_out := next((c for c in uri if c in "#?"), ""):
            raise UserError(
                "the place for checkpoints is no uri of a folder", got=repr(uri), wanted=f"no {left_out!r} in it",
                next=f"write {left_out!r} as {quote(left_out)}, or the path alone",
            )  # fmt: skip
        path = Path(os.fsdecode(unquote_to_bytes(os.fsencode(parsed.path))))
    elif not parsed.scheme:
        path = Path(uri)
    else:
        raise NotSupportedYet(
            "checkpoints can be kept in folders only", got=repr(uri), wanted="file:///path or an absolute path",
            next="mount the storage as a volume and name its path in spec.checkpoint.uri",
        )  # fmt: skip
    if not path.is_absolute():
        raise UserError(
            "the place for checkpoints is no absolute path", got=repr(uri), wanted="file:///path or /path",
            next="write spec.checkpoint.uri so",
        )  # fmt: skip
    return path


class FileCheckpoints:
    """`<uri>/b<branch>-<step>/{actor/, driver.json, COMMIT}`. An empty uri: there are none, and none can be written."""

    def __init__(
        self,
        uri: str,
        *,
        keep: int = KEEP,
        on_saved: Callable[[PolicyVersion, str], None] = lambda *_: None,
        on_failed: Callable[[PolicyVersion, str], None] = lambda *_: None,
    ) -> None:
        self._root = folder_of(uri) if uri else None
        self._keep, self._on_saved, self._on_failed = max(1, keep), on_saved, on_failed
        self._found: tuple[PolicyVersion, str] | None = None  # what was told last, with its driver.json

    # --- reading ------------------------------------------------------------------------------------------------------
    def latest(self) -> tuple[PolicyVersion, str, str] | None:
        """(version, folder of the actor's files, driver.json) of the newest readable one; None without any. Raises
        CheckpointUnreadable where there are some and none can be read, CheckpointUnwritable.

        Called as a worker starts: that there is no place to write to must be known now, and not after the hours in
        which the first checkpoint was learnt."""
        if self._root is None:
            return None
        found = self._newest_readable()
        self._found = (found[0], found[2]) if found is not None else None
        try:
            self._try_writing()
        except CheckpointUnwritable as error:
            if found is None or getattr(error.__cause__, "errno", None) not in FULL:
                raise
            # It had room once, and a restarted rank must not end the job for a disk that somebody will clear.
            logger.warning("no room for checkpoints, going on from the last one", extra={"error": str(error)})
        return found

    def state_of(self, version: PolicyVersion) -> str:
        """driver.json of the checkpoint that `latest` found; empty: it found another."""
        return self._found[1] if self._found is not None and self._found[0] == version else ""

    def _newest_readable(self) -> tuple[PolicyVersion, str, str] | None:
        unreadable = []
        for version in self._committed():
            folder = self._place / str(version)
            try:
                state_json = _read(folder, version)
            except (OSError, ValueError) as error:
                extra = {"folder": str(folder), "error": str(error)}
                logger.error("checkpoint cannot be read, trying an older one", extra=extra)
                unreadable.append(f"{folder.name}: {error}")
                continue
            return version, str(folder / "actor"), state_json
        if unreadable:
            raise CheckpointUnreadable(
                f"no checkpoint in {self._place} can be read", got="; ".join(unreadable[:5]),
                wanted="one whose files are those that its COMMIT lists",
                next="restore one from a backup, or remove the folder to start over",
            )  # fmt: skip
        return None

    def _committed(self) -> list[PolicyVersion]:
        """Newest first."""
        found = [v for name in self._names() if (v := parse_name(name)) is not None]
        return sorted((v for v in found if (self._place / str(v) / "COMMIT").exists()), reverse=True)

    def _names(self) -> list[str]:
        try:
            return os.listdir(self._place)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise CheckpointUnreadable(
                f"the checkpoint folder {self._place} cannot be read", got=error.strerror or str(error),
                wanted=f"a folder that uid {os.geteuid()} may read and write",
                next="look at the volume in spec.checkpoint.uri",
            ) from error  # fmt: skip

    @property
    def highest_branch(self) -> int:
        """The highest that has left a trace, readable or not. What is made from here on has a higher one."""
        traces = [found for name in self._names() if (found := _TRACE.match(name))] if self._root is not None else []
        return max((int(found[1]) for found in traces), default=0)

    # --- writing ------------------------------------------------------------------------------------------------------
    def _try_writing(self) -> None:
        try:
            _make(self._place)
            descriptor, name = tempfile.mkstemp(prefix=PROBE, dir=self._place)
            try:
                os.write(descriptor, b"x")
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
                Path(name).unlink(missing_ok=True)
        except FileExistsError as error:  # mkdir's word for a file where the folder should be
            raise _unwritable(f"the checkpoint folder {self._place}", error, got=os.strerror(errno.ENOTDIR)) from error
        except OSError as error:
            raise _unwritable(f"the checkpoint folder {self._place}", error) from error

    @property
    def _place(self) -> Path:
        if self._root is None:
            raise UserError(
                "a checkpoint is to be written, and there is no place for it", got="spec.checkpoint.uri is empty",
                wanted="file:///path or /path", next="set spec.checkpoint.uri",
            )  # fmt: skip
        return self._root

    def opened(self, branch: int) -> None:
        """The gang goes on as this branch: kept before anything is called by it, for when nobody is left who has heard
        of it. A number that cannot be kept is worth no job: those who live tell a new driver of it."""
        if self._root is None:
            return
        mark = self._root / f".b{branch}.opened"
        try:
            if branch <= self.highest_branch:
                return
            mark.touch()
            _fsync(mark)
            _fsync(self._root)
            for path in self._root.glob(".b*.opened"):
                if path != mark:
                    path.unlink(missing_ok=True)
        except (OSError, CheckpointUnreadable) as error:
            logger.warning("the number of a branch is not kept", extra={"branch": branch, "error": str(error)})

    def begin(self, version: PolicyVersion) -> str:
        """Rank 0: the folder for the actor's files; not visible to readers before finish."""
        partial = self._place / f".{version}.partial"
        try:
            shutil.rmtree(partial, ignore_errors=True)
            _make(partial.parent)
            (partial / "actor").mkdir(parents=True)
        except OSError as error:
            raise _unwritable(f"checkpoint {partial}", error) from error
        return str(partial / "actor")

    def finish(self, version: PolicyVersion, state_json: str) -> str:
        """Once every rank has written. Returns the uri."""
        partial, final = self._place / f".{version}.partial", self._place / str(version)
        try:
            try:
                _read(final, version)  # whole already: finished by an earlier life
            except (OSError, ValueError):
                _commit(partial, final, version=version, state_json=state_json)
            self._prune()
        except OSError as error:
            raise _unwritable(f"checkpoint {final}", error) from error
        self._on_saved(version, str(final))
        return str(final)

    def failed(self, version: PolicyVersion, problem: str) -> None:
        """What was begun does not come. Its files go: they may be what fills the disk."""
        shutil.rmtree(self._place / f".{version}.partial", ignore_errors=True)
        logger.warning("checkpoint not written", extra={"version": str(version), "error": problem})
        self._on_failed(version, problem)

    def _prune(self) -> None:
        """Keeps the newest."""
        for version in self._committed()[self._keep :]:
            _remove(self._place / str(version))
        for path in self._place.glob(".b*.partial"):
            shutil.rmtree(path, ignore_errors=True)
        for path in self._place.glob(f"{PROBE}*"):  # left by a worker that was killed there
            path.unlink(missing_ok=True)


def _commit(partial: Path, final: Path, *, version: PolicyVersion, state_json: str) -> None:
    (partial / "driver.json").write_text(state_json or "{}", encoding="utf-8")
    files = {}
    for path in sorted(p for p in partial.rglob("*") if p.is_file()):
        files[path.relative_to(partial).as_posix()] = path.stat().st_size
        _fsync(path)
    for folder in [partial, *(p for p in partial.rglob("*") if p.is_dir())]:
        _fsync(folder)
    if final.exists():  # one that is damaged
        _remove(final)
    partial.rename(final)
    _fsync(final.parent)
    words = {"format": FORMAT, "version": str(version), "files": files}
    commit = final / ".COMMIT.new"
    commit.write_text(json.dumps(words, indent=1), encoding="utf-8")
    _fsync(commit)
    commit.rename(final / "COMMIT")
    _fsync(final)


def _remove(folder: Path) -> None:
    """COMMIT goes first, and has gone from the disk before any other file may."""
    (folder / "COMMIT").unlink(missing_ok=True)
    _fsync(folder)
    shutil.rmtree(folder, ignore_errors=True)


def _read(folder: Path, version: PolicyVersion) -> str:
    """driver.json of a whole checkpoint. Raises OSError or ValueError with what is wrong."""
    words: Any = json.loads((folder / "COMMIT").read_text(encoding="utf-8"))
    if not isinstance(words, dict) or not isinstance(words.get("files"), dict):
        raise ValueError("COMMIT is not one of ours")
    if words.get("format") != FORMAT:
        raise ValueError(f"COMMIT has format {words.get('format')!r}, this version reads {FORMAT}")
    if words.get("version") != str(version):
        raise ValueError(f"COMMIT is of version {words.get('version')!r}")
    for name, size in words["files"].items():
        found = (folder / name).stat().st_size
        if found != size:
            raise ValueError(f"{name} has {found} bytes, wanted {size}")
    state_json = (folder / "driver.json").read_text(encoding="utf-8")
    if not isinstance(json.loads(state_json), dict):
        raise ValueError("driver.json is no JSON object")
    return state_json


def _make(folder: Path) -> None:
    """With the folders on the way. Each is fsynced into the one that holds it: what lies in a folder that the disk has
    forgotten is forgotten with it."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    if missing:
        folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        _fsync(path.parent)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _unwritable(what: str, error: OSError, *, got: str = "") -> CheckpointUnwritable:
    return CheckpointUnwritable(
        f"{what} cannot be written", got=got or error.strerror or str(error),
        wanted=f"a folder with room that uid {os.geteuid()} may write to",
        next="look at the volume in spec.checkpoint.uri",
    )  # fmt: skip
