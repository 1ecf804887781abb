"""What the planner says must move is what numpy's slices say, for any division at both ends."""

import doctest

import hypothesis.strategies as st
import msgspec
import numpy
import pytest
from hypothesis import given, settings

from rlinf_api.errors import UserError
from rlinf_worker.weights import layout, planning
from rlinf_worker.weights.layout import Sharding
from rlinf_worker.weights.planning import WHOLE, TensorEntry, View


@st.composite
def shardings(draw, shape, *, mesh=None):
    mesh = mesh or tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=2)))
    choice = st.sampled_from([None, *range(len(shape))])
    return Sharding(shape=shape, mesh=mesh, dims=tuple(draw(choice) for _ in mesh))


@st.composite
def cases(draw):
    """(catalog, sources, view): the same mesh for all tensors at each end, as a gang has."""
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=2)))
    theirs = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=2)))
    catalog, wanted = [], {}
    for n in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
        itemsize = draw(st.sampled_from([1, 2, 4, 8]))
        catalog.append(TensorEntry(f"t{n}", f"u{itemsize}", itemsize, draw(shardings(shape, mesh=mesh))))
        if draw(st.booleans()):
            wanted[f"t{n}"] = draw(shardings(shape, mesh=theirs))
    ranks = int(numpy.prod(theirs))
    return tuple(catalog), int(numpy.prod(mesh)), View(draw(st.integers(0, ranks - 1)), wanted)


def sliced(array, box):
    return array[tuple(slice(a, b) for a, b in box)]


def filled(catalog, memory, arrays):
    """A rank's memory with its shards in it."""
    held = bytearray(memory.nbytes)
    for entry, box, at in zip(catalog, memory.boxes, memory.offsets, strict=True):
        raw = numpy.ascontiguousarray(sliced(arrays[entry.name], box)).tobytes()
        held[at : at + len(raw)] = raw
    return held


@given(case=cases(), part_bytes=st.integers(1, 300), seed=st.integers(0, 99))
@settings(deadline=None)
def test_any_shards_reach_any_other_shards_byte_for_byte(case, part_bytes, seed):
    catalog, sources, view = case
    random = numpy.random.default_rng(seed)
    arrays = {
        e.name: random.integers(0, 255, (*e.sharding.shape, e.itemsize), "u1").view(e.dtype)[..., 0] for e in catalog
    }
    held = [filled(catalog, planning.source_memory(catalog, rank), arrays) for rank in range(sources)]
    want = planning.view_memory(catalog, view)
    got, writes = bytearray(want.nbytes), bytearray(want.nbytes)
    for part in planning.plan(catalog, view, sources=sources, part_bytes=part_bytes):
        assert 0 < part.nbytes <= part_bytes
        for there, here, n in part.runs:
            got[here : here + n] = held[part.source][there : there + n]
            for at in range(here, here + n):
                writes[at] += 1
    assert got == filled(catalog, want, arrays)
    assert max(writes, default=0) <= 1, "a byte came twice"


@settings(deadline=None)
@given(shape=st.lists(st.integers(0, 40), min_size=1, max_size=1).map(tuple), ranks=st.integers(1, 9))
def test_pieces_are_cut_as_torch_cuts_them(shape, ranks):
    torch = pytest.importorskip("torch", reason="the rule is torch.chunk's")
    sharding = Sharding(shape=shape, mesh=(ranks,), dims=(0,))
    sizes = [layout.shape_of(layout.box(sharding, rank))[0] for rank in range(ranks)]
    chunks = [len(c) for c in torch.zeros(shape).chunk(ranks)]
    assert [n for n in sizes if n] == [n for n in chunks if n]


def test_replicas_share_the_work():
    catalog = tuple(TensorEntry(f"t{n}", "f4", 4, Sharding(shape=(100,), mesh=(4,), dims=(None,))) for n in range(8))
    given_by = [0] * 4
    for part in planning.plan(catalog, WHOLE, sources=4, part_bytes=100):
        given_by[part.source] += part.nbytes
    assert given_by == [800] * 4


