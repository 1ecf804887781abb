"""Which of the listed namespaces the API server refuses: one that was deleted takes the operator's Role there along.
The others are served on; this one is asked again and again, and served once it and the Role are back.

| asks | where it is refused | where it answers again |
|---|---|---|
| a Reflector, per kind | `refused`; asks again within its longest pause | `served` |

As long as one kind is refused nothing of the namespace is read (`check`): its copies stand still, and what is missing
in them would be taken for gone. An operator of all namespaces has no such part: what refuses it a kind refuses it all.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from rlinf_api.errors import RetryableError, RLinfError
from rlinf_operator.clients.api_errors import Forbidden
from rlinf_operator.metrics import Metrics

logger = logging.getLogger(__name__)


class NamespaceRefused(RetryableError):
    """The namespace is away, or the operator's rights there are."""


class Refusals:
    def __init__(self, *, metrics: Metrics, on_change: Callable[[str], None] = lambda namespace: None) -> None:
        """`on_change`: called with a namespace that is refused, or served, from now on."""
        self.on_change = on_change
        self._metrics = metrics
        self._kinds: dict[str, set[str]] = {}
        self._changed = asyncio.Event()

    def refused(self, namespace: str | None, kind: str, error: RLinfError) -> bool:
        """Whether the error is such a refusal: 403, of one namespace. 401 is about the token, and so about all."""
        if namespace is None or not isinstance(error, Forbidden) or not error.got.startswith("403"):
            return False
        kinds = self._kinds.setdefault(namespace, set())
        is_first = not kinds
        kinds.add(kind)
        self._metrics.refused.labels(namespace=namespace, kind=kind).set(1)
        if is_first:
            logger.warning("namespace refused", extra={"namespace": namespace, "kind": kind, "error": str(error)})
            self._tell(namespace)
        return True

    def served(self, namespace: str | None, kind: str) -> None:
        if namespace is None or kind not in (kinds := self._kinds.get(namespace, set())):
            return
        kinds.discard(kind)
        self._metrics.refused.remove(namespace, kind)
        if not kinds:
            del self._kinds[namespace]
            logger.warning("namespace served again", extra={"namespace": namespace})
            self._tell(namespace)

    def has(self, namespace: str | None, kind: str) -> bool:
        return namespace is not None and kind in self._kinds.get(namespace, ())

    def refuses(self, namespace: str | None) -> bool:
        return namespace in self._kinds

    async def changed(self) -> None:
        """Until a namespace is refused, or served, from then on."""
        self._changed.clear()
        await self._changed.wait()

    def check(self, namespace: str | None) -> None:
        """NamespaceRefused where it is."""
        if self.refuses(namespace):
            raise NamespaceRefused(
                f"namespace {namespace} refuses the operator", got="403",
                wanted="the namespace, and in it the operator's Role",
                next="make both again, or take it out of watchNamespaces",
            )  # fmt: skip

    def _tell(self, namespace: str) -> None:
        self._changed.set()
        self.on_change(namespace)
