"""The end of an uplink that dials, against a real gRPC server over loopback."""

import asyncio
import dataclasses
from functools import partial
from time import monotonic

import grpc
import pytest

from rlinf_api import names
from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_api.errors import Refused, UserError
from rlinf_worker.clock import Clock
from rlinf_worker.uplink import dialling as uplink
from rlinf_worker.uplink.dialling import DriverAbsent, RefusedByDriver
from rlinf_worker.uplink.outbox import Lasts, Outbox
from tests.fakes.uplink import DIALECT, QUICK, Driver, Part, Relay, dialling, word

AGAIN = pb.Refusal(message="no plan is in force yet", exit_code=names.EXIT_RETRYABLE)


def pauses(driver):
    return [later.at - sooner.at for sooner, later in zip(driver.streams, driver.streams[1:], strict=False)]


def reaches(something, count):
    return lambda: len(something) == count


# --- connecting, and again --------------------------------------------------------------------------------------------
async def test_a_hello_is_made_anew_for_each_stream_and_the_welcome_comes_first(caplog):
    async with Driver(attempt=3) as driver, dialling(driver) as d:
        for number in range(1, 4):
            await driver.until(reaches(d.part.welcomes, number))
            driver.streams[-1].out.put_nowait(pb.DriverMessage(begin=pb.Begin()))
            await driver.until(reaches(d.part.heard, number))
            driver.streams[-1].out.put_nowait(None)
        await driver.until(lambda: len(driver.streams) == 4)
        assert [(s.hello.attempt, s.hello.highest_driver_attempt) for s in driver.streams] == [
            (1, 0), (2, 3), (3, 3), (4, 3),
        ]  # fmt: skip
        assert d.part.welcomes[:3] == [(3, False)] * 3
    assert "driver lost" in caplog.text


async def test_pauses_grow_to_a_bound_and_begin_anew_after_a_welcome():
    settings = dataclasses.replace(QUICK, reconnect_backoff_s=0.04, reconnect_backoff_max_s=0.64)
    async with Driver() as driver:
        driver.refusal = AGAIN
        async with dialling(driver, settings=settings, jitter=lambda: 1.0) as d:
            await driver.until(lambda: len(driver.streams) >= 9)
            grown = pauses(driver)
            assert [gap >= wanted for gap, wanted in zip(grown, (0.04, 0.08, 0.16, 0.32, 0.64), strict=False)] == [
                True
            ] * 5
            assert max(grown) < 2.0, "without a bound the eighth would be 5 s"
            driver.refusal = None
            await d.connected()
            driver.refusal, before = AGAIN, len(driver.streams)
            driver.streams[-1].out.put_nowait(None)
            await driver.until(lambda: len(driver.streams) >= before + 4)
            anew = pauses(driver)[before:]
            assert min(anew[:2]) < 0.64, "they began at the smallest again"


async def test_half_of_a_pause_is_by_chance():
    settings = dataclasses.replace(QUICK, reconnect_backoff_s=0.4, reconnect_backoff_max_s=0.4)
    async with Driver() as driver:
        driver.refusal = AGAIN
        async with dialling(driver, settings=settings, jitter=lambda: 0.0):
            await driver.until(lambda: len(driver.streams) >= 5)
    assert min(pauses(driver)) < 0.39
    assert min(pauses(driver)) >= 0.2


async def test_a_driver_that_welcomes_nobody_is_given_up_and_tried_again():
    async with Driver() as driver:
        driver.welcoming.clear()
        async with dialling(driver, settings=dataclasses.replace(QUICK, welcome_timeout_s=0.1)) as d:
            await driver.until(lambda: len(driver.streams) >= 3)
            assert not d.uplink.is_connected
            driver.welcoming.set()
            await d.connected()
            assert (d.uplink.streams, d.part.welcomes) == (1, [(1, False)])


async def test_a_port_where_nobody_answers_does_not_hold_it():
    async with Driver() as driver, Relay(driver.port) as relay:
        relay.freeze()
        settings = dataclasses.replace(QUICK, connect_timeout_s=0.1)
        dials = list[int]()

        async def dial():
            dials.append(1)
            return await relay.dial()

        async with dialling(driver, settings=settings, dial=dial):
            # gRPC itself gives up after 2 s.
            await driver.until(lambda: len(dials) >= 8, within_s=8.0)


