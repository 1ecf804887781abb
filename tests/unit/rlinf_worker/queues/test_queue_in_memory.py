"""Both ends of a queue in memory: what the driver is told, what peers are sent, what becomes of units on the way."""

import asyncio
import dataclasses
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_api.errors import InvariantBroken, UserError
from rlinf_api.names import WorkerId
from rlinf_worker.channels.account import Level
from rlinf_worker.channels.host import HEAD_BYTES, Host
from rlinf_worker.channels.labels import LabelError
from rlinf_worker.channels.messages import MAX_CREDIT
from rlinf_worker.channels.payload_type import PayloadMismatch, PayloadType
from rlinf_worker.channels.protocol import ChannelClosed, Item, PolicyVersion, Round
from rlinf_worker.channels.waiting import Waits
from rlinf_worker.links import frames
from rlinf_worker.links.errors import MessageTooLarge
from rlinf_worker.links.message import Message
from rlinf_worker.queues import consuming
from rlinf_worker.queues.channel import QueueChannel
from rlinf_worker.queues.parents import Parents
from rlinf_worker.queues.units import UnitId
from rlinf_worker.spans import Recorder
from rlinf_worker.sums import End
from tests.fakes.lines import Line, Lines

VERSION = PolicyVersion(1, 5)
THERE = pb.Endpoint(worker="env/3", attempt=2, host="10.0.0.3", port=9)


GONE_AT_7 = pb.Ended(key="gone@7", tickets=["p@7"], units=2)


class Site:
    def __init__(self, role: str = "actor", **spec: Any) -> None:
        self.lines, self.told = Lines(), list[pb.WorkerMessage]()
        self.marked, self.finished, self.failed = list[Any](), list[Item](), list[BaseException]()
        self.urgent = 0  # frames to the driver, at most, that go for what was marked
        self.host = Host(
            worker=f"{role}/0",
            role=role,
            peers=cast(Any, self.lines),
            waits=Waits(),
            recorder=Recorder(),
            tell=self.told.append,
            mark=self._mark,
            finish_item=self.finished.append,
            fatal=self.failed.append,
        )
        given: dict[str, Any] = {
            "name": "units", "producer": "env", "consumer": "actor", "micro_batch": 4, "depth": 2, "capacity_units": 9,
            "capacity_bytes": 1 << 20,
        }  # fmt: skip
        self.channel = QueueChannel(self.host, pb.ChannelSpec(**(given | spec)), Parents())
        self.out, self.into = self.channel.out, self.channel.into

    def _mark(self, source: Any, *, can_wait: bool = False) -> None:
        self.marked.append(source)
        self.urgent += not can_wait

    def drained(self) -> list[Any]:
        """What the next batch to the driver says, of both ends."""
        out = list[pb.WorkerMessage]()
        self.into.drain(out)
        self.out.drain(out)
        return [getattr(message, str(message.WhichOneof("kind"))) for message in out]

    def assign(self, *keys: str, producer: str = "env/3", branch: int = 1, inline: bytes = b"") -> list[pb.Unit]:
        units = [unit(key, producer=producer, branch=branch, inline=inline) for key in keys]
        self.into.on_assign(pb.Assign(channel="units", units=units, producers=[THERE] if producer == "env/3" else []))
        return units

    def deliver(self, key: str, value: Any = None, *, branch: int = 1) -> Message:
        message = Message(b"", value)
        message.encoded()
        self.into.on_payload(frames.Payload("units", branch, key), message)
        return message

    @property
    def line(self) -> Line:
        return self.lines.line("env/3", 2)


def unit(key: str, *, producer: str = "env/3", branch: int = 1, step: int = 4, inline: bytes = b"") -> pb.Unit:
    version = pb.PolicyVersion(branch=1, number=5)
    return pb.Unit(
        key=key, branch=branch, step=step, weight=2.0, bytes=77, version=version, producer=producer, inline=inline
    )


def held(*units: pb.Unit) -> list[pb.HeldUnit]:
    return [pb.HeldUnit(channel="units", unit=one) for one in units]


@pytest.fixture
async def site():
    return Site()


