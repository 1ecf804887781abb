"""Checkpoints: written whole or not at all, in parts by many, pruned, and read back by the newest that can be read.

For: RoleContext.checkpoints of the gangs that end steps. Not for: what is in `actor/` (the role), whether to write one
(the driver), how files get to a disk or a bucket (folder.py, objects.py).

    <uri>/b0-40/actor/...        finish: the files of this writer, taken in from the draft that `begin` gave
    <uri>/b0-40/actor.1-of-2     then closed: which files they are. Writer 1 of role `actor`, which has two
    <uri>/b0-40/driver.json      whoever finds that every writer of every role has closed its part
    <uri>/b0-40/COMMIT           last: without it the folder does not count
    <uri>/.b2.opened             a branch has begun, of which there may be no checkpoint yet

Nobody waits for the others, and nobody has to outlive them: a place lists what was put before, so the last to close
finds all parts. Two that find them at once write the same words. A part that is never closed, as its gang has died or
had no room, is no checkpoint, and is removed with the next one.

COMMIT lists every file with its size, so that a truncated one is seen before a role trips over it.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

from rlinf_api.errors import RetryableError, UserError
from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.checkpoints import places
from rlinf_worker.checkpoints.place import FULL, Owed, Place

logger = logging.getLogger(__name__)

KEEP: Final = 3  # as spec.checkpoint.keep: one may be unreadable, one may be read while one is written
FORMAT: Final = 2
COMMIT: Final = "COMMIT"
DRIVER: Final = "driver.json"
READ_BYTES_PER_S: Final = 10 * 2**20
"""At least, where a library reads whole files and nobody sees how far it is: a link of 1 Gbit/s that ten ranks share.
What takes longer, and longer than `load_deadline_s`, is taken for a hang."""
_NAME: Final = re.compile(r"^b(0|[1-9][0-9]*)-(0|[1-9][0-9]*)$")
_TRACE: Final = re.compile(r"^(b(0|[1-9][0-9]{0,8})-[0-9]+|\.b(0|[1-9][0-9]{0,8})\.opened)$")  # the wire's int32
_CLOSED: Final = re.compile(r"^([^/.]+)\.(0|[1-9][0-9]*)-of-([1-9][0-9]*)$")


class CheckpointUnreadable(UserError):
    """There are checkpoints, and none can be read: starting over would throw work away without asking."""


class CheckpointsAway(RetryableError):
    """The place does not answer just now. A worker that starts is started again; it takes no older one meanwhile."""


class CheckpointUnwritable(UserError):
    """A full disk, a missing volume, a wrong permission."""


@dataclass(frozen=True, slots=True)
class Writer:
    """
    >>> str(Writer(rank=1, of=2))
    '1-of-2'
    """

    rank: int
    of: int

    def __str__(self) -> str:
        return f"{self.rank}-of-{self.of}"


ALONE: Final = Writer(rank=0, of=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """One role's part of a checkpoint, as it is read. `files`: {"model.safetensors": 1048}."""

    version: PolicyVersion
    state_json: str  # driver.json
    files: Mapping[str, int]
    place: Place
    at: str  # b0-40/actor

    @property
    def reading_s(self) -> float:
        """How long who reads all of it by itself, as numpy does, may show no progress."""
        return sum(self.files.values()) / READ_BYTES_PER_S

    def folder(self) -> AbstractContextManager[Path]:
        """All of it, on this machine for as long as it is open."""
        return self.place.folder(self.at, self.files)

    def open(self, name: str) -> BinaryIO:
        """Opens a file to read parts of it: the rest need not come to this machine. Each piece counts as work that
        moves, whoever reads: torch, or `np.load(saved.open("rank-0.npy"))`."""
        return self.place.open(f"{self.at}/{name}")


def parse_name(name: str) -> PolicyVersion | None:
    """
    >>> parse_name("b1-40"), parse_name("b1-040"), parse_name(".b1.opened")
    (PolicyVersion(branch=1, number=40), None, None)
    """
    match = _NAME.match(name)
    return PolicyVersion(int(match[1]), int(match[2])) if match else None