async def test_a_frozen_peer_is_noticed_within_six_seconds():
    async with Driver() as driver, Relay(driver.port) as relay, dialling(driver, dial=relay.dial) as d:
        await d.connected()
        relay.freeze()
        await d.lost(within_s=6.0)


@pytest.mark.parametrize("at_once", [True, False])
async def test_a_driver_that_does_not_read_is_given_up_and_what_lasts_is_said_again(at_once):
    """Also what the writer has in its hands already, behind what it cannot get rid of."""
    async with Driver() as driver:
        driver.reading.clear()
        async with dialling(driver, write_timeout_s=2.0) as d:
            await d.connected()
            for number in range(40):  # more than the windows of HTTP/2 take
                d.uplink.tell(word(number, size=400_000))
                if not at_once:
                    await asyncio.sleep(0)
            d.uplink.tell(word(99), lasts=Lasts.JOB)
            await driver.until(lambda: len(driver.streams) == 2)
            driver.reading.set()
            await driver.until(lambda: driver.streams[1].said)
            assert driver.streams[1].said == [99]


async def test_a_driver_that_speaks_out_of_turn_is_dialled_again():
    async with Driver() as driver, dialling(driver) as d:
        await d.connected()
        welcome = pb.Welcome(driver_attempt=1, protocol=names.PROTOCOL)
        driver.streams[0].out.put_nowait(pb.DriverMessage(welcome=welcome))
        await driver.until(lambda: len(driver.streams) == 2)
        assert d.part.heard == []


# --- whom it obeys ----------------------------------------------------------------------------------------------------
async def test_a_driver_of_a_lower_attempt_is_refused_and_told_nothing():
    async with Driver(attempt=3) as driver, dialling(driver) as d:
        await d.connected()
        driver.attempt = 2
        driver.streams[0].out.put_nowait(None)
        await d.lost()
        d.uplink.tell(word(1), lasts=Lasts.JOB)
        await driver.until(lambda: len(driver.streams) >= 4, what="two streams of it, and the end of one")
        assert {s.hello.highest_driver_attempt for s in driver.streams[1:]} == {3}
        assert driver.said == []
        assert d.part.welcomes == [(3, False)]
        driver.attempt = 4
        assert d.uplink.driverless_s > 0.0
        await driver.until(lambda: driver.said == [1])
        assert d.uplink.driverless_s == 0.0
        assert d.part.welcomes[1:] == [(4, True)]
        assert d.uplink.highest_driver_attempt == 4


@pytest.mark.parametrize("code", [names.EXIT_OK, names.EXIT_STALE, names.EXIT_USER_ERROR])
@pytest.mark.parametrize("welcomed", [True, False])
async def test_a_refusal_ends_it_with_the_code_that_it_names(code, welcomed):
    refusal = pb.Refusal(message="attempt 2 has taken your place", exit_code=code)
    async with Driver() as driver:
        driver.refusal = None if welcomed else refusal
        async with dialling(driver) as d:
            await driver.until(lambda: driver.streams)
            driver.streams[0].out.put_nowait(pb.DriverMessage(refusal=refusal))
            with pytest.raises(RefusedByDriver, match="refuses worker env/0: attempt 2 has taken") as caught:
                await d.ended()
        assert (caught.value.exit_code, caught.value.said) == (code, refusal.message)
        assert len(driver.streams) == 1


async def test_a_refusal_that_says_retryable_is_come_again_before_a_welcome_and_the_end_after_it():
    async with Driver() as driver:
        driver.refusal = AGAIN
        async with dialling(driver) as d:
            await driver.until(lambda: len(driver.streams) >= 3)
            driver.refusal = None
            await d.connected()
            driver.streams[-1].out.put_nowait(pb.DriverMessage(refusal=AGAIN))
            with pytest.raises(RefusedByDriver) as caught:
                await d.ended()
            assert caught.value.exit_code == names.EXIT_RETRYABLE


@pytest.mark.parametrize("number", [names.PROTOCOL - 1, names.PROTOCOL + 1])
async def test_one_protocol_is_spoken_and_another_is_a_sentence(number):
    async with Driver() as driver:
        driver.protocol = number
        async with dialling(driver) as d:
            with pytest.raises(
                UserError, match=f"another protocol: got {number}, wanted 1; run driver and worker pods"
            ):
                await d.ended()


