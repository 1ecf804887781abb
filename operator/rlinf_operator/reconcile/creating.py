"""Makes the pods of one job: few at first, more with each that was made, and no more once somebody says stop.

| task | consumes | waits for | unblocked by |
|---|---|---|---|
| one per pod, at most AT_ONCE | - | its create | the API server; cancel by make() |

A job of thousands of pods would otherwise stand in line for all connections at once: those at its end run into the
deadline of their call, and each pod of another job waits behind them. Where the first pod is refused, the others would
be refused as well, each with a call.

| a create says | follows |
|---|---|
| made | one more at once, up to AT_ONCE and to the job's share of TOGETHER: 1, 2, 4, ... in each round trip |
| a full quota, a busy API server, a namespace that goes | no other is tried |
| anything else: a webhook, a template that is wrong | no other of its pool is tried, as they have one template |

A pass makes so many that no other job waits long for it (decide.py); the rest are for the next one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from rlinf_api import names
from rlinf_api.errors import InvariantBroken, RetryableError, RLinfError
from rlinf_operator.clients import objects
from rlinf_operator.clients.api_errors import NamespaceTerminating
from rlinf_operator.manifests.metadata import Manifest

AT_ONCE: Final = 16
"""Pods of one job on their way at once. 16: a third of the connections, so that no job has them all."""
TOGETHER: Final = 32
"""Pods of all jobs on their way at once, shared alike by those that make some. 32: two thirds of the connections, so
that no read and no status waits for one; a small API server is busy with fewer."""


class Makers:
    """Jobs that make pods at this moment. Each has the same share, or one of thousands would take from ten small ones
    beside it as much as it has pods on their way: they would wait for it, and it not for them."""

    def __init__(self) -> None:
        self._jobs = 0

    @property
    def share(self) -> int:
        """Pods of one job on their way at once."""
        return max(1, min(AT_ONCE, TOGETHER // max(1, self._jobs)))

    def __enter__(self) -> None:
        self._jobs += 1

    def __exit__(self, *_: object) -> None:
        self._jobs -= 1


@dataclass(slots=True, kw_only=True)
class PodsMade:
    """What became of pods, by name."""

    refused: dict[str, RLinfError] = field(default_factory=dict)
    untried: list[str] = field(default_factory=list)
    """For what was refused before."""
    rest: list[str] = field(default_factory=list)
    """For the next pass."""

    @property
    def over_quota(self) -> bool:
        return any(map(objects.is_over_quota, self.refused.values()))


async def make(
    pods: Sequence[Manifest],
    create: Callable[[Manifest], Awaitable[None]],
    *,
    makers: Makers,
    rest: Sequence[str] = (),
) -> PodsMade:
    """In their order. A failure that is a bug of ours is raised, when nothing is on its way any more. `rest`: names of
    those that the next pass makes."""
    made = PodsMade(rest=list(rest))
    waiting, under_way = deque(pods), dict[asyncio.Task[None], Manifest]()
    window, stopped, broken_pools, bug = 1, False, set[str](), None
    with makers:
        try:
            while under_way or (waiting and not stopped):
                while waiting and not stopped and len(under_way) < min(window, makers.share):
                    pod = waiting.popleft()
                    if _pool(pod) in broken_pools:
                        made.untried.append(_name(pod))
                    else:
                        under_way[asyncio.create_task(_made(create, pod), name=f"operator: create {_name(pod)}")] = pod
                if not under_way:
                    break
                done, _ = await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    pod, error = under_way.pop(task), task.exception()
                    if error is None:
                        window = min(AT_ONCE, window + 1)
                    elif isinstance(error, RLinfError) and not isinstance(error, InvariantBroken):
                        made.refused[_name(pod)] = error
                        stopped = stopped or _stops(error)
                        broken_pools.add(_pool(pod))
                    else:
                        stopped, bug = True, bug or error
        finally:
            for task in under_way:  # of a pass that is cancelled
                task.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)
    if bug is not None:
        raise bug
    made.untried += [_name(pod) for pod in waiting]
    if stopped:
        made.untried, made.rest = made.untried + made.rest, []
    return made


async def _made(create: Callable[[Manifest], Awaitable[None]], pod: Manifest) -> None:
    await create(pod)


def _stops(error: RLinfError) -> bool:
    """Whether the next pod would hear the same, whatever it is made from."""
    return objects.is_over_quota(error) or any(
        isinstance(one, RetryableError | NamespaceTerminating) for one in (error, error.__cause__)
    )


def _name(pod: Manifest) -> str:
    return str(pod["metadata"]["name"])


def _pool(pod: Manifest) -> str:
    """Empty: the driver's."""
    return str(pod["metadata"]["labels"].get(names.LABEL_POOL, ""))