class Checkpoints:
    """The checkpoints of one role of a job. `roles`: all that write parts, this one included; empty: it alone. An empty
    uri: there are none, and none can be written. `moved`: bytes go or come, of which one call may move many."""

    def __init__(
        self,
        uri: str,
        *,
        role: str = "actor",
        roles: Sequence[str] = (),
        keep: int = KEEP,
        on_saved: Callable[[PolicyVersion, str], None] = lambda *_: None,
        on_failed: Callable[[PolicyVersion, str], None] = lambda *_: None,
        moved: Callable[[], None] = lambda: None,
    ) -> None:
        self._somewhere = places.of(uri, moved=moved) if uri else None
        self._role, self._roles = role, tuple(roles) or (role,)
        self.keep, self._on_saved, self._on_failed = keep, on_saved, on_failed
        self._found: Checkpoint | None = None  # what was told last

    # --- reading ------------------------------------------------------------------------------------------------------
    def latest(self) -> Checkpoint | None:
        """The newest readable one; None without any. Raises CheckpointUnreadable where there are some and none can be
        read, CheckpointUnwritable.

        Called as a worker starts: that there is no place to write to must be known now, and not after the hours in
        which the first checkpoint was learnt."""
        if self._somewhere is None:
            return None
        found = self._found = self._newest_readable()
        try:
            self._place.try_writing()
        except OSError as error:
            self._away(error)
            if found is None or error.errno not in FULL:
                raise self._unwritable(self._place.what, error) from error
            # It had room once, and a restarted rank must not end the job for a disk that somebody will clear.
            logger.warning("no room for checkpoints, going on from the last one", extra={"error": str(error)})
        return found

    def versions(self) -> list[PolicyVersion]:
        """The versions of all that count, newest first. Raises CheckpointUnreadable, CheckpointsAway."""
        with self._to_read():
            return self._committed() if self._somewhere is not None else []

    def of(self, name: str) -> Checkpoint:
        """The checkpoint of a version, such as `b0-40`. Raises CheckpointUnreadable."""
        version = parse_name(name)
        assert version is not None, name
        try:
            self._found = self._read(version)
        except (OSError, ValueError) as error:
            self._away(error)
            raise CheckpointUnreadable(
                f"checkpoint {self._place.at(name)} cannot be read here", got=str(error),
                wanted="the one on which rank 0 begins", next="look at the place in spec.checkpoint.uri",
            ) from error  # fmt: skip
        return self._found

    def state_of(self, version: PolicyVersion) -> str:
        """driver.json of the checkpoint that `latest` found; empty: it found another."""
        return self._found.state_json if self._found is not None and self._found.version == version else ""

    def _newest_readable(self) -> Checkpoint | None:
        unreadable = []
        with self._to_read():
            committed = self._committed()
        for version in committed:
            try:
                return self._read(version)
            except (OSError, ValueError) as error:
                self._away(error)
                extra = {"folder": self._place.at(str(version)), "error": str(error)}
                logger.error("checkpoint cannot be read, trying an older one", extra=extra)
                unreadable.append(f"{version}: {error}")
        if unreadable:
            raise CheckpointUnreadable(
                f"no checkpoint in {self._place.at('')} can be read", got="; ".join(unreadable[:5]),
                wanted="one whose files are those that its COMMIT lists",
                next="restore one from a backup, or remove the folder to start over",
            )  # fmt: skip
        return None

    def _read(self, version: PolicyVersion) -> Checkpoint:
        """A whole checkpoint. Raises OSError, or ValueError with what is wrong."""
        words: Any = json.loads(self._place.read(f"{version}/{COMMIT}"))
        if not isinstance(words, dict) or not isinstance(words.get("files"), dict):
            raise ValueError("COMMIT is not one of ours")
        if words.get("format") != FORMAT:
            raise ValueError(f"COMMIT has format {words.get('format')!r}, this version reads {FORMAT}")
        if words.get("version") != str(version):
            raise ValueError(f"COMMIT is of version {words.get('version')!r}")
        if self._role not in words.get("roles", ()):
            raise ValueError(f"it has no part of role {self._role!r}, only of {', '.join(words.get('roles', ()))}")
        sizes = self._place.sizes(str(version))
        for name, size in words["files"].items():
            if name not in sizes:
                raise ValueError(f"{name} is missing")
            if sizes[name] != size:
                raise ValueError(f"{name} has {sizes[name]} bytes, wanted {size}")
        state_json = self._place.read(f"{version}/{DRIVER}")
        if not isinstance(json.loads(state_json), dict):
            raise ValueError("driver.json is no JSON object")
        own = f"{self._role}/"
        files = {name.removeprefix(own): size for name, size in words["files"].items() if name.startswith(own)}
        return Checkpoint(
            version=version, state_json=state_json, files=files, place=self._place, at=f"{version}/{self._role}"
        )

    def _versions(self) -> list[PolicyVersion]:
        """The versions of all folders, newest first."""
        return sorted((v for name in self._place.top() if (v := parse_name(name)) is not None), reverse=True)

    def _committed(self) -> list[PolicyVersion]:
        return [version for version in self._versions() if self._place.exists(f"{version}/{COMMIT}")]

    @contextmanager
    def _to_read(self) -> Iterator[None]:
        """What cannot be listed as a worker starts ends the job; in a save it costs the checkpoint."""
        try:
            yield
        except OSError as error:
            self._away(error)
            owed = self._place.owed(error, to_read=True)
            raise CheckpointUnreadable(
                f"{self._place.what} cannot be read", got=owed.got, wanted=owed.wanted, next=owed.next
            ) from error

    def _away(self, error: Exception) -> None:
        """Raises CheckpointsAway where it is that."""
        if isinstance(error, OSError) and (owed := self._place.owed(error)).passes:
            raise CheckpointsAway(
                f"{self._place.what} cannot be read", got=owed.got, wanted=owed.wanted, next=owed.next
            ) from error

    @property
    def highest_branch(self) -> int:
        """The highest that has left a trace, readable or not. What is made from here on has a higher one."""
        if self._somewhere is None:
            return 0
        with self._to_read():
            names = self._place.top()
        traces = [found for name in names if (found := _TRACE.match(name))]
        return max((int(found[2] or found[3]) for found in traces), default=0)

    # --- writing ------------------------------------------------------------------------------------------------------
    @property
    def _place(self) -> Place:
        if self._somewhere is None:
            raise UserError(
                "a checkpoint is to be written, and there is no place for it", got="spec.checkpoint.uri is empty",
                wanted=places.WANTED, next="set spec.checkpoint.uri",
            )  # fmt: skip
        return self._somewhere

    def opened(self, branch: int) -> None:
        """The gangs go on as this branch: kept before anything is called by it, for when nobody is left who has heard
        of it. A number that cannot be kept is worth no job: those who live tell a new driver of it."""
        if self._somewhere is None or self._role != self._roles[0]:
            return  # one of them is enough
        mark = f".b{branch}.opened"
        try:
            if branch <= self.highest_branch:
                return
            self._place.put(mark, "")
            for name in self._place.top():
                if name.endswith(".opened") and _TRACE.match(name) and name != mark:
                    self._place.remove(name)
        except (OSError, CheckpointUnreadable, CheckpointsAway) as error:
            logger.warning("the number of a branch is not kept", extra={"branch": branch, "error": str(error)})

    def begin(self, version: PolicyVersion, writer: Writer = ALONE) -> Path:
        """An empty folder for the files of this writer."""
        place = self._place
        try:
            self._clear(version)
            place.remove(self._closed(version, writer))  # of a try before
            return place.draft(self._draft(version, writer))
        except OSError as error:
            raise self._unwritable(f"checkpoint {place.at(str(version))}", error) from error

    def finish(self, version: PolicyVersion, state_json: str, writer: Writer = ALONE) -> bool:
        """The files of this writer are there. Returns whether the checkpoint is: others may be writing still."""
        place = self._place
        try:
            if self._is_whole(version):
                place.discard(self._draft(version, writer))
            else:
                own = place.take_in(self._draft(version, writer), f"{version}/{self._role}")
                place.put(self._closed(version, writer), json.dumps(own, indent=1))
                files = self._files_of_all(version)
                if files is None:
                    return False
                self._commit(version, files, state_json or "{}")
        except OSError as error:
            raise self._unwritable(f"checkpoint {place.at(str(version))}", error) from error
        self._on_saved(version, place.at(str(version)))
        self._prune(version)
        return True

    def failed(self, version: PolicyVersion, problem: str, writer: Writer = ALONE) -> None:
        """This role's part does not come. Its files go: they may be what fills the disk. A part that is closed stays:
        what could not be written is what comes behind it."""
        logger.warning("checkpoint not written", extra={"version": str(version), "error": problem})
        place = self._place
        place.discard(self._draft(version, writer))
        with suppress(OSError):  # what stays is in nobody's way, and goes with the next
            if not place.exists(self._closed(version, writer)):  # else the last of all may count on it just now
                for name in place.sizes(str(version)):
                    if (closed := _CLOSED.match(name)) and closed[1] == self._role:
                        place.remove(f"{version}/{name}")
                place.remove_all(f"{version}/{self._role}")
        self._on_failed(version, problem)

    def _draft(self, version: PolicyVersion, writer: Writer) -> str:
        return f"{version}/.{self._role}.{writer}"

    def _closed(self, version: PolicyVersion, writer: Writer) -> str:
        return f"{version}/{self._role}.{writer}"

    def _is_whole(self, version: PolicyVersion) -> bool:
        """Already, as an earlier life has finished it. Raises OSError where it cannot be read just now."""
        try:
            self._read(version)
        except (FileNotFoundError, ValueError):  # it has no COMMIT, or a wrong one
            return False
        return True

    def _files_of_all(self, version: PolicyVersion) -> dict[str, int] | None:
        """{"actor/model.bin": 7}, where every writer of every role has closed its part."""
        found: dict[tuple[str, int], set[int]] = {}
        for name in self._place.sizes(str(version)):
            if closed := _CLOSED.match(name):
                found.setdefault((closed[1], int(closed[3])), set()).add(int(closed[2]))
        whole = {role: of for (role, of), ranks in found.items() if len(ranks) == of}
        if any(role not in whole for role in self._roles):
            return None
        files: dict[str, int] = {}
        for role in self._roles:
            for rank in range(whole[role]):
                own = json.loads(self._place.read(f"{version}/{role}.{Writer(rank, whole[role])}"))
                for name, size in own.items():
                    if f"{role}/{name}" in files:
                        raise UserError(
                            f"two ranks of role {role!r} have written one file of checkpoint {version}", got=name,
                            wanted="a name for each", next="name the rank in it",
                        )  # fmt: skip
                    files[f"{role}/{name}"] = size
        return files

    def _commit(self, version: PolicyVersion, files: Mapping[str, int], state_json: str) -> None:
        self._place.put(f"{version}/{DRIVER}", state_json)
        listed = {**files, DRIVER: len(state_json.encode())}
        words = {"format": FORMAT, "version": str(version), "roles": self._roles, "files": listed}
        self._place.put(f"{version}/{COMMIT}", json.dumps(words, indent=1))

    # --- what goes ----------------------------------------------------------------------------------------------------
    def _clear(self, version: PolicyVersion) -> None:
        """What is in the way of a new one: a damaged one of its name, and what another gang's failure has left. The one
        before may still be written by a slower gang; all are through with those before it, as steps commit together and
        a gang waits for its last save with the next."""
        older = [old for old in self._versions() if old < version][1:]
        dead = [old for old in older if not self._place.exists(f"{old}/{COMMIT}")]
        if self._place.exists(f"{version}/{COMMIT}") and not self._is_whole(version):
            dead.append(version)
        for old in dead:
            self._place.remove_all(str(old))

    def _prune(self, version: PolicyVersion) -> None:
        """Keeps the newest. All gangs are through with what is older than one that has its COMMIT."""
        try:
            committed = self._committed()
            for old in self._versions():
                if old in committed[max(1, self.keep) :] or (old < version and old not in committed):
                    self._place.remove_all(str(old))
            self._place.tidy()
        except OSError as error:
            logger.warning("old checkpoints are not removed", extra={"error": str(error)})

    def _unwritable(self, what: str, error: OSError) -> CheckpointUnwritable:
        owed: Owed = self._place.owed(error)
        return CheckpointUnwritable(f"{what} cannot be written", got=owed.got, wanted=owed.wanted, next=owed.next)