@pytest.mark.parametrize("status", ["PERMISSION_DENIED", "UNAUTHENTICATED", "UNIMPLEMENTED", "INVALID_ARGUMENT"])
async def test_a_status_that_trying_again_does_not_change_is_a_sentence(status):
    async with Driver() as driver:
        driver.abort = grpc.StatusCode[status]
        async with dialling(driver) as d:
            with pytest.raises(Refused, match=f"the driver refuses worker env/0: got {status}: the test says so"):
                await d.ended()


async def test_any_other_status_is_tried_again():
    async with Driver() as driver:
        driver.abort = grpc.StatusCode.INTERNAL
        async with dialling(driver):
            await driver.until(lambda: len(driver.streams) >= 3)


async def test_without_a_driver_for_too_long_it_ends_and_says_what_the_last_try_met():
    settings = dataclasses.replace(QUICK, driver_absence_timeout_s=0.3)
    async with Driver() as driver, dialling(driver, settings=settings) as d:
        await d.connected()
        await asyncio.sleep(0.4)  # a driver with nothing to say is no absent one
        assert d.uplink.is_connected
        assert d.uplink.driverless_s == 0.0
        left_at = monotonic()
        await driver.stop()
        with pytest.raises(
            DriverAbsent, match=r"no driver for 0.3 s at the driver: got UNAVAILABLE.*see why"
        ) as caught:
            await d.ended()
        assert monotonic() - left_at >= 0.3
        assert 0.3 <= d.uplink.driverless_s <= monotonic() - left_at
        assert caught.value.reason == "DriverAbsent"


async def test_no_driver_is_absent_while_nobody_could_dial():
    ahead, dials = 0.0, 0
    clock = Clock(notice_s=100.0, raw=lambda: monotonic() + ahead)

    async def dial():
        nonlocal dials
        dials += 1
        return await driver.dial()

    async with Driver() as driver, dialling(driver, dial=dial, clock=clock) as d:
        await d.connected()
        await driver.stop()
        await driver.until(lambda: dials > 2, what="a dial that failed")
        before = dials
        ahead += QUICK.driver_absence_timeout_s  # this process was stopped, or the machine paused
        await driver.until(lambda: dials > before + 2 or d.task.done(), what="two more of them")
        assert not d.task.done()
        assert 0.0 < d.uplink.driverless_s < QUICK.driver_absence_timeout_s
        for _ in range(4):
            ahead += 0.3 * QUICK.driver_absence_timeout_s  # and here it lives
            clock()
        with pytest.raises(DriverAbsent):
            await d.ended()


# --- what is said -----------------------------------------------------------------------------------------------------
async def test_what_is_said_while_away_arrives_once_and_in_order_afterwards():
    async with Driver() as driver, dialling(driver) as d:
        await d.connected()
        d.uplink.tell(word(1), lasts=Lasts.JOB)
        await driver.until(lambda: driver.said == [1])
        driver.welcoming.clear()
        driver.streams[0].out.put_nowait(None)
        await d.lost()
        d.uplink.tell(word(2), lasts=Lasts.DRIVER)
        d.uplink.tell(word(3))
        d.uplink.tell(word(4), lasts=Lasts.JOB)
        await driver.until(lambda: len(driver.streams) == 2)
        d.uplink.tell(word(5))  # since the hello was made: the hello does not say it
        d.uplink.tell(word(6), lasts=Lasts.DRIVER)
        driver.welcoming.set()
        await driver.until(lambda: 6 in driver.said)
        d.uplink.tell(word(7))
        await driver.until(lambda: 7 in driver.said)
        assert (driver.streams[0].said, driver.streams[1].said[-4:]) == ([1], [4, 5, 6, 7])
        assert driver.streams[1].said in ([2, 4, 5, 6, 7], [2, 3, 4, 5, 6, 7]), (
            "3 only if a hello had been made by then"
        )


async def test_an_answer_is_for_the_driver_that_asked():
    async with Driver() as driver, dialling(driver) as d:
        await d.connected()
        driver.welcoming.clear()
        driver.attempt = 2
        driver.streams[0].out.put_nowait(None)
        await d.lost()
        d.uplink.tell(word(1), lasts=Lasts.DRIVER)
        await driver.until(lambda: len(driver.streams) == 2)
        d.uplink.tell(word(2), lasts=Lasts.DRIVER)
        d.uplink.tell(word(3), lasts=Lasts.JOB)
        driver.welcoming.set()
        await driver.until(lambda: driver.said)
        assert driver.said == [3]


