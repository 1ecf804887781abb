import time

import numpy
import pytest

from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.weights import edition as editions
from rlinf_worker.weights.edition import Assembly, SchemaChanged, WeightsCorrupt

V1 = PolicyVersion(0, 1)


def tensors(scale: float = 1.0):
    return {
        "w": numpy.arange(30_000, dtype="f4").reshape(100, 300) * scale,
        "b": numpy.ones(3, "f8"),
        "empty": numpy.zeros((0, 4), "f4"),
        "count": 7,
    }


def assemble(edition, *, damage: int | None = None):
    assembly = Assembly(edition.head())
    for index, bucket in enumerate(edition.buckets):
        body = bytearray(bucket.body)
        if index == damage:
            body[-1] ^= 1
        done = assembly.add(edition.bucket_head(index), bytes(body), bucket.buffers)
    assert done
    return assembly.finish()


@pytest.mark.parametrize("bucket_bytes", [1, 1000, 1 << 22])
def test_a_version_arrives_as_it_was_made_in_any_number_of_buckets(bucket_bytes):
    edition = editions.make(V1, tensors(), bucket_bytes=bucket_bytes)
    arrived = assemble(edition)
    assert list(arrived) == ["w", "b", "empty", "count"]
    assert (arrived["w"] == tensors()["w"]).all()
    assert arrived["empty"].shape == (0, 4)
    assert arrived["count"] == 7


def test_the_checksum_is_of_the_content():
    same, other = editions.make(V1, tensors()).checksum, editions.make(V1, tensors(2.0)).checksum
    assert editions.make(V1, tensors()).checksum == same != other


def test_a_damaged_bucket_is_refused_by_name():
    edition = editions.make(V1, tensors(), bucket_bytes=1)
    with pytest.raises(WeightsCorrupt, match="bucket 1 of weights b0-1 is damaged: got checksum"):
        assemble(edition, damage=1)


def test_a_bucket_out_of_order_is_refused():
    edition = editions.make(V1, tensors(), bucket_bytes=1)
    with pytest.raises(WeightsCorrupt, match="out of order"):
        Assembly(edition.head()).add(edition.bucket_head(1), b"", ())


def test_another_set_of_tensors_is_refused_with_the_first_ten_differences():
    before = editions.schema_of({f"layer{n}": numpy.zeros(3, "f4") for n in range(20)})
    now = editions.schema_of({f"layer{n}": numpy.zeros(4, "f4") for n in range(20)})
    with pytest.raises(SchemaChanged) as caught:
        editions.check_schema(before, now, version=V1)
    assert "layer0 is float32[4], was float32[3]" in str(caught.value)
    assert "layer9" in str(caught.value)
    assert "layer10" not in str(caught.value)
    assert "and 10 more" in str(caught.value)


def test_nothing_of_a_links_memory_is_kept():
    edition = editions.make(V1, tensors())
    memory = bytearray(edition.buckets[0].buffers[0])
    assembly = Assembly(edition.head())
    assembly.add(edition.bucket_head(0), edition.buckets[0].body, [memoryview(memory)])
    memory[:] = bytes(len(memory))
    assert (assembly.finish()["w"] == tensors()["w"]).all()


def test_a_small_model_costs_little():
    mlp = {f"layer{n}": numpy.zeros((64, 64), "f4") for n in range(6)}
    assemble(editions.make(V1, mlp))  # imports
    best = min(_timed(mlp) for _ in range(20))
    assert best < 0.02, f"{best:.4f} s"  # 0.1 ms alone; a busy machine is not a regression


def _timed(mlp) -> float:
    t0 = time.perf_counter()
    assemble(editions.make(V1, mlp))
    return time.perf_counter() - t0
