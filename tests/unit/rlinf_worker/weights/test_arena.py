"""Memory of the weights is used again, and never while somebody reads it."""

import os

import numpy
import pytest

from rlinf_worker.weights import arena as arenas
from rlinf_worker.weights.arena import Arenas

BYTES = arenas.SMALL_BYTES


def let_go(arena):
    arena.held -= 1
    return arena


@pytest.fixture
def kept(tmp_path):
    return Arenas(str(tmp_path))


def test_an_arena_that_nobody_reads_is_used_again(kept):
    first = let_go(kept.take(BYTES))
    assert kept.take(BYTES) is first


def test_an_arena_is_used_for_what_fits_and_fills_half_of_it_at_least(kept):
    large = let_go(kept.take(2 * (half := 2 * BYTES)))
    for nbytes, fits in ((2 * half, True), (2 * half + 1, False), (half, True), (half - 1, False)):
        assert kept.makes(nbytes) is not fits
        other = kept.take(nbytes)
        assert (other is large) is fits
        if fits:
            let_go(other)


@pytest.mark.parametrize("reader", ["a version", "an array", "a peer"])
def test_an_arena_is_not_written_while_it_is_read(kept, reader):
    first = kept.take(BYTES)
    first.memory[:4] = b"read"
    array = numpy.frombuffer(first.lend(), "u1") if reader == "an array" else None
    if reader == "a peer":
        first.leases["rollout/0", 0, 1] = os.getpid()
    if reader != "a version":
        let_go(first)
    assert kept.take(BYTES) is not first
    assert bytes(first.memory[:4]) == b"read"
    if array is not None:
        del array
    elif reader == "a peer":
        first.leases.clear()
    else:
        let_go(first)
    assert kept.take(BYTES) is first


def test_a_peer_that_died_without_a_word_reads_no_more(kept):
    first = let_go(kept.take(BYTES))
    pid = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(pid, 0)
    first.leases["rollout/0", 0, 1] = pid
    assert kept.take(BYTES) is first


def test_memory_is_bounded_and_what_is_over_it_is_not_kept(kept):
    taken = [kept.take(BYTES) for _ in range(arenas.MAX_ARENAS + 1)]
    over = taken.pop()
    assert over.shared is None
    let_go(over)
    assert kept.take(BYTES) is not over


def test_one_too_many_takes_the_place_of_the_one_that_has_been_idle_longest(kept):
    first, second, third = (kept.take(BYTES) for _ in range(arenas.MAX_ARENAS))
    let_go(second)
    let_go(third)
    large = let_go(kept.take(4 * BYTES))
    assert large.shared is not None
    assert kept.take(4 * BYTES) is large
    assert kept.take(BYTES) is third, "the second made room"
    let_go(first)
    assert not kept.makes(BYTES)
    assert kept.take(BYTES) is first