async def begun(waiting: Any) -> asyncio.Task[Any]:
    task: asyncio.Task[Any] = asyncio.ensure_future(waiting)
    for _ in range(3):
        await asyncio.sleep(0)
    return task


class TestMeasured:
    """What a profile needs of a queue: waits that name their end, when a step began here, when its units went on."""

    async def test_a_wait_names_the_end_at_which_it_is(self, site):
        taking = await begun(site.channel.take())
        site.assign("a", producer="")
        await taking
        full = Site("env", capacity_units=1)
        await full.channel.put(1, key="a", step=2)
        putting = await begun(full.channel.put(2, key="b", step=2))
        full.out.on_released([UnitId(0, "a")])
        await putting
        found = [(span.kind, span.on) for one in (site, full) for span in one.host.recorder.flush()]
        assert found == [("wait_data", End("units", "consumer")), ("wait_data", End("units", "producer"))]

    async def test_units_are_released_from_the_first_thing_on_that_was_taken_of_their_step(self):
        site = Site("actor", producer="actor")  # both ends in one worker
        recorder, now = site.host.recorder, [100.0]
        recorder._clock = lambda: now[0]
        site.assign("a", "b", producer="")
        for _ in range(2):
            site.channel.take_now()
            now[0] += 1.0
        await site.channel.put(1, key="x", step=4, branch=1)
        now[0] += 2.0
        await site.channel.put(1, key="y", step=4, branch=1)
        await site.channel.put(1, key="y", step=4, branch=1)  # made again, and kept already
        assert recorder.sums.take(4, 1).releases["units"].evenly() == [2.0, 4.0]


