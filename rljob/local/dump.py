"""`objects/*.yaml`: what the API server would hold, for people and bug reports. Secrets' values never leave memory.

For: the runner, which calls `Dump.write` after each pass. Not for: restoring a store; resume goes by checkpoints.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import yaml

from rljob.local.objects import Manifest, clone, meta

HEADER = "# A view of one object of `rljob run`: rewritten on change, never read back.\n"
# The C one is ten times faster, and absent on some builds.
_Dumper: type = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


def redacted(obj: Manifest) -> Manifest:
    """
    >>> redacted({"kind": "Secret", "data": {"tls.key": "c2VjcmV0"}})
    {'kind': 'Secret', 'data': {'tls.key': '<redacted: 8 characters>'}}
    """
    if obj.get("kind") != "Secret":
        return obj
    copy: Manifest = clone(obj)
    copy["data"] = {key: f"<redacted: {len(value)} characters>" for key, value in (obj.get("data") or {}).items()}
    return copy


class Dump:
    """Knows what it wrote last, so a pass that changed one pod writes one file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._written: dict[Path, str] = {}

    def write(self, objects: Iterable[Manifest]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        present: dict[Path, str] = {}
        for obj in objects:
            metadata = meta(obj)
            path = self.folder / f"{obj['kind'].lower()}-{metadata['namespace']}-{metadata['name']}.yaml"
            present[path] = metadata["uid"] + metadata["resourceVersion"]
            if self._written.get(path) != present[path]:
                write_atomically(path, HEADER + yaml.dump(redacted(obj), Dumper=_Dumper, sort_keys=False))
        for path in self.folder.glob("*.yaml"):
            if path not in present and path.read_text(encoding="utf-8").startswith(HEADER):
                path.unlink()
        self._written = present


def write_atomically(path: Path, text: str) -> None:
    """A reader sees the old text or the new one, never half of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except OSError:  # the half that a full disk took makes it no emptier
        temporary.unlink(missing_ok=True)
        raise
