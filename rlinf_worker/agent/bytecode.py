"""Where workers keep compiled bytecode: beside the sources where it is or can be, else in the pod's cache folder.

Called by spawning.environ_of for each worker. Without bytecode the imports of a light worker take 0.6 s of CPU instead
of 0.15 s, and torch's 12 s: an image that was not compiled when it was built, with a read-only root, would pay that at
every start. PYTHONPYCACHEPREFIX alone is no answer, as Python then ignores what lies beside the sources. The folder is
bounded by what is installed: a file per module.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import grpc

import rlinf_worker
from rlinf_api import names

LOOKED_AT: Final = (rlinf_worker, grpc)  # our own installation, and a library of the image's


def environment(agents: Mapping[str, str]) -> dict[str, str]:
    """What a worker's environment has besides its agent's. Writing bytecode is allowed again where it was forbidden: a
    setting for people's checkouts, which costs a worker several times its start."""
    found = {"PYTHONDONTWRITEBYTECODE": ""}  # as if it were not set
    cache = agents.get(names.ENV_CACHE_DIR, "")
    if cache and "PYTHONPYCACHEPREFIX" not in agents and not all(map(_has_place, map(_source, LOOKED_AT))):
        found["PYTHONPYCACHEPREFIX"] = f"{cache}/bytecode"
    return found


def _source(module: object) -> Path:
    return Path(str(getattr(module, "__file__", "")))


def _has_place(source: Path) -> bool:
    """Its bytecode lies beside it, or may be written there."""
    compiled = Path(importlib.util.cache_from_source(str(source)))
    folder = compiled.parent if compiled.parent.is_dir() else source.parent
    return compiled.exists() or os.access(folder, os.W_OK)
