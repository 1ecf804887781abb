"""Log lines of every process: one JSON object per line on stderr, with who says it.

Called by each part's `__main__`, once; `rlinf_worker/logs.py` says who a worker is. Nothing else configures logging.

    configure({"part": "operator", "replica": "rlinf-operator-0"}, level="INFO")
    {"time": "2026-05-01T10:00:00.123Z", "level": "INFO", "logger": "rlinf_operator.reconcile.loop", "message": "...",
     "job": "team/math", "part": "operator", "replica": "rlinf-operator-0"}
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Mapping
from typing import Final, TextIO

_PLAIN: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
LEVELS: Final = ("DEBUG", "INFO", "WARNING", "ERROR")


class JsonFormatter(logging.Formatter):
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


def configure(
    who: Mapping[str, object],
    *,
    level: str,
    level_of: str = "the log level",
    stream: TextIO | None = None,
    noisy: Mapping[str, int] | None = None,
) -> None:
    """A level that does not exist is said in the first line, by what it was set in (`level_of`), and INFO is used.
    `noisy`: least level of a logger."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(who))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    known = level.upper() in LEVELS
    root.setLevel(level.upper() if known else "INFO")
    # At DEBUG asyncio and grpc say something about every poll, which buries ours.
    for name, least in ({"asyncio": logging.INFO, "grpc": logging.INFO} | dict(noisy or {})).items():
        logging.getLogger(name).setLevel(max(root.level, least))
    if not known:
        fields = {"got": level, "wanted": ", ".join(LEVELS)}
        logging.getLogger(__name__).warning("%s is none that exists, INFO is used", level_of, extra=fields)
