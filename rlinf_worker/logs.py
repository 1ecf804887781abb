"""Log lines of driver, agents and workers: one JSON object per line on stderr, with who says it.

Called by `__main__` only, once. Not for: a worker's log file (`agent/worker_log.py`) or what a person reads
(the CLI's).

    {"time": "2026-05-01T10:00:00.123Z", "level": "INFO", "logger": "rlinf_worker.agent.attach", "message": "attached",
     "part": "agent", "job": "math", "pod": "math-gpu-0-a1", "attempt": 1, "driver_attempt": 2}
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Mapping
from typing import Any, Final, TextIO

from rlinf_api import names

_PLAIN: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_LEVELS: Final = ("DEBUG", "INFO", "WARNING", "ERROR")


class JsonLines(logging.Formatter):
    """`who` comes with every line; a record's extra fields follow, and lose against `who` where the names are equal."""

    def __init__(self, who: Mapping[str, object]) -> None:
        super().__init__()
        self._who = dict(who)

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, object] = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **{key: value for key, value in vars(record).items() if key not in _PLAIN},
            **self._who,
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def readable(text: str) -> str:
    """The end of a process' stderr for people: what it printed, and of log lines only what they warn of.

    >>> readable('{"time": "t", "level": "INFO", "logger": "a", "message": "up"}\\nSegmentation fault')
    'Segmentation fault'
    """
    kept = []
    for line in text.splitlines():
        record = _record(line)
        if record is None:
            kept.append(line)
        elif record["level"] not in ("DEBUG", "INFO"):
            error = record.get("error", "")
            kept.append(f"{record['level'].lower()}: {record['message']}" + (f": {error}" if error else ""))
    return "\n".join(kept).strip()


def _record(line: str) -> dict[str, Any] | None:
    """None where this is no line of JsonLines."""
    if not line.startswith("{"):
        return None
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and {"level", "logger", "message"} <= record.keys() else None


def who(part: str, environ: Mapping[str, str]) -> dict[str, object]:
    """Fields of this process. A worker's attempt is its own, not its pod's."""
    fields: dict[str, object] = {"part": part}
    attempt = names.ENV_WORKER_ATTEMPT if part == "worker" else names.ENV_ATTEMPT
    pairs = (("job", names.ENV_JOB_NAME), ("pod", names.ENV_POD_NAME), ("worker", names.ENV_WORKER_ID))
    for key, variable in pairs:
        if value := environ.get(variable, ""):
            fields[key] = value
    if (number := environ.get(attempt, "")).isdigit():
        fields["attempt"] = int(number)
    return fields


def configure(part: str, environ: Mapping[str, str], *, stream: TextIO | None = None) -> None:
    """A level that does not exist is said in the first line, and INFO is used."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines(who(part, environ)))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    asked = environ.get(names.ENV_LOG_LEVEL, "") or "INFO"
    known = asked.upper() in _LEVELS
    root.setLevel(asked.upper() if known else "INFO")
    # At DEBUG asyncio and grpc say something about every poll, which buries ours.
    for noisy in ("asyncio", "grpc"):
        logging.getLogger(noisy).setLevel(max(root.level, logging.INFO))
    if not known:
        fields = {"got": asked, "wanted": ", ".join(_LEVELS)}
        logging.getLogger(__name__).warning("%s is not a level", names.ENV_LOG_LEVEL, extra=fields)
