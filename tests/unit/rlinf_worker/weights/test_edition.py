import threading
import time

import hypothesis.strategies as st
import numpy
import pytest
from hypothesis import given, settings

from rlinf_api.errors import UserError
from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.links.errors import PayloadError
from rlinf_worker.weights import copying, layout, planning
from rlinf_worker.weights import edition as editions
from rlinf_worker.weights.arena import Arenas
from rlinf_worker.weights.edition import Assembly, Edition, SchemaChanged, WeightsCorrupt
from rlinf_worker.weights.layout import Sharding
from rlinf_worker.weights.planning import View
from rlinf_worker.weights.tensors import Shard

V1 = PolicyVersion(0, 1)


def tensors(scale: float = 1.0):
    return {
        "w": numpy.arange(30_000, dtype="f4").reshape(100, 300) * scale,
        "b": numpy.ones(3, "f8"),
        "empty": numpy.zeros((0, 4), "f4"),
        "count": 7,
        "half": numpy.linspace(0, 1, 64, dtype="f2"),
    }


def make(values, *, rank=0, part_bytes=1 << 22):
    edition = Edition(V1, values, rank=rank, part_bytes=part_bytes)
    edition.lie_in(Arenas(None).take(edition.memory.nbytes))
    edition.fill()
    edition.finish()
    return edition


def begin(edition, *, view=planning.RAW_WHOLE):
    assembly = Assembly(
        V1, catalog=edition.catalog, view=view, plain=edition.plain, sources=edition.sources,
        part_bytes=edition.part_bytes,
    )  # fmt: skip
    assembly.lie_in(Arenas(None).take(assembly.memory.nbytes))
    return assembly


def send(edition, assembly, *, damage: int | None = None):
    view = assembly.view
    for index in edition.numbers(view):
        data = [bytes(b) for b in editions.buffers_of(edition.arena.memory, edition.ranges(view, index))]
        if index == damage:
            data[0] = bytes([data[0][0] ^ 1]) + data[0][1:]
        assembly.add(index, edition.hash_of(view, index), iter(memoryview(d) for d in data))
    hashes = [edition.hash_of(view, i) for i in edition.numbers(view)]
    assembly.end(edition.rank, editions.combine(edition.catalog, edition.plain, hashes))


@pytest.mark.parametrize("part_bytes", [1, 1000, 1 << 22])
def test_a_version_arrives_as_it_was_made_in_any_number_of_parts(part_bytes):
    values = {name: v[:4] if name == "w" and part_bytes == 1 else v for name, v in tensors().items()}
    edition = make(values, part_bytes=part_bytes)
    assembly = begin(edition)
    send(edition, assembly)
    assert assembly.complete
    arrived = assembly.arrays()
    assert list(arrived) == ["w", "b", "empty", "count", "half"]
    assert all((arrived[name] == values[name]).all() for name in ("w", "b", "half"))
    assert arrived["w"].dtype == "f4"
    assert arrived["empty"].shape == (0, 4)
    assert arrived["count"] == 7
    assert assembly.checksum == edition.checksum


def test_the_checksum_is_of_the_content():
    same, other = make(tensors()).checksum, make(tensors(2.0)).checksum
    assert make(tensors()).checksum == same != other
    assert make({**tensors(), "count": 8}).checksum != same


def test_a_damaged_part_is_refused_by_its_number():
    edition = make(tensors(), part_bytes=1000)
    words = "part 7 of weights b0-1 is damaged: got checksum [0-9a-f]{16}, wanted [0-9a-f]{16}"
    with pytest.raises(WeightsCorrupt, match=words):
        send(edition, begin(edition), damage=7)


def test_a_part_that_is_too_short_is_refused():
    edition = make(tensors())
    with pytest.raises(WeightsCorrupt, match="fewer than its"):
        begin(edition).add(0, edition.hash_of(planning.RAW_WHOLE, 0), iter([memoryview(b"abc")]))


def test_an_end_before_all_parts_is_refused():
    edition = make(tensors(), part_bytes=1000)
    with pytest.raises(WeightsCorrupt, match="not what was published"):
        begin(edition).end(0, edition.checksum)


def test_a_part_counts_once_however_often_it_comes():
    edition = make(tensors(), part_bytes=1000)
    assembly = begin(edition)
    send(edition, assembly)
    nbytes = assembly.nbytes
    send(edition, assembly)
    assert (assembly.left, assembly.nbytes) == (0, nbytes)


def test_another_set_of_tensors_is_refused_with_the_first_ten_differences():
    before = make({f"layer{n}": numpy.zeros(3, "f4") for n in range(20)}).schema
    now = make({f"layer{n}": numpy.zeros(4, "f4") for n in range(20)}).schema
    with pytest.raises(SchemaChanged) as caught:
        editions.check_schema(before, now, version=V1)
    assert "layer0 is float32[4], was float32[3]" in str(caught.value)
    assert "layer9" in str(caught.value)
    assert "layer10" not in str(caught.value)
    assert "and 10 more" in str(caught.value)


@given(
    sources=st.integers(1, 5), receivers=st.integers(1, 4), dims=st.tuples(st.sampled_from([0, 1, None]),
    st.sampled_from([0, 1, None])), part_bytes=st.integers(20, 2000),
)  # fmt: skip
@settings(deadline=None, max_examples=50)
def test_shards_of_a_gang_arrive_as_the_shards_of_another(sources, receivers, dims, part_bytes):
    whole = numpy.arange(7 * 11, dtype="i4").reshape(7, 11)
    from_, to = (Sharding(shape=(7, 11), mesh=(n,), dims=(d,)) for n, d in zip((sources, receivers), dims, strict=True))
    editions_ = [
        make({"w": Shard(_cut(whole, from_, rank), from_), "n": 3}, rank=rank, part_bytes=part_bytes)
        for rank in range(sources)
    ]
    for rank in range(receivers):
        assembly = begin(editions_[0], view=planning.raw_view(View(rank, {"w": to})))
        for edition in editions_:
            assert not assembly.complete
            send(edition, assembly)
        assert assembly.complete
        assert (assembly.arrays()["w"] == _cut(whole, to, rank)).all()