async def test_what_is_repeated_comes_once_in_each_stream_until_it_is_forgotten():
    async with Driver() as driver, dialling(driver) as d:
        await d.connected()
        d.uplink.repeat("env/0", word(1))
        d.uplink.repeat("env/1", word(2))
        await driver.until(lambda: driver.said == [1, 2])
        d.uplink.forget("env/0")
        for number in (2, 3):
            driver.streams[-1].out.put_nowait(None)
            await driver.until(reaches(driver.streams, number))
            await driver.until(reaches(driver.streams[-1].said, 1))
        d.uplink.tell(word(3))
        await driver.until(lambda: 3 in driver.said)
        assert [s.said for s in driver.streams] == [[1, 2], [2], [2, 3]]
        driver.welcoming.clear()
        driver.streams[-1].out.put_nowait(None)
        await driver.until(reaches(driver.streams, 4))
        d.uplink.repeat("env/3", word(4))  # while the Welcome is on its way
        d.uplink.tell(word(5))
        driver.welcoming.set()
        await driver.until(lambda: 5 in driver.said)
        assert driver.streams[-1].said == [2, 4, 5]


async def test_a_full_outbox_breaks_the_stream_and_what_lasts_is_said_in_the_next(monkeypatch):
    monkeypatch.setattr(uplink, "Outbox", partial(Outbox, limit=10))
    async with Driver() as driver, dialling(driver) as d:
        await d.connected()
        for number in range(30):
            d.uplink.tell(word(number), lasts=Lasts.JOB if number % 10 == 0 or number == 29 else Lasts.STREAM)
        await driver.until(lambda: 29 in driver.said)
        assert [s.said for s in driver.streams] == [[], [0, 10, 20, 29]]
        assert d.uplink.dropped == 0


async def test_with_no_driver_the_oldest_that_waits_makes_room_and_is_counted():
    async with Driver() as driver:
        driver.refusal = AGAIN
        async with dialling(driver, kept=3) as d:
            await driver.until(lambda: driver.streams)
            for number in range(10):
                d.uplink.tell(word(number), lasts=Lasts.JOB)
            driver.refusal = None
            await driver.until(lambda: 9 in driver.said)
            assert driver.said[-3:] == [7, 8, 9]
            assert d.uplink.dropped == 10 - len(driver.said)


async def test_what_is_marked_is_asked_once_and_behind_what_was_told():
    class Source:
        def __init__(self):
            self.asked = 0

        comes_last = False

        def drain(self, out):
            self.asked += 1
            out.append(word(self.asked * 100))

    async with Driver() as driver:
        source, part = Source(), Part()
        async with dialling(driver, part=part) as d:
            d.uplink.mark(source)  # before there is a stream
            await driver.until(lambda: driver.said == [100])
            d.uplink.mark(source)
            d.uplink.mark(source)
            d.uplink.tell(word(1))
            await driver.until(lambda: driver.said == [100, 1, 200])
            assert d.uplink.frames == 2, "what one turn of the loop gives rise to is one frame"


async def test_what_is_said_of_other_things_comes_behind_them():
    class Source:
        def __init__(self, number, *, comes_last):
            self.number, self.comes_last = number, comes_last

        def drain(self, out):
            out.append(word(self.number))

    async with Driver() as driver, dialling(driver) as d:
        await d.connected()
        for source in (Source(3, comes_last=True), Source(1, comes_last=False), Source(2, comes_last=False)):
            d.uplink.mark(source)
        await driver.until(lambda: len(driver.said) >= 3)
        assert driver.said == [1, 2, 3]


class _Call:
    """A call whose writes end in one turn of the loop with something else, which is behind them in that turn."""

    def __init__(self, call, *, during, behind):
        self._call, self._during, self._behind = call, during, behind

    def __getattr__(self, name):
        return getattr(self._call, name)

    async def write(self, frame):
        said = [m.report.step for m in frame.messages if m.HasField("report")]
        self._during(said)
        await self._call.write(frame)
        loop = asyncio.get_running_loop()
        over = loop.create_future()

        def end():
            over.set_result(None)
            loop.call_soon(self._behind, said)

        loop.call_soon(end)
        await over


async def test_what_comes_in_the_turn_in_which_a_frame_was_taken_is_in_the_next_one():
    frames = []

    def during(steps):
        frames.append(steps)
        if steps == [0]:
            d.uplink.tell(word(1))

    def behind(steps):
        if steps == [0]:
            d.uplink.tell(word(2))

    wire = dataclasses.replace(DIALECT, call=lambda c: _Call(DIALECT.call(c), during=during, behind=behind))
    async with Driver() as driver, dialling(driver, wire=wire) as d:
        await d.connected()
        d.uplink.tell(word(0))
        await driver.until(lambda: driver.said == [0, 1, 2])
    assert frames == [[], [0], [1, 2]]


