"""What the driver leaves for people: metrics.jsonl (a line per step), events.jsonl, lineage.jsonl (which units entered
which step), profile.json (the newest profile), in the folder that the pod contract names. Without a folder (a cluster),
only the log and /metrics.

Each line goes to the kernel as one write, before the gang can hear of the commit: a driver that is killed leaves whole
lines and forgets no step. What its successor commits again stands in the file already and is not written twice. At a
bound NAME becomes NAME.1 in place of an older one, whose lines are counted as lost; a full disk costs lines, which the
next one counts, and nothing else.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rlinf_worker.bounded_file import AppendedFile
from rlinf_worker.driver.steps import Committed

logger = logging.getLogger(__name__)
MAX_FILE_BYTES: Final = 256 << 20  # 25,000 steps of 10 KB, the longest line of accounts, or a million of 250 bytes
LONGEST_LINE: Final = 64 << 10
CHUNK: Final = 1 << 20
NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT})

MAX_ACCOUNTS: Final = 64
"""Workers that a line names one by one, 10 KB in all; of more the roles' sums are written."""


def folded(accounts: Mapping[str, Mapping[str, float]]) -> Mapping[str, Mapping[str, float]]:
    if len(accounts) <= MAX_ACCOUNTS:
        return accounts
    roles: dict[str, dict[str, float]] = {}
    for worker, account in accounts.items():
        sums = roles.setdefault(worker.partition("/")[0], {})
        for kind, seconds in account.items():
            sums[kind] = round(sums.get(kind, 0.0) + seconds, 6)
    return roles


class JsonLines(AppendedFile):
    """Appends whole lines, or nothing. What a full disk does not take is lost and counted, and each line is tried: the
    first that goes in again has the field `gap`, which says how many are missing before it and why.

    On disk: NAME and NAME.1, each of `max_bytes` at most, whoever wrote it.
    """

    def __init__(self, path: Path, *, max_bytes: int = MAX_FILE_BYTES) -> None:
        super().__init__(path, limit=max_bytes)
        self.lost = 0  # lines, as there was no room
        self._gap: dict[str, Any] = {}  # of those that no line has told of yet
        try:
            self.open()
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            self._say(error)

    def last(self) -> Mapping[str, Any]:
        """The last line that an earlier driver wrote; empty without one."""
        lines = _end(self.path) or _end(self._older)  # it may have died between the two
        try:
            found = json.loads(lines[-1]) if lines else {}
        except ValueError:  # not a line of ours
            return {}
        return found if isinstance(found, dict) else {}

    def write(self, record: Mapping[str, Any]) -> None:
        line = (json.dumps({**record, "gap": self._gap} if self._gap else record, default=str) + "\n").encode()
        try:
            self.append(line)
        except OSError as error:  # a full disk must not stop the job that it is about
            self._lose(error)
            return
        if self._gap:
            logger.info("lines are written again", extra={"file": str(self.path), "lost": self._gap["lines"]})
            self._gap = {}

    def _make_room(self) -> None:
        gone = _count(self._older)
        super()._make_room()
        self.lost += gone
        if gone:
            logger.warning("the oldest lines made room", extra={"file": str(self._older), "lines": gone})

    def _lose(self, error: OSError) -> None:
        self.lost += 1
        if not self._gap:
            self._say(error)
            self._gap = {"lines": 0, "since": time.time(), "error": str(error)[:200]}
        self._gap["lines"] += 1

    def _say(self, error: OSError) -> None:
        extra = {"file": str(self.path), "error": str(error)}
        logger.warning("cannot write, lines are lost until it can be written again", extra=extra)

    def flush(self) -> None:
        """The end of the job: no line may follow to tell of those that are missing."""
        if self._gap:
            extra = {"file": str(self.path), "lost": self._gap["lines"], "error": self._gap["error"]}
            logger.warning("the last lines are missing", extra=extra)


def _end(path: Path) -> list[bytes]:
    """Its last lines; none where there is no file."""
    try:
        with path.open("rb") as file:
            file.seek(-min(LONGEST_LINE, file.seek(0, os.SEEK_END)), os.SEEK_END)
            return file.read(LONGEST_LINE).splitlines()
    except FileNotFoundError:
        return []


def _count(path: Path) -> int:
    """256 MiB take a tenth of a second, once per as many that are written."""
    try:
        with path.open("rb") as file:
            return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(CHUNK), b""))
    except FileNotFoundError:
        return 0


def _entered(keys: Sequence[str]) -> dict[str, Any]:
    """What a gang has trained on, so that two runs can be compared."""
    return {"units": len(keys), "digest": hashlib.sha256("\n".join(keys).encode()).hexdigest()[:16]}


class Output:
    """`Output("")` writes nothing."""

    def __init__(self, folder: str) -> None:
        names = ("metrics", "events", "lineage") if folder else ()
        self._profile = Path(folder, "profile.json") if folder else None
        self._lost_profiles = 0
        self._files = {name: JsonLines(Path(folder, f"{name}.jsonl")) for name in names}
        last = self._files["lineage"].last() if folder else {}
        self._written = (last.get("branch"), last.get("step"))

    def _write(self, name: str, record: Mapping[str, Any]) -> None:
        if name in self._files:
            self._files[name].write(record)

    def event(self, kind: str, message: str, **fields: Any) -> None:
        line = {"time": time.time(), "source": "driver", "event": kind, "message": message, **fields}
        self._write("events", line)

    def step(
        self,
        done: Committed,
        *,
        parts: Mapping[str, float],
        accounts: Mapping[str, Mapping[str, float]],
        idle: Mapping[str, float],
    ) -> None:
        """`parts`: what the workers reported of the step before, which has just become complete. `accounts`: where each
        worker's time of that step went. `idle`: share of it in which each slot was idle."""
        if self._written == (done.version.branch, done.step):
            return
        self._written = (done.version.branch, done.step)
        line = {"step": done.step, "branch": done.version.branch, "time": time.time(), "step_s": round(done.seconds, 6)}
        previous = {**parts, **({"account": folded(accounts)} if accounts else {}), **({"idle": idle} if idle else {})}
        self._write("metrics", {**line, **done.metrics, **({"previous": previous} if previous else {})})
        first, *others = done.keys
        entered = {gang: _entered(keys) for gang, keys in done.keys.items()}
        line = {"step": done.step, "branch": done.version.branch, **entered[first]}
        self._write("lineage", line | {gang: entered[gang] for gang in others})

    def profile(self, text: str) -> None:
        """The newest in place of the one before: a reader sees either whole. What finds no room is counted."""
        if self._profile is None:
            return
        partial = self._profile.with_name(f".{self._profile.name}")
        try:
            partial.write_text(text + "\n", encoding="utf-8")
            partial.replace(self._profile)
        except OSError as error:
            self._lost_profiles += 1
            logger.warning("a profile is not written", extra={"file": str(self._profile), "error": str(error)})

    @property
    def lost(self) -> dict[str, int]:
        """Lines that found no room, or had to make it, by file."""
        lines = {name: file.lost for name, file in self._files.items() if file.lost}
        return lines | ({"profile": self._lost_profiles} if self._lost_profiles else {})

    def flush(self) -> None:
        for file in self._files.values():
            file.flush()
