"""A model of 70 billion numbers, in shards over 8 ranks and for 8 receivers: what each needs at once. Nothing of that
size is made: its shapes are real, its tensors views of a zero."""

import numpy as np
import pytest

from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.weights import edition as editions
from rlinf_worker.weights import planning, sending
from rlinf_worker.weights.arena import Arenas
from rlinf_worker.weights.channel import FILLERS
from rlinf_worker.weights.edition import Edition
from rlinf_worker.weights.layout import Sharding, box, shape_of
from rlinf_worker.weights.planning import TensorEntry, View
from rlinf_worker.weights.tensors import Shard

RANKS = 8
BY_ROWS, BY_COLUMNS = 0, 1


def layer(n):
    """(name, shape, how a tensor-parallel engine cuts it)."""
    yield f"{n}.q", (8192, 8192), BY_ROWS
    yield f"{n}.k", (1024, 8192), BY_ROWS
    yield f"{n}.v", (1024, 8192), BY_ROWS
    yield f"{n}.o", (8192, 8192), BY_COLUMNS
    yield f"{n}.gate", (28672, 8192), BY_ROWS
    yield f"{n}.up", (28672, 8192), BY_ROWS
    yield f"{n}.down", (8192, 28672), BY_COLUMNS


MODEL = [
    ("embedding", (128256, 8192), BY_ROWS), *(t for n in range(80) for t in layer(n)), ("head", (128256, 8192), BY_ROWS)
]  # fmt: skip


def over(shape, dim):
    return Sharding(shape=shape, mesh=(RANKS,), dims=(dim,))


CATALOG = tuple(TensorEntry(name, "float16", 2, over(shape, BY_ROWS)) for name, shape, _ in MODEL)
WHOLE = sum(2 * rows * columns for _, (rows, columns), _ in MODEL)


def view(rank):
    return View(rank, {name: over(shape, dim) for name, shape, dim in MODEL})


def test_each_rank_and_each_receiver_reserves_its_eighth():
    assert WHOLE > 140e9
    sources = [planning.source_memory(CATALOG, rank).nbytes for rank in range(RANKS)]
    receivers = [planning.view_memory(CATALOG, view(rank)).nbytes for rank in range(RANKS)]
    padding = planning.ALIGN * len(CATALOG)
    for nbytes in (*sources, *receivers):
        assert WHOLE / RANKS <= nbytes <= WHOLE / RANKS + padding


def test_what_travels_to_a_receiver_comes_from_every_rank_in_small_parts():
    parts = planning.plan(CATALOG, view(3), sources=RANKS, part_bytes=editions.PART_BYTES)
    by_source = planning.by_source(parts)
    assert sorted(by_source) == list(range(RANKS))
    assert sum(part.nbytes for part in parts) == WHOLE // RANKS
    assert max(part.nbytes for part in parts) == editions.PART_BYTES
    # A message goes as soon as it has WINDOW_BYTES: each receiver has one part more than that on its way from a rank.
    assert sending.WINDOW_BYTES + editions.PART_BYTES <= 12 << 20


@pytest.mark.parametrize("rank", [0, 7])
def test_beside_its_eighth_a_publisher_has_one_tensor_of_each_thread_on_the_host(rank):
    """Zeros that lie nowhere, as the tensors of a device do not lie on the host: each is copied when its turn comes."""
    values, largest = {}, 0
    for name, shape, _ in layer(0):
        mine = shape_of(box(over(shape, BY_ROWS), rank))
        values[name] = Shard(np.broadcast_to(np.zeros((), "f2"), mine), over(shape, BY_ROWS))
        largest = max(largest, 2 * mine[0] * mine[1])
    edition = Edition(PolicyVersion(0, 1), values, rank=rank, part_bytes=editions.PART_BYTES)
    edition.lie_in(Arenas(None).take(edition.memory.nbytes))
    most = 0

    def look():
        nonlocal most
        assert edition._opened is not None
        most = max(most, edition._opened.nbytes)

    edition.fill(filled=look)
    assert edition._opened is not None
    assert edition._opened.nbytes == 0
    assert largest / 2 < most <= largest + editions.PART_BYTES, "the next tensor begins within a part"
    assert FILLERS * largest < edition.memory.nbytes
