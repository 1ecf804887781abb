"""The codec: what goes in comes out, what cannot go says where it is, and nothing is copied that need not be."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import subprocess
import sys
from time import perf_counter
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlinf_api.errors import InvariantBroken
from rlinf_worker.links import payload, payload_arrays
from rlinf_worker.links.errors import PayloadError


@payload.register
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    obs: np.ndarray
    done: bool
    info: dict[str, object]


class Colour(enum.IntEnum):
    RED = 1


def over_the_wire(value):
    header, buffers = payload.encode(value)
    return payload.decode(bytes(header), [memoryview(bytearray(b)) for b in payload_arrays.on_host(buffers)])


def raw_bytes(tensor):
    flat = tensor.detach().resolve_conj().contiguous().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)  # an empty one has any stride


def same(a, b):
    if isinstance(a, torch.Tensor):
        assert isinstance(b, torch.Tensor)
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert torch.equal(raw_bytes(a), raw_bytes(b))
    elif isinstance(a, (np.ndarray, np.generic)):
        assert type(a) is type(b)
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert a.tobytes() == b.tobytes()
    elif dataclasses.is_dataclass(a):
        assert type(a) is type(b)
        for field in dataclasses.fields(a):
            same(getattr(a, field.name), getattr(b, field.name))
    elif isinstance(a, dict):
        assert type(b) is dict
        assert list(a) == list(b)
        for key in a:
            same(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert type(a) is type(b)
        assert len(a) == len(b)
        for left, right in zip(a, b, strict=True):
            same(left, right)
    else:
        assert type(a) is type(b)
        assert a == b


NUMPY_DTYPES = ["?", "i1", "u1", "<i2", ">i2", "<u4", "<i8", "<f2", "<f4", ">f8", "<c8", "<c16", "S3", "<U4"]
TORCH_DTYPES = [
    torch.bool, torch.uint8, torch.int16, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.complex64, torch.float8_e4m3fn,
]  # fmt: skip
SHAPES = [(), (0,), (3, 0, 2), (7,), (3, 5), (2, 3, 4), (50, 300)]


@st.composite
def arrays(draw):
    dtype = np.dtype(draw(st.sampled_from(NUMPY_DTYPES)))
    shape = draw(st.sampled_from(SHAPES))
    count = int(np.prod(shape, dtype=int))
    seed = draw(st.integers(0, 100))
    if dtype.kind in "SU":
        raw = np.array([chr(97 + (seed + i) % 26) for i in range(count)], dtype).reshape(shape)
    else:
        raw = np.random.default_rng(seed).integers(0, 2, (*shape, dtype.itemsize), np.uint8)
        raw = np.ndarray(shape, dtype, raw.tobytes())
    form = draw(st.sampled_from(["c", "fortran", "strided", "reversed", "read-only"]))
    if form == "fortran":
        return np.asfortranarray(raw)
    if form == "strided" and raw.ndim:
        return raw[::2]
    if form == "reversed" and raw.ndim:
        return raw[..., ::-1]
    if form == "read-only":
        raw = raw.copy()
        raw.flags.writeable = False
    return raw


@st.composite
def tensors(draw):
    dtype = draw(st.sampled_from(TORCH_DTYPES))
    shape = draw(st.sampled_from(SHAPES))
    raw = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 100)))).to(dtype)
    form = draw(st.sampled_from(["c", "transposed", "strided", "conj"]))
    if form == "transposed" and raw.ndim == 2:
        return raw.T
    if form == "strided" and raw.ndim:
        return raw[::2]
    if form == "conj" and raw.is_complex():
        return raw.conj()
    return raw


plain: st.SearchStrategy[Any] = (
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats(allow_nan=False)
)
plain = plain | st.text(max_size=20) | st.binary(max_size=20) | st.just(b"x" * 10_000)
values = st.recursive(
    plain | arrays() | tensors() | st.sampled_from([np.float64(0.5), np.int32(-3), np.bool_(True), np.float16(1)]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=5) | st.integers(0, 9), inner, max_size=4)
        | st.builds(
            Step, obs=arrays(), done=st.booleans(), info=st.dictionaries(st.text(max_size=3), inner, max_size=2)
        )
    ),
    max_leaves=12,
)


@given(values)
def test_every_accepted_value_comes_back_the_same(value):
    same(value, over_the_wire(value))


@given(values)
def test_with_tensors_on_a_gpu_every_value_comes_back_the_same_by_way_of_the_host(value):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(payload_arrays, "device_kind", lambda tensor: "cuda")
        header, parts = payload.encode(value)
        back = payload.decode(header, [memoryview(bytearray(b)) for b in payload_arrays.on_host(parts)])
        handed_over = payload.decode(header, parts)
    same(value, back)
    same(value, handed_over)


def test_a_tensor_on_a_gpu_is_not_copied_before_a_link_asks_for_its_bytes(monkeypatch):
    monkeypatch.setattr(payload_arrays, "device_kind", lambda tensor: "cuda")
    tensor = torch.arange(10_000, dtype=torch.bfloat16)
    header, (part,) = payload.encode({"t": tensor.view(100, 100).T, "n": 1})
    assert isinstance(part, payload_arrays.DeviceBuffer)
    assert (len(header) < 60, part.nbytes) == (True, 20_000)
    assert part.host() is part.host()
    assert payload.decode(header, [part])["t"].shape == (100, 100)


@given(st.lists(st.integers(-(1 << 63), (1 << 64) - 1), max_size=50))
def test_a_list_of_token_ids_comes_back_the_same(ids):
    same({"ids": ids}, over_the_wire({"ids": ids}))


def test_large_arrays_are_views_at_both_ends():
    array, tensor = np.arange(10_000), torch.arange(10_000).to(torch.bfloat16)
    header, buffers = payload.encode([array, tensor])
    array[0], tensor[0] = 77, 5.0
    assert np.frombuffer(payload_arrays.on_host(buffers)[0], array.dtype)[0] == 77
    received = [bytearray(buffer) for buffer in payload_arrays.on_host(buffers)]
    got_array, got_tensor = payload.decode(header, [memoryview(raw) for raw in received])
    received[0][:8] = (9).to_bytes(8, "little")
    received[1][:2] = b"\0\0"
    assert got_array[0] == 9
    assert got_tensor[0] == 0
    assert got_array.flags.writeable


def test_small_arrays_need_no_buffer():
    _, buffers = payload.encode({"a": np.zeros(1024, "f4"), "b": torch.zeros(10)})
    assert buffers == []


def test_a_parameter_arrives_as_a_tensor_without_history():
    got = over_the_wire(torch.nn.Parameter(torch.ones(2000)))
    assert type(got) is torch.Tensor
    assert not got.requires_grad


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (
            {"a": [1, {"b": {1, 2}}]},
            r"cannot send payload\['a'\]\[1\]\['b'\]: got a set, wanted .*; send a sorted list",
        ),
        ({"a": {(1, 2): 3}}, r"payload\['a'\]: got a key \(1, 2\) of type tuple.*use str or int keys"),
        ([np.array([object()])], r"payload\[0\]: got a numpy array of dtype object.*convert it to numbers"),
        ((np.ma.zeros(3),), r"payload\[0\]: got a numpy\.ma\.MaskedArray"),
        ({"t": torch.zeros(3, device="meta")}, r"payload\['t'\]: got a tensor on meta.*call \.cpu\(\)"),
        (torch.zeros(3, 3).to_sparse(), r"payload: got a tensor of layout torch\.sparse_coo.*to_dense"),
        ({"n": 1 << 64}, r"payload\['n'\]: got an int of more than 64 bits.*send it as str"),
        ({"s": ["ok", "\ud800"]}, r"payload\['s'\]\[1\]: got a str with surrogates.*send bytes"),
        (Step(obs=np.zeros(1), done=True, info={"x": lambda: 0}), r"payload\.info\['x'\]: got a function"),
        ({"c": Colour.RED}, r"payload\['c'\]: got a .*Colour.*send a plain int"),
        (msgspec.Raw(b"\x01"), r"payload: got a msgspec\.Raw"),
        (bytearray(3), r"payload: got a bytearray"),
    ],
)
def test_what_cannot_be_sent_says_where_it_is_and_what_to_do(value, sentence):
    with pytest.raises(PayloadError, match=sentence):
        payload.encode(value)


def test_an_unregistered_dataclass_names_the_call_that_helps():
    @dataclasses.dataclass
    class Unknown:
        x: int

    with pytest.raises(PayloadError, match=r"call rlinf_worker\.links\.payload\.register\(.*Unknown\)"):
        payload.encode({"d": Unknown(1)})


def test_a_value_that_holds_itself_is_refused():
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(PayloadError, match="more than 64 levels"):
        payload.encode(loop)


def test_a_dataclass_that_the_receiver_does_not_know_or_knows_otherwise_is_an_error_there(monkeypatch):
    header, buffers = payload.encode(Step(obs=np.zeros(1), done=True, info={}))
    entry = payload._BY_NAME["Step"]
    monkeypatch.setitem(payload._BY_NAME, "Step", dataclasses.replace(entry, fingerprint=1))
    with pytest.raises(PayloadError, match=r"other fields than this process has.*obs, done, info"):
        payload.decode(header, buffers)
    monkeypatch.delitem(payload._BY_NAME, "Step")
    with pytest.raises(PayloadError, match=r"does not know.*import the module that registers it"):
        payload.decode(header, buffers)


def test_two_dataclasses_cannot_share_a_name():
    @dataclasses.dataclass
    class Other:
        x: int

    with pytest.raises(InvariantBroken, match="two dataclasses are registered as 'Step'"):
        payload.register(Other, name="Step")


@given(st.binary(max_size=60))
def test_bytes_that_are_no_header_are_an_error_and_nothing_worse(raw):
    with contextlib.suppress(PayloadError):
        payload.decode(raw, [])


@pytest.mark.parametrize(
    "tree",
    [
        [6, "<f4", [1 << 40], 0], [6, "<f4", [5], 3], [5, "O", [1], b"12345678"], [8, "load", [1], b"1234"],
        [8, "float1", [1], b"1234"],  # of a newer torch
        [8, "float32", [-3], b"1234"], [], [99], [[1]], [4, "nobody", 0], [5, "<f4", [4], b"1"], [3, "x"],
    ],
)  # fmt: skip
def test_a_header_that_lies_is_an_error(tree):
    with pytest.raises(PayloadError):
        payload.decode(msgspec.msgpack.encode(tree), [memoryview(bytearray(8))])


def test_neither_numpy_nor_torch_nor_pydantic_is_imported_by_a_worker_that_has_links():
    code = (
        "import sys; from rlinf_worker.links import listener, payload; "
        "payload.decode(*payload.encode({'a': [1, (2, b'x')]})); "
        "print(sorted({'numpy', 'torch', 'pydantic', 'google.protobuf', 'grpc'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.strip() == "[]"


def test_a_process_without_numpy_that_receives_an_array_says_so():
    header, _ = payload.encode(np.zeros(3))
    code = (
        "import sys; sys.modules['numpy'] = None\n"
        "from rlinf_worker.links import payload\n"
        f"try: payload.decode({header!r}, [])\n"
        "except payload.PayloadError as err: print(err)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert "received arrays of numpy, which this process cannot import" in done.stdout


def test_a_small_message_costs_microseconds():
    """Not a benchmark: a bound nine times the measured 5.4 us, to notice a walk that went quadratic or an import."""
    value = {"obs": np.zeros((20, 4), "f4"), "act": np.zeros(40, "i8"), "reward": np.zeros(80, "f4")}
    best = 1.0
    for _ in range(20):
        start = perf_counter()
        for _ in range(100):
            payload.decode(*payload.encode(value))
        best = min(best, (perf_counter() - start) / 100)
    assert best < 50e-6
