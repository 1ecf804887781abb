"""A role on its slots and off them: one move at a time, timed, and only what it can move."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from rlinf_worker.phases import Phases
from rlinf_worker.roles.protocol import Memory
from rlinf_worker.settings import Settings
from rlinf_worker.spans import Recorder
from rlinf_worker.sums import MemoryUse
from rlinf_worker.turns.worker import Residence


class Movable:
    def __init__(self, place: "Place") -> None:
        self._place = place
        self.breaks = False

    def memory(self) -> Memory:
        return Memory(now=1234)

    async def _move(self, what: str) -> None:
        place = self._place
        place.did.append(f"{what} in {place.phases.phase}")
        assert place.open == [what], "work that must end"
        place.now += 2.0
        await asyncio.sleep(0)
        if self.breaks:
            raise MemoryError(what)
        place.did.append(f"{what} done")

    async def load(self) -> None:
        await self._move("load")

    async def offload(self) -> None:
        await self._move("offload")


class Place:
    """A clock, and what was done in its order."""

    def __init__(self) -> None:
        self.now, self.did, self.fatal = 10.0, list[str](), list[BaseException]()
        self.recorder, self.phases = Recorder(clock=lambda: self.now), Phases(Settings())
        self.open = list[str]()
        self.residence = Residence(
            self.recorder, self.phases, spill=self.spill, fatal=self.fatal.append, piece=self.piece
        )
        self.role = self.residence.role = Movable(self)

    @contextmanager
    def piece(self, kind: str) -> Iterator[None]:
        self.open.append(kind)
        yield
        self.open.remove(kind)

    def spill(self) -> int:
        self.did.append("spill")
        self.now += 1.0
        return 5


@pytest.fixture
def place() -> Place:
    return Place()


async def test_channels_go_before_the_role_and_each_is_loaded_and_offloaded_once(place):
    residence = place.residence
    await residence.load()
    assert (place.did, residence.is_loaded) == ([], True), "a role is made on its slots"
    await residence.offload()
    assert (place.did, residence.is_loaded) == (["spill", "offload in load", "offload done"], False)
    place.did.clear()
    await residence.offload()
    assert (place.did, residence.is_loaded) == (["spill"], False), "what channels keep may have come since"
    place.did.clear()
    await residence.load()
    assert (place.did, residence.is_loaded) == (["load in load", "load done"], True)
    assert residence.seconds == {"load": 2.0, "offload": 4.0}
    assert place.phases.phase == "start"
    assert [(span.kind, span.t1 - span.t0) for span in place.recorder.flush()] == [
        ("offload", 3.0), ("offload", 1.0), ("load", 2.0),
    ]  # fmt: skip


async def test_of_a_role_that_cannot_move_only_what_its_channels_keep_does(place):
    place.residence.role = object()
    await place.residence.offload()
    assert (place.did, place.residence.is_loaded, place.residence.memory_bytes) == (["spill"], True, 0)
    await place.residence.load()
    assert (place.did, place.residence.seconds) == (["spill"], {"load": 0.0, "offload": 1.0})
    place.residence.role = place.role
    assert place.residence.memory_bytes == 1234


async def test_moves_do_not_overlap_and_are_made_in_order(place):
    residence = place.residence
    residence.begin(residence.offload())
    residence.begin(residence.load())
    assert not residence.is_moving
    await asyncio.sleep(0)
    assert residence.is_moving
    async with asyncio.timeout(10):
        while len(place.did) < 5:
            await asyncio.sleep(0)
    assert place.did == ["spill", "offload in load", "offload done", "load in load", "load done"]


@pytest.mark.parametrize("what", ["load", "offload"])
async def test_a_move_that_breaks_ends_the_worker_and_is_timed_all_the_same(place, what):
    residence = place.residence
    if what == "load":
        await residence.offload()
    place.role.breaks = True
    residence.seconds = {"load": 0.0, "offload": 0.0}
    was_loaded = residence.is_loaded
    residence.begin(getattr(residence, what)())
    async with asyncio.timeout(10):
        while not place.fatal:
            await asyncio.sleep(0)
    assert [str(error) for error in place.fatal] == [what]
    assert residence.seconds == {"load": 0.0, "offload": 0.0} | {what: 2.0 if what == "load" else 3.0}
    assert (residence.is_loaded, residence.is_moving, place.phases.phase) == (was_loaded, False, "start")


async def test_a_move_that_is_under_way_ends_with_the_worker_and_is_no_failure(place):
    never: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def move() -> None:
        await never

    place.residence.begin(move())
    await asyncio.sleep(0)
    async with asyncio.timeout(10):
        await place.residence.close()
    assert (place.fatal, never.cancelled()) == ([], True)


class Measured(Movable):
    """10 GB when loaded, 1 GB when not, up to 14 GB."""

    is_loaded, peak = True, 0

    def memory(self) -> Memory:
        return Memory(now=10_000 if self.is_loaded else 1_000, peak=self.peak)

    async def load(self) -> None:
        await self._move("load")
        self.is_loaded = True

    async def offload(self) -> None:
        await self._move("offload")
        self.is_loaded = False


async def test_moves_are_summed_with_the_bytes_that_they_moved_and_the_step_that_they_are_of(place):
    recorder, step = place.recorder, [7]
    residence = Residence(recorder, place.phases, spill=place.spill, fatal=place.fatal.append, piece=place.piece,
                          step=lambda: step[0])  # fmt: skip
    residence.role = Measured(place)
    await residence.offload()
    await residence.offload()  # nothing to move but what channels keep
    step[0] = 8
    await residence.load()
    moves = recorder.sums.take(8, 0).moves
    assert {what: (found.count, found.seconds, found.bytes) for what, found in moves.items()} == {
        "offload": (1, 3.0, 9_000), "load": (1, 2.0, 9_000),
    }  # fmt: skip
    assert [(span.kind, span.step) for span in recorder.flush()] == [("offload", 7), ("offload", 7), ("load", 8)]


async def test_memory_is_what_the_role_says_and_what_was_seen_of_it(place):
    residence = place.residence
    role = residence.role = Measured(place)
    assert residence.memory() == MemoryUse(resident=10_000, peak=10_000)
    await residence.offload()
    assert residence.memory() == MemoryUse(resident=0, peak=10_000, offloaded=1_000)
    role.peak = 14_000
    await residence.load()
    assert residence.memory() == MemoryUse(resident=10_000, peak=14_000, offloaded=1_000)
    residence.role = object()
    assert residence.memory() == MemoryUse()
