"""Weights between real processes, over shared memory and TCP: the runtime's channel, told what to do by the test."""

import time

import numpy
import pytest
import xxhash

from tests.cluster import bars
from tools.bench.runtime_parts.weights_field import Field

MODEL = {"mb": 24, "tensors": 6}


@pytest.fixture
def field(tmp_path):
    with Field(tmp_path) as made:
        yield made


def grow(field, *receivers: str, pods: str = "bcd"):
    """An actor in pod a and receivers in others, each subscribed."""
    field.start("actor/0")
    for name, pod in zip(receivers, pods, strict=False):
        field.start(name, pod=pod)
        field.route("actor/0", name)
        until(field, "actor/0", lambda s, name=name: name in s["children"])


def until(field, name, condition, *, timeout_s=20.0):
    deadline = time.monotonic() + timeout_s
    while not condition(stats := field.ask(name, do="stats")):
        assert time.monotonic() < deadline, f"{name} is at {stats}"
        time.sleep(0.01)
    return stats


@pytest.mark.parametrize(("pod", "link"), [("a", "shm"), ("b", "tcp")])
def test_a_version_arrives_bit_for_bit_and_within_a_pod_nothing_is_sent(field, pod, link):
    grow(field, "rollout/0", pods=pod)
    for number in range(1, 6):  # more versions than there are arenas
        made = field.ask("actor/0", do="publish", number=number, seed=number, **MODEL)
        assert field.ask("rollout/0", do="pull", number=number)["digest"] == made["digest"]
    stats = field.ask("actor/0", do="stats")
    assert stats["links"] == [link]
    assert stats["sent_bytes"] == (0 if link == "shm" else 5 * 24 << 20)
    assert stats["errors"] == []


@pytest.mark.parametrize("pod", ["a", "b"])
def test_two_arenas_are_enough_where_nobody_keeps_the_arrays(field, pod):
    grow(field, "rollout/0", pods=pod)
    field.ask("actor/0", do="publish", number=1, **MODEL)
    field.ask("rollout/0", do="pull", number=1)
    field.ask("actor/0", do="publish", number=2, times=8, **MODEL)
    assert field.ask("actor/0", do="stats")["arenas"] == 2
    assert field.ask("rollout/0", do="stats")["arenas"] == (0 if pod == "a" else 2)


def test_a_receiver_killed_in_the_middle_of_the_tree_sends_those_below_it_to_the_source(field):
    grow(field, "rollout/0", "rollout/1", "rollout/2")
    stats = field.ask("actor/0", do="stats")
    assert stats["moved"] == {"rollout/2": "rollout/0"}, "two are served by the actor, the third by the first of them"
    made = field.ask("actor/0", do="publish", number=1, seed=1, **MODEL)
    assert field.ask("rollout/2", do="pull", number=1)["digest"] == made["digest"]
    assert field.ask("actor/0", do="stats")["sent_bytes"] == 2 * 24 << 20
    field.ask("rollout/0", do="hold", parts=4)
    field.tell("actor/0", do="publish", number=2, seed=2, **MODEL)
    until(field, "rollout/2", lambda s: s["parts"] == 4)
    until(field, "rollout/0", lambda s: s["here"] == 2)  # else it dies before it was sent all
    field.kill("rollout/0")
    made = field.answer("actor/0")
    for name in ("rollout/1", "rollout/2"):
        assert field.ask(name, do="pull", number=2)["digest"] == made["digest"]
    assert field.ask("rollout/2", do="stats")["reroutes"] == 1
    sent = field.ask("actor/0", do="stats")["sent_bytes"] - (2 * 24 << 20)
    assert sent == (2 * 24 << 20) + 2 * (4 << 20), "of the third, only the two parts that it had not got"


