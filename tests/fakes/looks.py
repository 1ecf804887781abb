"""How much work a queue's core does, counted and not timed: each look at a unit's entry in its book, each look-up of a
unit and of a consumer's credit.

with counted_looks() as looks:
    core = QueueCore()
    ...
    before = looks()
    core.match()
    assert looks() - before < 40
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from rlinf_api.names import WorkerId
from rlinf_worker.queues import book
from rlinf_worker.queues.matching import Consumers
from rlinf_worker.queues.units import UnitEntry


@contextmanager
def counted_looks() -> Iterator[Callable[[], int]]:
    """Of what is made within."""
    count = 0

    class Entry(UnitEntry):
        def __getattribute__(self, name: str) -> Any:
            nonlocal count
            count += 1
            return super().__getattribute__(name)

    class Entries(dict[Any, Any]):
        def __getitem__(self, key: Any) -> Any:
            nonlocal count
            count += 1
            return super().__getitem__(key)

        def __contains__(self, key: object) -> bool:
            nonlocal count
            count += 1
            return super().__contains__(key)

        def get(self, key: Any, default: Any = None) -> Any:
            nonlocal count
            count += 1
            return super().get(key, default)

    begin, credit_of = book.UnitBook.__init__, Consumers.credit_of

    def begin_counted(self: book.UnitBook, **more: Any) -> None:
        begin(self, **more)
        self.entries = Entries()

    def credit_counted(self: Consumers, consumer: WorkerId) -> int:
        nonlocal count
        count += 1
        return credit_of(self, consumer)

    with (
        mock.patch.object(book, "UnitEntry", Entry),
        mock.patch.object(book.UnitBook, "__init__", begin_counted),
        mock.patch.object(Consumers, "credit_of", credit_counted),
    ):
        yield lambda: count
