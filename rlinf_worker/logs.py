"""Log lines of driver, agents and workers: who says them, and what of them people read.

Called by `__main__`, once, and by a warm spare that becomes a worker. Not for: how a line looks (`rlinf_api.logs`), a
worker's log file (`agent/worker_log.py`) or what a person reads (the CLI's).

    {"time": "2026-05-01T10:00:00.123Z", "level": "INFO", "logger": "rlinf_worker.uplink.dialling",
     "message": "connected to the driver", "part": "agent", "job": "math", "pod": "math-gpu-0-a1", "driver_attempt": 2}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TextIO

from rlinf_api import logs, names


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
    """None where this is no line of rlinf_api.logs."""
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
    level = environ.get(names.ENV_LOG_LEVEL, "") or "INFO"
    logs.configure(who(part, environ), level=level, level_of=names.ENV_LOG_LEVEL, stream=stream)