def test_a_late_joiner_gets_the_current_version_of_another_receiver_while_the_actor_computes(field):
    grow(field, "rollout/0")
    field.ask("actor/0", do="publish", number=1, seed=1, **MODEL)
    made = field.ask("actor/0", do="publish", number=2, seed=2, **MODEL)
    field.ask("rollout/0", do="pull", number=2)
    field.start("rollout/1", pod="c")
    blocked_s = min(40.0, bars.by_load(8.0))
    field.tell("actor/0", do="block", s=blocked_s)
    assert field.answer("actor/0") == {"blocked": True}
    began = time.monotonic()
    field.ask("rollout/1", do="route", endpoint=field.endpoints["actor/0"], outgoing=False)
    field.ask("rollout/1", do="route", endpoint=field.endpoints["rollout/0"], outgoing=False)
    got = field.ask("rollout/1", do="pull", number=1)
    assert (got["number"], got["digest"]) == (2, made["digest"])
    assert time.monotonic() - began < blocked_s - 0.5, "it waited for the actor"


def test_a_late_joiner_is_served_when_there_is_no_actor_at_all(field):
    grow(field, "rollout/0")
    made = field.ask("actor/0", do="publish", number=1, **MODEL)
    field.ask("rollout/0", do="pull", number=1)
    field.kill("actor/0")
    field.start("rollout/1", pod="b")  # maps what the other one has
    field.ask("rollout/1", do="route", endpoint=field.endpoints["rollout/0"], outgoing=False)
    assert field.ask("rollout/1", do="pull", number=1)["digest"] == made["digest"]


@pytest.mark.parametrize("pod", ["a", "b"])
def test_damaged_parts_are_counted_and_the_version_is_fetched_anew(field, pod):
    grow(field, "rollout/0", pods=pod)
    field.ask("rollout/0", do="damage", times=2)
    made = field.ask("actor/0", do="publish", number=1, seed=3, **MODEL)
    assert field.ask("rollout/0", do="pull", number=1)["digest"] == made["digest"]
    stats = field.ask("rollout/0", do="stats")
    assert 1 <= stats["corrupt"] == stats["retries"] <= 2  # the second may come with what is no longer wanted
    assert stats["errors"] == []


def test_damage_that_does_not_end_ends_the_receiver_with_its_reason(field):
    grow(field, "rollout/0")
    field.ask("rollout/0", do="damage", times=1000)
    field.tell("actor/0", do="publish", number=1, **MODEL)
    stats = until(field, "rollout/0", lambda s: s["errors"])
    assert "is damaged: got checksum" in stats["errors"][0]
    assert stats["here"] == -1
    field.kill("rollout/0")
    assert "digest" in field.answer("actor/0"), "the publisher does not wait for one that is gone"


def test_a_delta_sends_what_changed_and_gives_the_same_bytes(field):
    grow(field, "rollout/0", "rollout/1")
    field.ask("actor/0", do="publish", number=1, seed=1, delta=True, **MODEL)
    before = field.ask("actor/0", do="stats")["sent_bytes"]
    made = field.ask("actor/0", do="publish", number=2, seed=2, delta=True, change=1, **MODEL)
    for name in ("rollout/0", "rollout/1"):
        assert field.ask(name, do="pull", number=2)["digest"] == made["digest"]
    sent = field.ask("actor/0", do="stats")["sent_bytes"] - before
    assert 0 < sent <= 2 * (4 << 20) + 4 * (64 << 10), "one tensor of 4 MiB changed, for two receivers"
    field.start("rollout/2", pod="a")  # holds no base: gets all of it
    field.route("actor/0", "rollout/2")
    assert field.ask("rollout/2", do="pull", number=2)["digest"] == made["digest"]


def test_who_has_its_version_spoilt_gets_the_next_one_whole(field):
    """A delta to it would be damaged each time that it is asked for."""
    grow(field, "rollout/0")
    field.ask("actor/0", do="publish", number=1, seed=1, delta=True, **MODEL)
    field.ask("rollout/0", do="spoil", bytes=24 << 20)
    made = field.ask("actor/0", do="publish", number=2, seed=2, delta=True, change=1, **MODEL)
    assert field.ask("rollout/0", do="pull", number=2)["digest"] == made["digest"]
    stats = field.ask("rollout/0", do="stats")
    assert (stats["corrupt"] > 0, stats["errors"]) == (True, [])


