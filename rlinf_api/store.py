"""What a store of Kubernetes objects answers, an API server or the local one: a list, a change, and its refusals.

One name means the same on both back ends. Which HTTP status is which, the clients know.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from rlinf_api.errors import Conflict, RetryableError, RLinfError, UserError


class NotFound(RLinfError):
    """404: no such object (any more)."""


class AlreadyExists(Conflict):
    """409 on create: the name is taken; by whom is for the caller to find out (owner uid)."""


class Invalid(UserError):
    """400, 413, 422: the store will never take this object as it is; the message names the field."""


class Expired(RetryableError):
    """410: the list or watch cannot go on from where it stood; list, then watch from the list's resourceVersion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    items: list[dict[str, Any]]
    resource_version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What a watch says of one object; gone, it is as it was last."""

    type: Literal["ADDED", "MODIFIED", "DELETED"]
    object: dict[str, Any]
