"""What the API server's refusals are called here: the classes whose names `objects.py` lists, made from its Status.
Those that a local store has too are in `rlinf_api.store`.

Messages carry the server's own sentence, cut; never a request's body and never a header (tokens, keys of Secrets).
"""

from __future__ import annotations

import json
from typing import Any, Final

from rlinf_api.errors import ClusterBusy, Conflict, RLinfError
from rlinf_api.store import AlreadyExists, Expired, Invalid, NotFound

MAX_SENTENCE: Final = 500


class Forbidden(RLinfError):
    """401, 403: RBAC, Pod Security, a quota, or an admission policy says no; that may change."""


class NamespaceTerminating(Forbidden):
    """403 on create: the namespace is being deleted, which nobody can take back."""


def of_answer(what: str, *, status: int, body: bytes, retry_after_s: float | None = None) -> RLinfError:
    """`what` names verb and object: 'create of Pod team/math-driver-a1'."""
    answer = _status_object(body)
    reason = str(answer.get("reason") or "")
    sentence = str(answer.get("message") or "")[:MAX_SENTENCE]
    got = " ".join(part for part in (str(status), reason, sentence) if part)
    if status == 404:
        return NotFound(what, got=got)
    if status == 409:
        if reason == "AlreadyExists":
            return AlreadyExists(what, got=got, next="read it and compare its owner's uid")
        return Conflict(what, got=got, next="read it again, decide again")
    if status == 410 or reason in ("Expired", "Gone"):
        return Expired(what, got=got, next="list again")
    if status == 429 or status >= 500:
        delay_s = 1.0 if retry_after_s is None else retry_after_s
        return ClusterBusy(what, got=got, next="it is tried again", delay_s=delay_s)
    if status == 403 and "NamespaceTerminating" in _causes(answer):
        return NamespaceTerminating(what, got=got, next="the namespace is being deleted; the job goes with it")
    if status in (401, 403):
        return Forbidden(what, got=got, next="look at the operator's Role, the namespace's policies and quotas")
    return Invalid(what, got=got)


def of_silence(what: str, error: BaseException) -> ClusterBusy:
    """No answer: a connection that broke, a deadline that ran out. What was asked may have been done."""
    name = type(error).__name__
    return ClusterBusy(what, got=f"no answer ({name}{f': {error}' if str(error) else ''})", next="it is tried again")


def may_be_done(error: BaseException | None) -> bool:
    """Whether a write that failed so may be done all the same: one of its tries had no answer, or one that says nothing
    of it (5xx). kube.py chains the last refusal to such a try; a 429 was not even looked at."""
    while isinstance(error, RLinfError):
        if isinstance(error, ClusterBusy) and not error.got.startswith("429"):
            return True
        error = error.__cause__
    return False


def _causes(answer: dict[str, Any]) -> set[str]:
    details = answer.get("details")
    listed = details.get("causes") if isinstance(details, dict) else None
    return {str(cause.get("reason")) for cause in listed or () if isinstance(cause, dict)}


def _status_object(body: bytes) -> dict[str, Any]:
    """A proxy in between may answer with a page instead."""
    try:
        found = json.loads(body)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