def test_a_late_joiner_asks_another_than_the_one_that_has_it_damaged(field):
    grow(field, "rollout/0", "rollout/1")
    made = field.ask("actor/0", do="publish", number=1, **MODEL)
    field.ask("rollout/0", do="spoil", bytes=24 << 20)
    field.kill("actor/0")
    field.start("rollout/2", pod="d")
    for name in ("rollout/0", "rollout/1"):
        field.ask("rollout/2", do="route", endpoint=field.endpoints[name], outgoing=False)
    assert field.ask("rollout/2", do="pull", number=1)["digest"] == made["digest"]
    assert field.ask("rollout/2", do="stats")["errors"] == []


@pytest.mark.parametrize("pod", ["a", "b"])
def test_what_was_pulled_is_not_written(field, pod):
    """Neighbours and the next version are made out of it."""
    grow(field, "rollout/0", pods=pod)
    field.ask("actor/0", do="publish", number=1, **MODEL)
    assert "read-only" in field.ask("rollout/0", do="write", number=1)["refused"]


def test_shards_of_two_ranks_become_the_column_shards_of_two_receivers(field):
    for name in ("actor/0", "actor/1"):
        field.start(name, pod="a")
    for name in ("actor/0", "actor/1"):
        field.ask(name, do="gang_is", endpoints=[field.endpoints["actor/0"], field.endpoints["actor/1"]])
    shape, names = (5130, 256), ["t0", "t1"]
    model = {"mb": 5130 * 256 * 4 * 2 / (1 << 20), "tensors": 2, "shape": shape, "ranks": 2, "seed": 5}
    for rank, pod in enumerate("ab"):  # one maps both ranks' memory, one is sent parts by both
        field.start(f"rollout/{rank}", pod=pod)
        field.ask(f"rollout/{rank}", do="select", shape=shape, dim=1, ranks=2, rank=rank, names=names)
        field.route("actor/0", f"rollout/{rank}")
    field.tell("actor/1", do="publish", number=1, **model)
    field.ask("actor/0", do="publish", number=1, **model)
    field.answer("actor/1")
    random = numpy.random.default_rng(5)
    whole = {name: random.random(shape[0] * shape[1], numpy.float32).reshape(shape) for name in names}
    for rank in range(2):
        got = field.ask(f"rollout/{rank}", do="piece", number=1)["digests"]
        for name in names:
            part = numpy.ascontiguousarray(whole[name][:, rank * 128 : (rank + 1) * 128])
            assert got[name] == xxhash.xxh3_64_hexdigest(part.tobytes())
        assert field.ask(f"rollout/{rank}", do="stats")["feeds"] == {"actor/0": "root", "actor/1": "source"}
    sent = sum(field.ask(f"actor/{n}", do="stats")["sent_bytes"] for n in range(2))
    assert sent <= whole["t0"].nbytes, "half of each of two tensors, for the one that cannot map it"


SHAPE = (2048, 1024)
SHARDED = {"mb": 48, "tensors": 6, "shape": SHAPE, "ranks": 2}  # 8 MiB each
TENSORS = [f"t{n}" for n in range(6)]


def gang(field, *, attempt=1):
    for rank, pod in enumerate("ab"):
        field.start(f"actor/{rank}", pod=pod, attempt=attempt)
    for rank in range(2):
        field.ask(f"actor/{rank}", do="gang_is", endpoints=[field.endpoints["actor/0"], field.endpoints["actor/1"]])


def columns(field, *names, pods):
    """Receivers of the first half of each tensor's columns: the rows of each half come from another rank."""
    for name, pod in zip(names, pods, strict=True):
        field.start(name, pod=pod)
        field.ask(name, do="select", shape=SHAPE, dim=1, ranks=2, rank=0, names=TENSORS)
        field.route("actor/0", name)
        until(field, "actor/0", lambda s, name=name: name in s["children"])


