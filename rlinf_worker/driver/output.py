"""What the driver leaves for people: metrics.jsonl (a line per step), events.jsonl, lineage.jsonl (which units entered
which step), in the folder that the pod contract names. Without a folder (a cluster), only the log and /metrics.

Each line goes to the kernel as one write, before the gang can hear of the commit: a driver that is killed leaves whole
lines and forgets no step. What its successor commits again stands in the file already and is not written twice. A file
stops growing at a bound, once said.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Final

from rlinf_worker.driver.steps import Committed

logger = logging.getLogger(__name__)
MAX_FILE_BYTES: Final = 256 << 20  # a million steps of 250 bytes
LONGEST_LINE: Final = 64 << 10


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


class JsonLines:
    def __init__(self, path: Path | None, *, max_bytes: int = MAX_FILE_BYTES) -> None:
        self._file: IO[str] | None = None
        self._left = max_bytes
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8")

    def last(self) -> Mapping[str, Any]:
        """The last line that an earlier driver wrote; empty without one."""
        if self._file is None:
            return {}
        with open(self._file.name, "rb") as file:
            file.seek(-min(LONGEST_LINE, os.fstat(file.fileno()).st_size), os.SEEK_END)
            lines = file.read().splitlines()
        try:
            found = json.loads(lines[-1]) if lines else {}
        except ValueError:  # not a line of ours
            return {}
        return found if isinstance(found, dict) else {}

    def write(self, record: Mapping[str, Any]) -> None:
        if self._file is None:
            return
        line = json.dumps(record, default=str) + "\n"
        if len(line) > self._left:
            logger.warning("file is full, further lines are not written", extra={"file": self._file.name})
            self.close()
            return
        self._left -= len(line)
        try:
            self._file.write(line)
            self._file.flush()
        except OSError as error:  # a full disk must not stop the job that it is about
            extra = {"file": self._file.name, "error": str(error)}
            logger.warning("cannot write, further lines are lost", extra=extra)
            self._file = None

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class Output:
    """`Output("")` writes nothing."""

    def __init__(self, folder: str) -> None:
        root = Path(folder) if folder else None
        self._metrics = JsonLines(root / "metrics.jsonl" if root else None)
        self._events = JsonLines(root / "events.jsonl" if root else None)
        self._lineage = JsonLines(root / "lineage.jsonl" if root else None)
        last = self._lineage.last()
        self._written = (last.get("branch"), last.get("step"))

    def event(self, kind: str, message: str, **fields: Any) -> None:
        self._events.write({"time": time.time(), "source": "driver", "event": kind, "message": message, **fields})

    def step(
        self,
        done: Committed,
        *,
        parts: Mapping[str, float],
        accounts: Mapping[str, Mapping[str, float]] | None = None,
    ) -> None:
        """`parts`: what the workers reported of the step before, which has just become complete. `accounts`: where each
        worker's time of that step went."""
        if self._written == (done.version.branch, done.step):
            return
        self._written = (done.version.branch, done.step)
        line = {"step": done.step, "branch": done.version.branch, "time": time.time(), "step_s": round(done.seconds, 6)}
        previous = {**parts, **({"account": folded(accounts)} if accounts else {})}
        self._metrics.write({**line, **done.metrics, **({"previous": previous} if previous else {})})
        digest = hashlib.sha256("\n".join(done.keys).encode()).hexdigest()[:16]
        self._lineage.write(
            {"step": done.step, "branch": done.version.branch, "units": len(done.keys), "digest": digest}
        )

    def flush(self) -> None:
        for file in (self._metrics, self._events, self._lineage):
            file.flush()