def test_one_source_and_whole_tensors_are_the_same_memory_at_both_ends():
    catalog = (TensorEntry("w", "f4", 4, Sharding(shape=(3, 5))), TensorEntry("b", "f8", 8, Sharding(shape=(7,))))
    assert planning.is_identity(catalog, WHOLE, sources=1)
    assert all(a == b for p in planning.plan(catalog, WHOLE, sources=1, part_bytes=50) for a, b, _ in p.runs)
    assert not planning.is_identity(catalog, View(0, {"w": Sharding(shape=(3, 5), mesh=(2,), dims=(1,))}), sources=1)


def test_each_tensor_begins_at_a_multiple_of_64():
    catalog = tuple(TensorEntry(f"t{n}", "u1", 1, Sharding(shape=(size,))) for n, size in enumerate((1, 65, 64, 0, 3)))
    memory = planning.source_memory(catalog, 0)
    assert (memory.offsets, memory.nbytes) == ((0, 64, 192, 256, 256), 320)


def test_a_column_of_a_matrix_is_a_run_in_each_row():
    catalog = (TensorEntry("w", "f4", 4, Sharding(shape=(4096, 64))),)
    view = View(1, {"w": Sharding(shape=(4096, 64), mesh=(2,), dims=(1,))})
    (part,) = planning.plan(catalog, view, sources=1, part_bytes=1 << 20)
    assert part.runs == tuple((256 * n + 128, 128 * n, 128) for n in range(4096))


def test_a_view_of_another_shape_is_refused_with_both():
    catalog = (TensorEntry("w", "f4", 4, Sharding(shape=(4, 6))),)
    view = View(0, {"w": Sharding(shape=(4, 8), mesh=(2,), dims=(1,))})
    with pytest.raises(UserError, match=r"view of w is of another tensor: got shape \(4, 8\), wanted \(4, 6\)"):
        planning.plan(catalog, view, sources=1, part_bytes=100)


def test_sources_that_lack_something_are_found_before_anything_moves():
    catalog = (TensorEntry("w", "f4", 4, Sharding(shape=(4, 6), mesh=(2,), dims=(0,))),)
    with pytest.raises(UserError, match="got 48 bytes, wanted 96"):
        planning.plan(catalog, WHOLE, sources=1, part_bytes=100)


def test_a_sharding_that_cannot_be_is_refused():
    with pytest.raises(UserError, match="a sharding that cannot be"):
        Sharding(shape=(4,), mesh=(2,), dims=(1,))


@pytest.mark.parametrize("module", [layout, planning])
def test_the_examples_are_true(module):
    assert doctest.testmod(module).failed == 0


def test_a_dense_array_is_row_major():
    found = {shape: layout.strides(shape) for shape in [(), (5,), (2, 3), (2, 3, 4), (4, 0, 2)]}
    assert found == {(): (), (5,): (1,), (2, 3): (3, 1), (2, 3, 4): (12, 4, 1), (4, 0, 2): (0, 2, 1)}


def test_a_rank_is_a_source_of_its_own_bytes_cut_into_parts():
    """Two ranks: `w` is cut between them, `empty` has no bytes, both have all of `b`."""
    entries = (
        TensorEntry("w", "f4", 4, Sharding(shape=(4, 8), mesh=(2,), dims=(0,))),
        TensorEntry("empty", "f4", 4, Sharding(shape=(0,), mesh=(2,), dims=(None,))),
        TensorEntry("b", "f4", 4, Sharding(shape=(2,), mesh=(2,), dims=(None,))),
    )
    source = planning.source_of(msgspec.msgpack.encode(entries), 1, part_bytes=40)
    assert (source.sources, source.is_whole, source.starts, source.tensors) == (2, False, (0, 64), (0, 2))
    assert source.memory == planning.source_memory(entries, 1)
    assert [(part.source, part.runs) for part in source.parts] == [(0, ((0, 0, 40),)), (0, ((40, 40, 32),))]


def test_a_rank_without_tensors_is_a_source_of_nothing():
    source = planning.source_of(msgspec.msgpack.encode(()), 0, part_bytes=40)
    assert (source.sources, source.parts, source.starts, source.tensors) == (1, [], (), ())