def publish(field, number, **fields):
    """Begun by both ranks, which answer when the receivers have confirmed it."""
    for rank in range(2):
        field.tell(f"actor/{rank}", do="publish", number=number, **{**SHARDED, "seed": number, **fields})


def published(field):
    for rank in range(2):
        assert "error" not in field.answer(f"actor/{rank}")


def has_its_columns(field, name, number, *, branch=0, seed=None):
    got = field.ask(name, do="piece", number=number, branch=branch)["digests"]
    random = numpy.random.default_rng(seed or number)
    for tensor in TENSORS:
        whole = random.random(SHAPE[0] * SHAPE[1], numpy.float32).reshape(SHAPE)
        assert got[tensor] == xxhash.xxh3_64_hexdigest(numpy.ascontiguousarray(whole[:, :512]).tobytes()), tensor
    stats = field.ask(name, do="stats")
    assert (stats["conflicts"], stats["errors"]) == (0, [])


def has_parts(field, name, count):
    assert until(field, name, lambda s: s["parts"] >= count)["parts"] == count


@pytest.mark.parametrize("rank", [0, 1])
def test_shards_go_on_where_they_were_when_the_link_of_a_rank_breaks_in_the_middle(field, rank):
    gang(field)
    columns(field, "rollout/0", pods="c")
    publish(field, 1)
    published(field)
    has_its_columns(field, "rollout/0", 1)
    field.ask(f"actor/{rank}", do="hold", parts=1)
    publish(field, 2)
    has_parts(field, "rollout/0", 3 + 1)
    assert field.ask("rollout/0", do="cut", worker=f"actor/{rank}") == {"links": 1}
    field.ask(f"actor/{rank}", do="hold")
    published(field)
    has_its_columns(field, "rollout/0", 2)
    sent = [field.ask(f"actor/{n}", do="stats")["sent_bytes"] for n in range(2)]
    assert sent == [2 * (12 << 20)] * 2, "half of the rows and of the columns of each version, and nothing twice"


def test_shards_of_a_rank_that_dies_in_the_middle_are_not_mixed_with_those_of_the_next_gang(field):
    gang(field)
    columns(field, "rollout/0", pods="c")
    publish(field, 1)
    published(field)
    has_its_columns(field, "rollout/0", 1)
    field.ask("actor/1", do="hold", parts=1)
    publish(field, 2)
    has_parts(field, "rollout/0", 3 + 1)
    for rank in (1, 0):  # a gang ends with any of its ranks
        field.kill(f"actor/{rank}")
    gang(field, attempt=2)
    field.ask("rollout/0", do="unroute", worker="actor/0", attempt=1)
    field.route("actor/0", "rollout/0")
    until(field, "actor/0", lambda s: s["children"] == ["rollout/0"])
    has_its_columns(field, "rollout/0", 1)
    publish(field, 2, branch=1, seed=9)
    published(field)
    has_its_columns(field, "rollout/0", 2, branch=1, seed=9)


def test_shards_come_from_the_ranks_again_when_the_receiver_that_passes_them_on_dies_in_the_middle(field):
    gang(field)
    columns(field, "rollout/0", "rollout/1", "rollout/2", pods="cde")
    assert field.ask("actor/0", do="stats")["moved"] == {"rollout/2": "rollout/0"}
    publish(field, 1)
    published(field)
    has_its_columns(field, "rollout/2", 1)
    field.ask("rollout/0", do="hold", parts=4)
    publish(field, 2)
    has_parts(field, "rollout/2", 4)
    until(field, "rollout/0", lambda s: s["here"] == 2)  # else it dies before it was sent all
    field.kill("rollout/0")
    published(field)
    for name in ("rollout/1", "rollout/2"):
        has_its_columns(field, name, 2)
    sent = [field.ask(f"actor/{n}", do="stats")["sent_bytes"] for n in range(2)]
    assert sum(sent) == (4 * 24 << 20) + 2 * (4 << 20), "to two of them, and of the third only what it had not got"
    assert field.ask("rollout/2", do="stats")["reroutes"] == 1