# --- how it ends ------------------------------------------------------------------------------------------------------
async def test_what_was_told_before_the_close_arrives_and_then_the_driver_ends_the_stream():
    async with Driver() as driver, dialling(driver) as d:
        await d.connected()
        driver.reading.clear()
        for number in range(5):
            d.uplink.tell(word(number))
        closing = asyncio.create_task(d.uplink.close(timeout_s=50.0))
        await asyncio.sleep(0.1)
        assert not closing.done()
        driver.reading.set()
        assert await asyncio.wait_for(closing, 20.0) == 0
        await d.ended(within_s=5.0)
        assert driver.said == [0, 1, 2, 3, 4]
        assert len(driver.streams) == 1


async def test_a_close_is_bounded_and_says_how_much_was_left_unsaid():
    async with Driver() as driver:
        driver.reading.clear()
        async with dialling(driver) as d:
            await d.connected()
            for number in range(40):
                d.uplink.tell(word(number, size=400_000))
                await asyncio.sleep(0.01)
            before = monotonic()
            assert await d.uplink.close(timeout_s=0.3) > 0
            assert 0.3 <= monotonic() - before < 3.0
            await d.ended(within_s=5.0)


async def test_a_driver_that_does_not_end_the_stream_does_not_hold_the_close():
    async with Driver() as driver:
        driver.ending.clear()
        async with dialling(driver) as d:
            await d.connected()
            d.uplink.tell(word(1))
            assert await d.uplink.close(timeout_s=0.3) == 0
            await d.ended(within_s=5.0)
            assert driver.said == [1]


class _Ending:
    """A call of which it is counted how often its end was said."""

    def __init__(self, call, said):
        self._call, self._said = call, said

    def __getattr__(self, name):
        return getattr(self._call, name)

    async def done_writing(self):
        self._said.append(len(self._said))
        await self._call.done_writing()


async def test_the_end_is_said_once_and_nothing_is_written_behind_it_while_the_driver_takes_its_time():
    said = list[int]()
    wire = dataclasses.replace(DIALECT, call=lambda c: _Ending(DIALECT.call(c), said))
    async with Driver() as driver:
        driver.ending.clear()
        async with dialling(driver, wire=wire) as d:
            await d.connected()
            d.uplink.tell(word(1))
            closing = asyncio.create_task(d.uplink.close(timeout_s=20.0))
            await driver.until(lambda: driver.said == [1])
            await asyncio.sleep(0.1)
            assert said == [0]
            driver.ending.set()
            assert await closing == 0
            await d.ended(within_s=5.0)


@pytest.mark.parametrize("state", ["welcome", "pause"])
async def test_a_close_without_a_driver_ends_it_at_once(state):
    settings = dataclasses.replace(QUICK, reconnect_backoff_s=30.0, reconnect_backoff_max_s=30.0)
    async with Driver() as driver:
        driver.refusal = AGAIN if state == "pause" else None
        if state == "welcome":
            driver.welcoming.clear()
        async with dialling(driver, settings=settings) as d:
            await driver.until(lambda: driver.streams)
            await asyncio.sleep(0.1)
            assert await d.uplink.close(timeout_s=30.0) == 0
            await d.ended(within_s=5.0)


# --- bugs are heard ---------------------------------------------------------------------------------------------------
async def test_what_cannot_be_written_at_all_ends_it():
    class Unwritable:
        comes_last = False

        def drain(self, out):
            out.append(pb.WorkerMessage(held=pb.Keys(channel="items", keys=["half\ud800"])))

    async with Driver() as driver, dialling(driver) as d:
        await d.connected()
        d.uplink.mark(Unwritable())
        with pytest.raises(UnicodeEncodeError):
            await d.ended()


async def test_a_bug_in_what_hears_a_message_ends_it():
    class Wrong(Part):
        def on_message(self, message):
            raise KeyError("half")

    async with Driver() as driver, dialling(driver, part=Wrong()) as d:
        await d.connected()
        driver.streams[0].out.put_nowait(pb.DriverMessage(begin=pb.Begin()))
        with pytest.raises(KeyError):
            await d.ended()