class TestConsuming:
    async def test_what_is_assigned_is_fetched_held_taken_and_acknowledged(self, site):
        assert site.drained() == [pb.Credit(channel="units", units=8)]
        site.assign("a")
        assert site.marked == [site.into]
        assert site.drained() == []
        assert site.lines.wanted == [("env/3", 2, "units/pull", True)]
        assert site.line.heads() == [frames.Pull("units", [(1, "a")])]
        assert site.channel.take_now() is None
        site.deliver("a", {"x": 1})
        assert site.drained() == [pb.Keys(channel="units", branch=1, keys=["a"])]
        item = await site.channel.take()
        assert {field.name: getattr(item, field.name) for field in dataclasses.fields(item)} == {
            "channel": "units", "key": "a", "payload": {"x": 1}, "step": 4, "branch": 1, "source": "env/3",
            "version": VERSION, "weight": 2.0, "cancelled": False, "tickets": ("a",), "wants_seal": False,
            "partial": None, "is_settled": False, "_borrows": True, "_on_cancel": (),
        }  # fmt: skip
        account = site.channel.account_in
        assert (account.items, account.bytes, account.step, account.units) == (1, 77, 4, True)
        site.marked.clear()
        site.channel.ack(item)
        assert site.marked == [site.into]
        assert (item.payload, site.channel.in_hand) == (None, 0)
        acked = pb.Keys(channel="units", branch=1, keys=["a"])
        assert acked in site.drained()

    @pytest.mark.parametrize("first", ["ack", "drop"])
    @pytest.mark.parametrize("again", ["ack", "drop"])
    async def test_an_item_is_acknowledged_or_dropped_once(self, site, first, again):
        site.assign("a", producer="")
        item, account = site.channel.take_now(), site.channel.account_in
        ways = {"ack": site.channel.ack, "drop": lambda item: site.channel.drop(item, "why")}
        ways[first](item)
        dropped = dict(account.dropped)
        with pytest.raises(UserError) as refused:
            ways[again](item)
        assert str(refused.value) == (
            "channel 'units' was told the end of what is no item of it, or has ended: got item 'a' of channel 'units', "
            "ended, wanted an item of 'units' that the role has in hand; give each item that take() returns once to "
            "ack() or drop() of its own channel"
        )
        assert dict(account.dropped) == dropped

    async def test_a_reason_that_is_no_label_is_told_to_nobody(self, site):
        site.assign("a", producer="")
        site.channel.drop(site.channel.take_now(), "x" * 1_000_000)
        assert dict(site.channel.account_in.dropped) == {"others": 1}
        assert pb.Drop(channel="units", key="a", branch=1, reason="others") in site.drained()

    async def test_an_item_ends_in_the_channel_that_it_came_by(self, site):
        other = Site(name="others")
        other.assign("a", producer="")
        item = await other.channel.take()
        with pytest.raises(UserError, match="got item 'a' of channel 'others', in hand, wanted an item of 'units'"):
            site.channel.ack(item)
        other.channel.ack(item)
        assert other.channel.in_hand == 0

    @pytest.mark.parametrize("said", [pb.Cancel(branch=1), pb.Cancel(branch=1, keys=["a"])])
    async def test_an_item_that_was_cancelled_ends_once_too_and_without_a_word(self, site, said):
        site.assign("a", producer="")
        item = site.channel.take_now()
        site.channel.on_cancel(said)
        site.channel.ack(item)
        assert (item.cancelled, site.channel.in_hand) == (True, 0)
        with pytest.raises(UserError, match="'units', ended"):
            site.channel.ack(item)

    async def test_pulls_of_one_batch_go_together_the_oldest_first(self, site):
        late, early = unit("late", step=9), unit("early", step=2)
        site.into.on_assign(pb.Assign(channel="units", units=[late, early], producers=[THERE]))
        site.drained()
        assert site.line.heads() == [frames.Pull("units", [(1, "early"), (1, "late")])]

    async def test_units_of_the_drivers_own_are_here_at_once(self, site):
        site.assign("a", producer="", inline=b'{"slice": 3}')
        site.assign("b", producer="")
        first, second = site.channel.take_now(), site.channel.take_now()
        assert (first.payload, second.payload, first.source) == ({"slice": 3}, {}, "")
        site.channel.ack(first)
        assert first.payload == {"slice": 3}, "it borrows nothing"
        with pytest.raises(InvariantBroken, match="unit c of the driver is no JSON"):
            site.assign("c", producer="", inline=b"{")

    async def test_an_item_of_no_size_is_as_large_as_its_message(self, site):
        one = unit("a")
        one.bytes = 0
        site.into.on_assign(pb.Assign(channel="units", units=[one], producers=[THERE]))
        message = site.deliver("a", "data")
        size = message.nbytes
        await site.channel.take()
        assert site.channel.account_in.bytes == size

    async def test_a_payload_that_nobody_waits_for_is_counted_and_let_go(self, site):
        message = site.deliver("a", 1)
        assert site.channel.account_in.duplicates == 1
        with pytest.raises(InvariantBroken, match="after its release"):
            message.value()

    async def test_a_new_link_to_the_life_that_the_driver_named_is_asked_again(self, site):
        site.assign("a", "b")
        site.drained()
        site.deliver("a")
        site.line.heads()
        for line in (site.lines.line("env/3", 1), site.lines.line("env/4", 2), site.line):
            site.into.on_up(line)
            assert line.heads() == ([frames.Pull("units", [(1, "b")])] if line is site.line else [])
        site.deliver("b")
        site.into.on_up(site.line)
        assert site.line.heads() == []

    async def test_what_is_not_reached_is_told_to_the_driver_by_name(self, site):
        site.assign("a", "b")
        site.drained()
        site.deliver("a")
        site.marked.clear()
        site.into.on_unreachable(site.lines.line("env/3", 1), "another life")
        assert (site.told, site.lines.unwanted) == ([], [])
        waiting = await begun(site.into.arrival.wait())
        site.into.on_unreachable(site.line, "refused")
        lost = pb.PeerLost(
            worker="env/3", attempt=2, reason="refused", units=pb.Keys(channel="units", branch=1, keys=["b"])
        )
        assert site.told == [pb.WorkerMessage(peer_lost=lost)]
        assert site.lines.unwanted == [("env/3", 2, "units/pull")]
        assert dict(site.channel.account_in.dropped) == {"PeerLost": 1}
        assert site.marked == [site.into]
        async with asyncio.timeout(5):
            await waiting
        site.into.on_unreachable(site.line, "refused")
        assert len(site.told) == 1, "nothing is lost twice"

    async def test_what_a_producer_does_not_have_is_missing(self, site):
        site.assign("a", "b")
        site.drained()
        site.into.on_missing(site.line, frames.Missing("units", [(1, "b"), (1, "a")]))
        (message,) = site.told
        assert (message.peer_lost.missing, message.peer_lost.reason) == (True, "it does not have b (any more)")
        assert sorted(message.peer_lost.units.keys) == ["a", "b"]
        assert dict(site.channel.account_in.dropped) == {"PeerLost": 2}

    async def test_a_producer_that_the_driver_gave_no_endpoint_of_is_lost(self, site):
        site.assign("a", producer="env/9")
        site.drained()
        (message,) = site.told
        said = message.peer_lost
        assert (said.worker, said.attempt, said.reason) == ("env/9", 0, "the driver named no endpoint for it")
        assert said.missing is False

    async def test_a_hello_says_what_is_held_and_a_welcome_states_credit_anew(self, site):
        (one,) = site.assign("a")
        site.deliver("a")
        site.drained()
        site.marked.clear()
        assert site.into.hello() == held(one)
        assert site.marked == [site.into]
        site.into.on_welcome(is_new_driver=False)
        assert site.marked == [site.into] * 2
        assert [said for said in site.drained() if isinstance(said, pb.Credit)] == [pb.Credit(channel="units", units=7)]

    async def test_another_plan_gives_another_credit(self, site):
        site.channel.on_spec(pb.ChannelSpec(micro_batch=3, depth=4, capacity_units=1, capacity_bytes=5))
        assert site.channel.micro_batch == 3
        assert site.marked == [site.into]
        assert site.drained() == [pb.Credit(channel="units", units=12)]
        site.into.state_credit_anew()
        assert site.marked == [site.into] * 2
        assert site.drained() == [pb.Credit(channel="units", units=12)]
        assert site.drained() == []
        site.channel.on_spec(pb.ChannelSpec(micro_batch=0))
        assert site.channel.micro_batch == 1

    @pytest.mark.parametrize(
        ("spec", "units"),
        [
            ({"micro_batch": 4, "depth": 2}, 8), ({"micro_batch": 0, "depth": 2}, 1),
            ({"micro_batch": 4, "depth": 3, "rounds": True}, 3),
            ({"micro_batch": 1 << 20, "depth": 1 << 20}, MAX_CREDIT),
        ],
    )  # fmt: skip
    async def test_a_consumers_credit_is_its_window(self, spec, units):
        assert Site(**spec).drained() == [pb.Credit(channel="units", units=units)]

    async def test_a_window_of_units_is_one_frame_of_its_own_to_the_driver(self, site):
        """Credit, when half of them are taken. That they are here, and done with, goes along with others."""
        assert site.drained() == [pb.Credit(channel="units", units=8)]
        site.assign(*"abcdefgh")
        for key in "abcdefgh":
            site.deliver(key)
        assert site.line.heads() == [frames.Pull("units", [(1, key) for key in "abcdefgh"])], "asked for at once"
        assert site.urgent == 0
        items = [site.channel.take_now() for _ in range(3)]
        assert site.urgent == 0
        items.append(site.channel.take_now())
        assert site.urgent == 1
        for item in items:
            site.channel.ack(item)
        assert site.urgent == 1
        *_, credit = site.drained()
        assert credit == pb.Credit(channel="units", units=4)
        site.channel.drop(site.channel.take_now(), "all alike")
        assert site.urgent == 2, "what a filter drops may end a step"

    async def test_a_role_that_waits_for_more_than_is_here_has_all_the_room_stated(self, site):
        site.drained()
        site.assign(*"abcdefgh")
        for key in "abcdefgh":
            site.deliver(key)
        for _ in range(3):
            site.channel.take_now()
        assert not [said for said in site.drained() if isinstance(said, pb.Credit)], "five of eight lie here"
        site.channel.on_spec(pb.ChannelSpec(micro_batch=6, depth=1, capacity_units=9, capacity_bytes=1 << 20))
        site.drained()
        batch = asyncio.create_task(site.channel.take_batch(at_least=6))
        await asyncio.sleep(0)
        assert site.urgent, "as it waits"
        assert site.drained() == [pb.Credit(channel="units", units=1)]
        site.assign("i")
        site.deliver("i")
        assert len(await asyncio.wait_for(batch, 5)) == 6
        assert site.into.given.waits == 0

    async def test_units_are_announced_by_micro_batches(self, site):
        site = Site("env", micro_batch=3, producer="env")
        for number in range(2):
            await site.channel.put({}, key=str(number), step=1, branch=1)
        assert site.urgent == 0
        await site.channel.put({}, key="2", step=1, branch=1)
        assert site.urgent == 1
        (said,) = site.drained()
        assert [unit.key for unit in said.units] == ["0", "1", "2"]

    async def test_who_is_not_the_consumer_has_no_credit_and_cannot_take(self):
        site = Site("env")
        assert site.drained() == []
        with pytest.raises(UserError, match=r"role 'env' cannot take like this .*: got not its consumer; use take\(\)"):
            await site.channel.take_round()
        for take in (site.channel.take, site.channel.take_batch):
            with pytest.raises(UserError, match=r"not its consumer; use take_round\(\)"):
                await take()

    @pytest.mark.parametrize(("producer", "wanted"), [("env", "role 'env'"), ("", "the flow alone")])
    async def test_who_is_not_the_producer_cannot_put(self, producer, wanted):
        site = Site("actor", producer=producer)
        with pytest.raises(UserError) as refused:
            await site.channel.put({}, key="a", step=1)
        assert str(refused.value) == (
            f"role 'actor' cannot put into channel 'units': got not its producer, wanted {wanted}; put what it makes "
            "into a channel that the flow gives it as the producer"
        )
        assert (len(site.out.shelf), site.marked) == (0, [])

    @pytest.mark.parametrize("rounds", [True, False])
    async def test_a_gang_takes_rounds_and_others_single_units(self, rounds):
        channel = Site(rounds=rounds).channel
        got = "its consumer, of rounds" if rounds else "its consumer, of single units"
        if rounds:
            for take in (channel.take, channel.take_batch):
                with pytest.raises(UserError, match=got):
                    await take()
            with pytest.raises(UserError, match=got):
                channel.take_now()
        else:
            with pytest.raises(UserError, match=got):
                await channel.take_round()

    @pytest.mark.parametrize(
        ("role", "rounds", "verb", "call"),
        [
            ("actor", False, "take", lambda channel: channel.take()),
            ("actor", False, "take", lambda channel: channel.take_batch()),
            ("actor", True, "take", lambda channel: channel.take_round()),
            ("env", False, "put", lambda channel: channel.put({}, key="a", step=1)),
        ],
    )
    async def test_a_role_that_has_not_said_that_it_is_ready_is_told_so_and_does_not_wait(
        self, role, rounds, verb, call
    ):
        site = Site(role, rounds=rounds)
        site.host.may_begin = lambda: False
        async with asyncio.timeout(10):
            with pytest.raises(UserError) as refused:
                await call(site.channel)
        assert str(refused.value) == (
            f"role {role!r} cannot {verb} yet in channel 'units': got {verb} before ctx.ready(), wanted a role that "
            f"has said that it is ready; call await ctx.ready() once it has loaded, before the first {verb}"
        )

    async def test_a_role_that_is_told_to_stop_before_it_was_ready_is_told_of_the_end(self, site):
        site.host.may_begin = lambda: False
        site.host.waits.stop("the job ends")
        with pytest.raises(ChannelClosed):
            await site.channel.take()

    async def test_a_payload_of_another_type_is_dropped_with_its_reason(self):
        site = Site(payload=PayloadType("int").text)
        site.assign("a", "b")
        for key in "ab":
            site.deliver(key, "text")
        with pytest.raises(PayloadMismatch):
            await site.channel.take()
        assert dict(site.channel.account_in.dropped) == {"PayloadMismatch": 1}
        assert (site.channel.account_in.items, site.channel.in_hand) == (0, 0)
        (dropped,) = [said for said in site.drained() if isinstance(said, pb.Drop)]
        assert (dropped.key, dropped.branch, dropped.reason) == ("a", 1, "PayloadMismatch")

    async def test_what_cannot_be_read_behind_others_of_its_batch_is_raised_by_the_next_call(self):
        site = Site(payload=PayloadType("int").text)
        site.assign("a", "b", "c")
        for key, value in (("a", 1), ("b", "text"), ("c", 3)):
            site.deliver(key, value)
        assert [item.key for item in await site.channel.take_batch()] == ["a"]
        with pytest.raises(PayloadMismatch):
            await site.channel.take_batch()
        assert [item.key for item in await site.channel.take_batch()] == ["c"]

    async def test_a_batch_that_begins_with_what_cannot_be_read_raises_at_once(self):
        site = Site(payload=PayloadType("int").text)
        site.assign("a")
        site.deliver("a", "text")
        with pytest.raises(PayloadMismatch):
            await site.channel.take_batch()

    async def test_a_batch_is_at_most_a_micro_batch_and_waits_for_no_more_than_that(self, site):
        site.assign(*"abcdef")
        for key in "abcdef":
            site.deliver(key)
        assert [item.key for item in await site.channel.take_batch(at_least=99)] == list("abcd")
        assert [item.key for item in await site.channel.take_batch(at_least=0)] == list("ef")
        waiting = await begun(site.channel.take_batch())
        assert [name for name, _ in site.host.waits.current()] == ["a micro-batch of channel 'units' for actor/0"]
        waiting.cancel()

    async def test_a_round_is_taken_whole(self):
        site = Site(rounds=True)
        units = [unit("a", step=7), unit("b", step=7)]
        site.into.on_round(
            pb.Round(
                channel="units", step=7, branch=1, number=2, last=True, units=units, total_weight=9.0,
                producers=[THERE], ended=[GONE_AT_7],
            )
        )  # fmt: skip
        taking = await begun(site.channel.take_round())
        assert [name for name, _ in site.host.waits.current()] == ["a round of channel 'units' for actor/0"]
        site.deliver("a", 1)
        site.deliver("b", 2)
        part: Round = await taking
        assert (part.step, part.branch, part.number, part.last, part.total_weight) == (7, 1, 2, True, 9.0)
        assert [item.payload for item in part.items] == [1, 2]
        assert (site.channel.account_in.rounds, site.channel.account_in.step) == (1, 7)
        site.channel.drop(part.items[0], "too long")
        assert site.into.ended.take(7, branch=1) == [GONE_AT_7, pb.Ended(key="a", tickets=["a"], units=1)]

    async def test_an_empty_round_wakes_whoever_waits_for_one(self):
        site = Site(rounds=True)
        taking = await begun(site.channel.take_round())
        site.into.on_round(pb.Round(channel="units", step=7, branch=1, number=1))
        async with asyncio.timeout(5):
            assert (await taking).items == ()

    async def test_a_rank_that_cannot_read_a_part_of_its_round_goes_no_further(self):
        site = Site(rounds=True, payload=PayloadType("int").text)
        site.into.on_round(pb.Round(channel="units", step=7, branch=1, units=[unit("a")], producers=[THERE]))
        site.deliver("a", "text")
        with pytest.raises(PayloadMismatch) as raised:
            await site.channel.take_round()
        assert site.failed == [raised.value]

    async def test_a_branch_that_is_cancelled_marks_what_was_taken_and_leaves_out_the_rest(self, site):
        site.assign("a", "b")
        site.assign("later", branch=2)
        for key, branch in (("a", 1), ("b", 1), ("later", 2)):
            site.deliver(key, key, branch=branch)
        taken = await site.channel.take()
        site.marked.clear()
        site.channel.on_cancel(pb.Cancel(branch=1))
        assert taken.cancelled
        assert site.marked == [site.into]
        rest = await site.channel.take()
        assert (rest.key, rest.cancelled, site.channel.take_now()) == ("later", False, None)

    async def test_who_leaves_lets_go_of_what_it_has_without_a_word(self, site):
        site.assign("a")
        site.deliver("a")
        item = await site.channel.take()
        site.drained()
        site.host.waits.stop("SIGTERM")
        site.channel.drop(item, "stopping")
        assert [said for said in site.drained() if not isinstance(said, pb.Credit)] == []
        assert dict(site.channel.account_in.dropped) == {"stopping": 1}

    async def test_what_waits_here_is_this_ends_level(self, site, monkeypatch):
        assert site.channel.account_in.level() == Level(0, 0, 0.0)
        monkeypatch.setattr(consuming, "monotonic", lambda: 50.0)
        site.assign("a", "b")
        monkeypatch.setattr(consuming, "monotonic", lambda: 57.0)
        assert site.channel.account_in.level() == Level(2, 154, 7.0)

    async def test_items_come_until_the_worker_stops(self, site):
        got = list[Any]()

        async def work() -> None:
            async for item in site.channel:
                got.append(item.key)

        working = await begun(work())
        assert [name for name, _ in site.host.waits.current()] == ["a unit of channel 'units' for actor/0"]
        site.assign("a")
        site.deliver("a")
        await begun(asyncio.sleep(0))
        site.host.waits.stop("SIGTERM")
        await working
        assert got == ["a"]
        assert [span.kind for span in site.host.recorder.flush()] == ["wait_data"] * 2
        assert site.host.recorder.open == set()
        with pytest.raises(ChannelClosed):
            await site.channel.take()


