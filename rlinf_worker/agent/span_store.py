"""Spans of a pod's workers: the last of them in memory, and all of them (within a bound) in a file for the timeline.

Fed by `slots.py`. The file is `<output dir>/spans/<pod>.jsonl`, a JSON object per line with the fields of a Span.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

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


class SpanStore:
    def __init__(self, *, ring: int, output_dir: str, pod: str, file_bytes: int) -> None:
        self.last: deque[PodSpan] = deque(maxlen=ring)
        self.dropped = 0
        """Before they came here: a worker's recorder was full."""
        path = Path(output_dir) / "spans" / f"{pod}.jsonl"
        self._file = BoundedFile(path, limit=file_bytes) if output_dir else None

    def add(self, spans: Sequence[PodSpan], *, dropped: int) -> None:
        self.last.extend(spans)
        self.dropped += dropped
        if self._file and spans:
            self._file.write(b"".join(json.dumps(asdict(span)).encode() + b"\n" for span in spans))

    def close(self) -> None:
        if self._file:
            self._file.close()
