"""Which place a uri names. The one module that imports a store's library, where one is asked for: it takes 10 MB."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Final
from urllib.parse import quote, unquote_to_bytes, urlsplit

from rlinf_api.errors import NotSupportedYet, UserError
from rlinf_worker.checkpoints.folder import Folder
from rlinf_worker.checkpoints.place import Place

OBJECTS: Final = ("s3://", "gs://")
WANTED: Final = "an absolute path, file:///path, s3://bucket/prefix or gs://bucket/prefix"


def of(uri: str, *, moved: Callable[[], None] = lambda: None) -> Place:
    if not uri.startswith(OBJECTS):
        return Folder(folder_of(uri), moved=moved)
    from rlinf_worker.checkpoints.objects import Objects

    return Objects(uri, moved=moved)


def folder_of(uri: str) -> Path:
    """The folder that a file uri or an absolute path names. Of a uri all counts: two folders must not become one, in
    which each job takes the other's checkpoints for its own."""
    parsed = urlsplit(uri)
    if parsed.scheme == "file" and parsed.netloc in ("", "localhost"):
        if left_out := next((c for c in uri if c in "#?"), ""):
            raise UserError(
                "the place for checkpoints is no uri of a folder", got=repr(uri), wanted=f"no {left_out!r} in it",
                next=f"write {left_out!r} as {quote(left_out)}, or the path alone",
            )  # fmt: skip
        path = Path(os.fsdecode(unquote_to_bytes(os.fsencode(parsed.path))))
    elif not parsed.scheme:
        path = Path(uri)
    else:
        raise NotSupportedYet(
            f"checkpoints cannot be kept by {parsed.scheme}://", got=repr(uri), wanted=WANTED,
            next="mount the storage as a volume and name its path in spec.checkpoint.uri",
        )  # fmt: skip
    if not path.is_absolute():
        raise UserError(
            "the place for checkpoints is no absolute path", got=repr(uri), wanted="file:///path or /path",
            next="write spec.checkpoint.uri so",
        )  # fmt: skip
    return path