def _cut(whole, sharding, rank):
    return whole[tuple(slice(a, b) for a, b in layout.box(sharding, rank))]


def test_torch_tensors_arrive_as_torch_tensors_with_bfloat16():
    torch = pytest.importorskip("torch", reason="about torch's dtypes")
    values = {"w": torch.randn(33, 5).to(torch.bfloat16).t(), "p": torch.nn.Parameter(torch.ones(3)),
              "none": torch.empty(0, 2)}  # fmt: skip
    edition = make(values)
    assembly = begin(edition)
    send(edition, assembly)
    arrived = assembly.arrays()
    assert all(torch.equal(arrived[name], values[name].detach()) for name in values)
    arrived["w"].mul_(2)  # its own memory: an engine may scale in place


def test_plain_bytes_travel_without_numpy():
    edition = make({"weights": b"abc" * 1000, "none": b""})
    assembly = begin(edition)
    send(edition, assembly)
    assert bytes(assembly.arrays()["weights"]) == b"abc" * 1000


def test_what_cannot_travel_is_refused_by_name():
    with pytest.raises(PayloadError, match=r"cannot publish names: got a builtins\.set"):
        make({"names": {1}})
    with pytest.raises(PayloadError, match="cannot publish text"):
        make({"text": numpy.array(["a"])})


def test_a_shard_that_is_not_what_its_sharding_says_is_refused():
    shard = Shard(numpy.zeros((3, 4), "f4"), Sharding(shape=(8, 4), mesh=(2,), dims=(0,)))
    with pytest.raises(UserError, match=r"rank 0's shard of w has another shape .* got \(3, 4\), wanted \(4, 4\)"):
        make({"w": shard})


def test_the_receivers_arrays_are_the_memory_they_came_into():
    edition = make(tensors())
    assembly = begin(edition)
    send(edition, assembly)
    first, again = assembly.arrays()["w"], assembly.arrays()["w"]
    first[0, 0] = 99
    assert again[0, 0] == 99


def test_what_a_role_does_to_its_tensors_after_a_version_was_made_is_not_seen():
    values = {"w": numpy.arange(300_000, dtype="f4")}
    edition = make(values)
    values["w"][:] = -1
    assembly = begin(edition)
    send(edition, assembly)
    assert (assembly.arrays()["w"] == numpy.arange(300_000, dtype="f4")).all()


def test_what_a_role_does_to_its_tensors_while_a_version_is_made_is_found_at_the_receiver(monkeypatch):
    values = {"w": numpy.arange(300_000, dtype="f4")}
    copy = copying.copy_bytes

    def late(target, source):
        copy(target, source)
        source[0] ^= 1

    monkeypatch.setattr(copying, "copy_bytes", late)
    edition = make(values)
    monkeypatch.undo()
    with pytest.raises(WeightsCorrupt, match="part 0 of weights b0-1 is damaged"):
        send(edition, begin(edition))


def test_version_after_version_is_cut_as_the_first_was():
    first, second = make(tensors()), make(tensors(2.0))
    assert first._own is second._own


@pytest.mark.parametrize(("part_bytes", "told"), [(1000, [2, 4, 6, 6]), (2000, [1, 2, 3, 3])])
def test_whoever_sends_a_version_hears_of_each_few_mib_that_are_there(monkeypatch, part_bytes, told):
    monkeypatch.setattr(editions, "PART_BYTES", 2000)
    edition, there = Edition(V1, {"w": bytes(3 * 2000)}, rank=0, part_bytes=part_bytes), list[int]()
    edition.lie_in(Arenas(None).take(edition.memory.nbytes))
    edition.fill(filled=lambda: there.append(len(edition.hashes)))
    assert there == told


def test_a_small_model_costs_little():
    mlp = {f"layer{n}": numpy.zeros((64, 64), "f4") for n in range(6)}
    best = min(_timed(mlp) for _ in range(20))
    assert best < 0.02, f"{best:.4f} s"  # 0.4 ms alone; a busy machine is not a regression


def _timed(mlp) -> float:
    t0 = time.perf_counter()
    edition = make(mlp)
    send(edition, begin(edition))
    return time.perf_counter() - t0


@pytest.mark.parametrize("part_bytes", [1 << 20, 7 << 20])
def test_a_tensors_copy_on_the_host_goes_when_its_last_part_is_filled(part_bytes):
    """From a device every tensor is copied to the host first: of a whole model that would be its size once more."""
    values = {f"w{n}": numpy.full(500_000, n, "f4") for n in range(12)}
    edition = Edition(V1, values, rank=0, part_bytes=part_bytes)
    edition.lie_in(Arenas(None).take(edition.memory.nbytes))
    most: list[int] = []
    edition.fill(filled=lambda: most.append(edition._opened.nbytes if edition._opened else 0))
    assert max(most) < part_bytes + 2_000_000, "what the last part began and did not end"
    threaded = Edition(V1, values, rank=0, part_bytes=part_bytes)
    threaded.lie_in(Arenas(None).take(threaded.memory.nbytes))
    fillers = [threading.Thread(target=threaded.fill, args=(n, 2), kwargs={"filled": int}) for n in range(2)]
    for filler in fillers:
        filler.start()
    for filler in fillers:
        filler.join(timeout=30)
    assert threaded._opened is not None
    assert threaded._opened.nbytes == 0
    assert threaded.checksum == edition.checksum
