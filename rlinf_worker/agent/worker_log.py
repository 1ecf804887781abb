"""Where a worker's stdout and stderr go: a bounded file of its own, or the pod's log with the worker's name in front.

Fed by `supervisor.py` with what it reads from a worker's pipes; keeps the end of stderr for the worker's last words.
`SpanStore`, fed by `main.py`, is the file of the pod's spans.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from rlinf_worker import logs
from rlinf_worker.bounded_file import BoundedFile

logger = logging.getLogger(__name__)

_LONGEST_LINE: Final = 16 << 10
_LINES: Final = msgspec.json.Encoder()  # a thirteenth of what json takes: most of what recording costs an agent
ACCOUNT_EVERY: Final = 200  # writes: a line of 60 bytes per minute and worker


class Prefixed:
    """Whole lines to the pod's own log, each with its worker's name."""

    def __init__(self, worker: str, *, write: Callable[[bytes], object] | None = None) -> None:
        self._prefix = f"[{worker}] ".encode()
        self._write = write or (lambda data: os.write(sys.stderr.fileno(), data))
        self._rest = b""

    def write(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _LONGEST_LINE:
            lines.append(self._rest)
            self._rest = b""
        for line in lines:
            self._write(self._prefix + line + b"\n")

    def close(self) -> None:
        if self._rest:
            self.write(b"\n")


class WorkerLog:
    """`out` and `err` take what the worker wrote; `tail()` is the end of its stderr for people, from the first whole
    line on."""

    def __init__(self, sink: BoundedFile | Prefixed, *, keep: int) -> None:
        self._sink, self._keep = sink, keep
        self._tail = b""
        self._cut = False
        self._tap: bytearray | None = None

    def out(self, data: bytes) -> None:
        self._sink.write(data)

    def err(self, data: bytes) -> None:
        self._sink.write(data)
        if self._tap is not None:
            self._tap += data
        self._cut = self._cut or len(self._tail) + len(data) > self._keep
        self._tail = (self._tail + data)[-self._keep :]

    def tail(self) -> str:
        text = self._tail.decode(errors="replace")
        if self._cut and "\n" in text[:-1]:
            text = text.partition("\n")[2]
        return logs.readable(text)

    def tap(self) -> bytearray:
        """From now on stderr is also gathered here, until `untap`."""
        self._tap = bytearray()
        return self._tap

    def untap(self) -> None:
        self._tap = None

    def close(self) -> None:
        self._sink.close()


class SpanStore:
    """All spans of a pod's workers, for the timeline: `<output dir>/spans/<pod>.jsonl`, a JSON object per line with the
    fields of a Span; now and then, and at the end, one with `agent_instrument_s`, the CPU that this took so far, and
    what is missing."""

    def __init__(self, *, output_dir: str, pod: str, file_bytes: int) -> None:
        self.dropped = 0  # before they came here: a worker's recorder was full
        self._instrument_s = 0.0  # CPU, of `add`
        self._writes = self._told_dropped = 0
        path = Path(output_dir) / "spans" / f"{pod}.jsonl"
        self._file = BoundedFile(path, limit=file_bytes) if output_dir else None

    def add(self, spans: Sequence[Mapping[str, object]], *, dropped: int) -> None:
        before = time.thread_time()
        self.dropped += dropped
        if self._file and spans:
            self._file.write(_LINES.encode_lines(spans))
            self._writes += 1
            if self._writes % ACCOUNT_EVERY == 0:
                self._tell()
        self._instrument_s += time.thread_time() - before

    def _tell(self) -> None:
        if self._file:
            dropped, self._told_dropped = self.dropped - self._told_dropped, self.dropped
            line = {"agent_instrument_s": round(self._instrument_s, 6), "dropped": dropped}
            if self._file.dropped_bytes:
                line["lost_bytes"] = self._file.dropped_bytes  # so far, as the disk was full
            self._file.write(json.dumps(line).encode() + b"\n")

    def close(self) -> None:
        if self._file:
            if self._writes:
                self._tell()
            self._file.close()