class TestProducing:
    async def test_what_is_put_is_announced_sent_to_who_asks_and_forgotten_when_released(self):
        site = Site("env")
        await site.channel.put({"x": 1}, key="a", step=4, branch=2, version=PolicyVersion(2, 5), weight=3.0)
        assert site.marked == [site.out]
        size = Message(b"", {"x": 1}).nbytes
        made = pb.Unit(
            key="a", branch=2, step=4, weight=3.0, bytes=size, version=pb.PolicyVersion(branch=2, number=5),
            producer="env/0",
        )  # fmt: skip
        assert site.drained() == [pb.Announce(channel="units", units=[made])]
        assert site.drained() == []
        assert site.out.hello() == held(made)
        account = site.channel.account_out
        assert (account.items, account.bytes) == (1, size)
        level = account.level()
        assert (level.depth, level.bytes) == (1, size)
        site.out.on_pull(site.line, frames.Pull("units", [(2, "a"), (2, "b"), (1, "a")]))
        (payload, message), (missing, _) = site.line.said
        assert (payload, message.value()) == (frames.Payload("units", 2, "a"), {"x": 1})
        assert missing == frames.Missing("units", [(2, "b"), (1, "a")])
        site.line.said.clear()
        site.out.on_pull(site.line, frames.Pull("units", [(2, "a")]))
        assert site.line.heads() == [frames.Payload("units", 2, "a")]
        waiting = await begun(site.out.room.wait())
        site.out.on_released([UnitId(2, "a")])
        assert site.out.hello() == []
        async with asyncio.timeout(5):
            await waiting

    async def test_what_a_hello_has_said_is_not_announced_again(self):
        site = Site("env")
        await site.channel.put(1, key="a", step=4)
        assert len(site.out.hello()) == 1
        assert site.drained() == []

    async def test_what_is_made_again_and_kept_already_is_counted_and_not_announced(self):
        site = Site("env")
        for _ in range(2):
            await site.channel.put(1, key="a", step=4)
        assert (site.channel.account_out.items, site.channel.account_out.duplicates) == (1, 1)
        (announced,) = site.drained()
        assert len(announced.units) == 1

    async def test_what_cannot_be_sent_is_refused_where_it_is_put_and_counted(self):
        site = Site("env", payload=PayloadType("str").text)
        site.host.link_settings = cast(Any, SimpleNamespace(max_message_bytes=HEAD_BYTES + 4 + 50))
        with pytest.raises(PayloadMismatch):
            await site.channel.put(1, key="a", step=4)
        with pytest.raises(MessageTooLarge, match="wanted at most 50; send it in parts"):
            await site.channel.put("x" * 100, key="b", step=4)
        with pytest.raises(LabelError):
            await site.channel.put("x", key="c", step=4, weight=-1.0)
        assert dict(site.channel.account_out.refused) == {"PayloadMismatch": 1, "MessageTooLarge": 1, "LabelError": 1}
        assert site.out.hello() == []
        await site.channel.put("x", key="d", step=4)

    @pytest.mark.parametrize(("spare", "fits"), [(0, True), (-1, False)])
    async def test_a_message_has_room_for_its_head_and_four_bytes_of_each_character_of_its_key(self, spare, fits):
        site = Site("env")
        bound = HEAD_BYTES + 4 * 3 + 100 + spare
        site.host.link_settings = cast(Any, SimpleNamespace(max_message_bytes=bound))
        if fits:
            site.host.check_size(100, channel="units", key="key")
        else:
            with pytest.raises(MessageTooLarge, match="got 100 bytes, wanted at most 99"):
                site.host.check_size(100, channel="units", key="key")

    async def test_parents_are_finished_when_what_was_made_of_them_is_held_or_released(self):
        site = Site("env")
        known: dict[str, Any] = {"channel": "units", "payload": 1, "step": 4, "branch": 1, "version": VERSION}
        parents = [Item(key=cast(Any, key), source=WorkerId("x"), **known) for key in ("p", "q")]
        for key, parent in zip("ab", parents, strict=True):
            await site.channel.put(1, key=key, parents=[parent])
            site.channel.ack(parent)
        units = site.drained()[0].units
        assert [(one.key, one.step, one.branch) for one in units] == [("a", 4, 1), ("b", 4, 1)]
        site.out.on_held([UnitId(1, "a")])
        assert site.finished == parents[:1]
        site.out.on_released([UnitId(1, "b")])
        assert site.finished == parents

    @pytest.mark.parametrize("end", ["ack", "drop"])
    async def test_nothing_is_put_of_a_parent_that_has_ended(self, end):
        site = Site("actor", producer="actor")
        site.assign("p", producer="")
        parent = await site.channel.take()
        site.channel.ack(parent) if end == "ack" else site.channel.drop(parent, "why")
        with pytest.raises(UserError) as refused:
            await site.channel.put(1, key="a", parents=[parent])
        assert str(refused.value) == (
            "unit 'a' of channel 'units' is made of what has ended: got item 'p' of channel 'units', acknowledged or "
            "dropped before, wanted parents that the role has in hand; put what is made of an item, then ack or drop it"
        )
        assert (len(site.out._parents), len(site.out.shelf)) == (0, 0)

    async def test_a_branch_that_is_cancelled_is_neither_kept_nor_announced(self):
        site = Site("env")
        for branch in (0, 1, 2):
            await site.channel.put(1, key=f"k{branch}", step=4, branch=branch)
        waiting = await begun(site.out.room.wait())
        site.channel.on_cancel(pb.Cancel(branch=1))
        assert [one.unit.key for one in site.out.hello()] == ["k2"]
        async with asyncio.timeout(5):
            await waiting

    async def test_of_what_was_not_announced_yet_a_cancelled_branch_is_left_out(self):
        site = Site("env")
        for branch in (0, 1, 2):
            await site.channel.put(1, key=f"k{branch}", step=4, branch=branch)
        site.channel.on_cancel(pb.Cancel(branch=1))
        assert [one.key for one in site.drained()[0].units] == ["k2"]

    async def test_more_room_lets_in_whoever_waits(self):
        site = Site("env", capacity_units=1)
        await site.channel.put(1, key="a", step=4)
        putting = await begun(site.channel.put(1, key="b", step=4))
        assert not putting.done()
        site.channel.on_spec(pb.ChannelSpec(capacity_units=2, capacity_bytes=1 << 20))
        async with asyncio.timeout(5):
            await putting
        assert [span.kind for span in site.host.recorder.flush()] == ["wait_data"]
        assert site.channel.account_out.wait_s > 0.0

    async def test_a_unit_of_which_nobody_knows_a_version_is_of_the_oldest_that_its_step_allows(self):
        site = Site("env")
        await site.channel.put(1, key="a", step=4)
        (announced,) = site.drained()
        assert announced.units[0].version == pb.PolicyVersion(number=3)
        assert announced.units[0].weight == 1.0
