"""Importing a module of the user's own, and making what it defines: what is wrong in one sentence, whatever it raises.

For: the seams at which a manifest names code (flow, role, environment, reward, loss). Of a module of ours only what its
image lacks is told so; anything else is a bug. What can be known before the first step fails the job at once, so a
module that does not import is a UserError; only what the machine refuses (a disk that does not answer, no memory) is
tried again, and anything once the job has begun: see LoadFailed.
"""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final, TypeVar

from rlinf_api.errors import RetryableError, RLinfError, UserError

T = TypeVar("T")
CORRECT: Final = "correct it; its stack is in the log"


class LoadFailed(UserError):
    """It raised what we cannot judge. The user's to repair, as long as it was never loaded in this job: later a card
    that still holds memory, or a licence that is out, may raise the same (driver/workforce.py, driver/main.py)."""


def module(name: str, *, what: str, next: str, ours: bool = False) -> ModuleType:
    """`what` names the field's value in the sentence, `next` says where a module that is not there belongs."""
    what = f"{what} cannot be imported"
    if not ours:
        return call(lambda: importlib.import_module(name), what=what, next=next)
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise LoadFailed(what, got=told(error), next=next) from error


def function(name: str, *, what: str, field: str) -> Callable[..., Any]:
    """A user's `module:function`, which `field` of the manifest names; LoadFailed where it is not there."""
    module_name, _, attribute = name.partition(":")
    remedy = "put it into this pool's image, or its folder on PYTHONPATH"
    found = getattr(module(module_name, what=f"{what} {name!r}", next=remedy), attribute, None)
    if not callable(found):
        raise LoadFailed(
            f"{what} {name!r} is not there", got=f"{module_name} has no function {attribute!r}", next=f"correct {field}"
        )
    theirs: Callable[..., Any] = found
    return theirs


def call(theirs: Callable[[], T], *, what: str, next: str, correct: str = CORRECT) -> T:
    """What it returns. Errors of our tree pass, any other is told: `next` is the remedy where something is missing,
    `correct` elsewhere."""
    try:
        return theirs()
    except RLinfError:
        raise
    except (Exception, SystemExit) as error:  # the user's code: anything may come, sys.exit at import included
        got, missing = told(error), isinstance(error, ImportError | FileNotFoundError)
        if isinstance(error, OSError | MemoryError) and not missing:
            raise RetryableError(what, got=got, next="it is tried again; make room, or repair the disk") from error
        raise LoadFailed(what, got=got, next=next if missing else correct) from error


def told(error: BaseException) -> str:
    """`NameError: name 'gym' is not defined (my_envs.py, line 3)`; a SyntaxError says its place itself."""
    text = (str(error).splitlines() or [""])[0][:300]
    said = f"{type(error).__name__}: {text}" if text else type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, SyntaxError) or not frames or "importlib" in frames[-1].filename:
        return said
    return f"{said} ({frames[-1].filename}, line {frames[-1].lineno})"
