"""Standard output as a thing that a run can do without: a full disk under it, a reader that has gone, letters that the
terminal has not. What it does not take is lost; what it was to tell is in the work dir.

    said = Losable(sys.stdout); print("step 3", file=said); said.end()

For: `rljob run`, whose job goes on for hours. Not for: commands whose only fruit is what they print.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from typing import IO


def any_letters(stream: IO[str] | None) -> None:
    """A letter that the stream's encoding lacks is written as \\xfc instead of raising, as on standard error."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")


class Losable:
    """Has of a stream what print() and a progress line need; raises nothing that the stream's other end has caused."""

    def __init__(self, stream: IO[str] | None) -> None:
        """None is Python's for a descriptor that was closed before the start (`>&-`)."""
        any_letters(stream)
        self._stream = stream
        self.lost: OSError | None = None
        """Why something that was written did not go out, the newest reason."""

    def isatty(self) -> bool:
        return self._stream is not None and self._stream.isatty()

    def write(self, text: str) -> int:
        self._try(lambda stream: stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(lambda stream: stream.flush())

    def end(self) -> None:
        """The last flush. Python flushes once more when it ends, and turns the exit code into 120 where that fails: it
        finds /dev/null then."""
        if self._try(lambda stream: stream.flush()):
            return
        nowhere = os.open(os.devnull, os.O_WRONLY)
        self._try(lambda stream: os.dup2(nowhere, stream.fileno()))
        os.close(nowhere)

    def _try(self, act: Callable[[IO[str]], object]) -> bool:
        if self._stream is None:
            return True
        try:
            act(self._stream)
        except OSError as error:
            self.lost = error
            return False
        return True