def test_other_tensors_are_refused_at_the_receiver_and_the_publisher_is_told(field):
    grow(field, "rollout/0")
    field.ask("actor/0", do="publish", number=1, **MODEL)
    field.ask("rollout/0", do="pull", number=1)
    field.kill("actor/0")
    field.start("actor/0", attempt=2)
    field.route("actor/0", "rollout/0")
    until(field, "actor/0", lambda s: s["children"] == ["rollout/0"])
    said = field.ask("actor/0", do="publish", number=1, branch=1, mb=24, tensors=8)["error"]
    assert "SchemaChanged: worker rollout/0 of job" in said or "refused weights b1-1" in said
    assert "t0 is float32[786432], was float32[1048576]" in said
    assert "t6 is new" in said
    assert "SchemaChanged" in field.ask("rollout/0", do="pull", number=1, branch=1)["error"]
    assert field.ask("rollout/0", do="stats")["refused"] == 1


def test_a_version_is_never_seen_with_two_checksums_over_a_fork_of_branches(field):
    grow(field, "rollout/0")
    field.ask("actor/0", do="publish", number=1, seed=1, **MODEL)
    field.ask("actor/0", do="publish", number=2, seed=2, **MODEL)
    field.ask("rollout/0", do="pull", number=2)
    field.kill("actor/0")
    field.start("actor/0", attempt=2)
    field.route("actor/0", "rollout/0")
    until(field, "actor/0", lambda s: s["children"] == ["rollout/0"])
    made = field.ask("actor/0", do="publish", branch=1, number=2, seed=7, **MODEL)  # as a restored actor has to
    assert field.ask("rollout/0", do="pull", branch=1, number=2)["digest"] == made["digest"]
    assert field.ask("actor/0", do="stats")["conflicts"] == 0
    field.kill("actor/0")
    field.start("actor/0", attempt=3)
    field.ask("actor/0", do="publish", branch=1, number=2, seed=8, **MODEL)  # other bytes under a known name
    field.route("actor/0", "rollout/0")
    stats = until(field, "actor/0", lambda s: s["conflicts"])
    assert "weights b1-2 exist twice with different bytes" in stats["errors"][0]
    assert field.ask("rollout/0", do="pull", branch=1, number=2)["digest"] == made["digest"]


def test_a_role_selects_its_shards_after_a_version_has_come(field):
    """Routes are known before a role is loaded: a late joiner has the version, whole, when it selects."""
    grow(field, "rollout/0", "rollout/1")
    shape, names = (512, 256), ["t0", "t1"]
    model = {"mb": 512 * 256 * 4 * 2 / (1 << 20), "tensors": 2, "shape": shape}
    whole = {}
    for number in (1, 2):
        random = numpy.random.default_rng(number)
        whole[number] = {name: random.random(shape[0] * shape[1], numpy.float32).reshape(shape) for name in names}
    field.ask("actor/0", do="publish", number=1, seed=1, **model)
    for rank in range(2):
        field.ask(f"rollout/{rank}", do="select", shape=shape, dim=1, ranks=2, rank=rank, names=names)

    def check(number):
        for rank in range(2):
            got = field.ask(f"rollout/{rank}", do="piece", number=number)["digests"]
            for name in names:
                part = numpy.ascontiguousarray(whole[number][name][:, rank * 128 : (rank + 1) * 128])
                assert got[name] == xxhash.xxh3_64_hexdigest(part.tobytes())

    check(1)
    field.ask("actor/0", do="publish", number=2, seed=2, **model)
    check(2)
    assert all(field.ask(name, do="stats")["errors"] == [] for name in ("actor/0", "rollout/0", "rollout/1"))
