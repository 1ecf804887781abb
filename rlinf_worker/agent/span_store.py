"""Spans of a pod's workers, in a file for the timeline: all of them, within a bound.

Fed by `slots.py`. The file is `<output dir>/spans/<pod>.jsonl`, a JSON object per line with the fields of a Span; now
and then, and at the end, one with `agent_instrument_s`, the CPU that this took so far, and what is missing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from rlinf_worker.agent.worker_log import BoundedFile


@dataclass(frozen=True, slots=True, kw_only=True)
class PodSpan:
    slot: str
    role: str
    worker: str
    kind: str
    step: int
    version: int
    t0: float
    t1: float


_LINES: Final = msgspec.json.Encoder()  # a thirteenth of what json takes: most of what recording costs an agent
ACCOUNT_EVERY: Final = 200  # writes: a line of 60 bytes per minute and worker


class SpanStore:
    def __init__(self, *, output_dir: str, pod: str, file_bytes: int) -> None:
        self.dropped = 0
        """Before they came here: a worker's recorder was full."""
        self.instrument_s = 0.0
        """CPU seconds of `add`."""
        self._writes = self._told_dropped = 0
        path = Path(output_dir) / "spans" / f"{pod}.jsonl"
        self._file = BoundedFile(path, limit=file_bytes) if output_dir else None

    def add(self, spans: Sequence[PodSpan], *, dropped: int) -> None:
        before = time.thread_time()
        self.dropped += dropped
        if self._file and spans:
            self._file.write(_LINES.encode_lines(spans))
            self._writes += 1
            if self._writes % ACCOUNT_EVERY == 0:
                self._tell()
        self.instrument_s += time.thread_time() - before

    def _tell(self) -> None:
        if self._file:
            dropped, self._told_dropped = self.dropped - self._told_dropped, self.dropped
            line = {"agent_instrument_s": round(self.instrument_s, 6), "dropped": dropped}
            if self._file.dropped_bytes:
                line["lost_bytes"] = self._file.dropped_bytes  # so far, as the disk was full
            self._file.write(json.dumps(line).encode() + b"\n")

    def close(self) -> None:
        if self._file:
            if self._writes:
                self._tell()
            self._file.close()
