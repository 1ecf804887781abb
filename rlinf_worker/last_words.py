"""How a process of ours ends: one failure, as exit code, as a sentence and as the JSON of its termination message.

Called by `__main__` for every part, and by the agent for its pod and for the words that a dead worker left. The kubelet
(and the local backend) reads RLINF_TERMINATION_LOG; an agent gives each worker a file of its own under that name.

>>> encode(Failure(role="env", worker=0, exit_code=64, reason="UserError", message="no such environment"))
b'{"role": "env", "worker": 0, "exit_code": 64, "reason": "UserError", "message": "no such environment"}'
"""

from __future__ import annotations

import dataclasses
import json
import logging
import sysconfig
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rlinf_api import names
from rlinf_api.errors import DeadlineExceeded, InvariantBroken, RetryableError, RLinfError, Stale, UserError
from rlinf_api.report import Failure, failure_of

logger = logging.getLogger(__name__)

_DEFAULTS = Failure()
_LIBRARIES: Final = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
_RUNTIME: Final = f"{Path(__file__).parent / 'runtime'}/"
_CHANNELS: Final = tuple(f"{Path(__file__).parent / name}/" for name in ("channels", "queues", "cycles"))
"""Whoever called these, or had the runtime call them, made the mistake that they refuse."""

_EXIT_CODES: Final[tuple[tuple[type[RLinfError], int], ...]] = (
    (UserError, names.EXIT_USER_ERROR),
    (Stale, names.EXIT_STALE),
    (RetryableError, names.EXIT_RETRYABLE),
    (DeadlineExceeded, names.EXIT_RETRYABLE),
    (InvariantBroken, names.EXIT_BUG),
)


def of(error: BaseException, *, unknown: int = names.EXIT_BUG) -> Failure:
    """What to say of an exception that ends this process, and where it was raised, unless it is one of our own, whose
    sentence says what to do; where a role called a channel that refused it. One that has no text is named by its class.
    `unknown`: exit code of what is not of our error tree: a bug in driver or agent, but a mere death of a worker."""
    exit_code = next((code for kind, code in _EXIT_CODES if isinstance(error, kind)), unknown)
    if isinstance(error, RLinfError):
        place = _call(error) if isinstance(error, UserError) else ""
        return Failure(exit_code=exit_code, reason=error.reason, message=str(error) + place)
    reason = type(error).__name__
    said = f"{reason}: {error}" if str(error) else reason
    return Failure(exit_code=exit_code, reason=reason, message=said + _place(error))


def _place(error: BaseException) -> str:
    """Where the innermost frame is that is no library's."""
    frames = traceback.extract_tb(error.__traceback__)
    return _at([frame for frame in frames if not frame.filename.startswith(_LIBRARIES)] or frames)


def _call(error: BaseException) -> str:
    """Where the frame is that called a channel."""
    frames = traceback.extract_tb(error.__traceback__)
    first = next((n for n, frame in enumerate(frames) if frame.filename.startswith(_CHANNELS)), 0)
    return _at([frame for frame in frames[:first] if not frame.filename.startswith(_RUNTIME)])


def _at(frames: Sequence[traceback.FrameSummary]) -> str:
    """` (/roles/my_role.py, line 12)`: the last one."""
    return f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""


def encode(
    failure: Failure, *, limit: int = names.MAX_TERMINATION_BYTES, also: Mapping[str, str | int] | None = None
) -> bytes:
    """JSON of the fields that say something, at most `limit` bytes: a longer message loses its middle. `also`: short
    fields beside the failure's own; `decode` leaves them out."""
    fields = {k: v for k, v in dataclasses.asdict(failure).items() if v != getattr(_DEFAULTS, k)} | dict(also or {})
    message = failure.message
    while len(text := json.dumps(fields).encode()) > limit and message:
        # Escapes make a character up to six bytes, so what is too much is found by trying.
        message = shorten(message, max(0, len(message) - max(16, (len(text) - limit) // 6)))
        fields["message"] = message
    return text


def shorten(text: str, limit: int) -> str:
    """The end of a failure names the cause and its beginning the place; the middle goes."""
    if len(text) <= limit:
        return text
    if limit < 16:
        return text[len(text) - limit :] if limit else ""
    head = limit // 4
    return f"{text[:head]} ... {text[len(text) - (limit - head - 5) :]}"


def decode(data: bytes) -> Failure | None:
    """None where this is no termination message of ours (a foreign program's, half a line)."""
    try:
        fields: Any = json.loads(data)
    except ValueError:
        return None
    return failure_of(fields) if isinstance(fields, dict) else None


def write(failure: Failure, path: str) -> None:
    """In place: in a pod the file is a mount of the kubelet's, which nothing can be renamed onto (EBUSY). A full or
    missing disk is logged, as the exit code still speaks; of half a message a reader makes none."""
    if not path:
        return
    try:
        Path(path).write_bytes(encode(failure))
    except OSError as error:
        logger.warning("termination message not written", extra={"path": path, "error": str(error)})
