"""A worker's ends of channels: who asks, answers, gives or takes by a channel's spec, and which end hears of a peer."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest

from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_worker.channels.host import Host
from rlinf_worker.channels.waiting import Waits
from rlinf_worker.links import frames
from rlinf_worker.runtime.ends import ChannelEnds
from rlinf_worker.spans import Recorder

PEER, MESSAGE = Mock(), Mock()


class Site:
    """Ends of role `env`; the test is its links. What `add` makes listens in the place of an end."""

    def __init__(self) -> None:
        self.links: Any = Mock(handlers={}, on_up=[], on_unreachable=[], on_superseded=[])
        self.weights: Any = Mock()
        self.host = Host(
            worker="env/0",
            role="env",
            peers=self.links,
            waits=Waits(),
            recorder=Recorder(),
            tell=lambda message: None,
            mark=lambda source, *, can_wait=False: None,
            finish_item=lambda item: None,
            fatal=lambda error: None,
        )
        self.ends = ChannelEnds(self.host, self.weights)

    def add(self, kind: str, name: str, *, taken: int = 0, waiting: int = 0, in_hand: int = 0) -> Any:
        end = Mock(in_hand=in_hand, account_in=SimpleNamespace(items=taken), inbox=[0] * waiting)
        end.into.given.waiting = [0] * waiting
        end.out.shelf = Mock(spill=lambda: 0, __len__=lambda self: 0)
        getattr(self.ends, kind)[name] = end
        return end

    def hear(self, frame: Any) -> None:
        self.links.handlers[type(frame)](PEER, frame, MESSAGE)


@pytest.fixture
async def site():
    return Site()


def made(ends: ChannelEnds) -> dict[str, list[str]]:
    return {kind: list(getattr(ends, kind)) for kind in ("askers", "answerers", "queues")}


@pytest.mark.parametrize(
    ("mode", "producer", "consumer", "kind"),
    [("Cycle", "env", "x", "askers"), ("Cycle", "x", "env", "answerers"), ("Queue", "env", "x", "queues"),
     ("Queue", "x", "env", "queues")],
)  # fmt: skip
async def test_an_end_is_what_the_spec_says_of_this_role(site, mode, producer, consumer, kind):
    site.ends.open(pb.ChannelSpec(name="c", mode=mode, producer=producer, consumer=consumer, depth=1, micro_batch=1))
    assert made(site.ends) == {"askers": [], "answerers": [], "queues": []} | {kind: ["c"]}


FRAMES: dict[str, Any] = {
    "open": frames.Open(conversation=7, channel="c", unanswered=[]),
    "pull": frames.Pull(channel="c", units=[]),
    "payload": frames.Payload(channel="c", branch=0, key="k"),
    "missing": frames.Missing(channel="c", units=[]),
}


async def test_what_a_peer_says_reaches_the_end_of_that_channel(site):
    answerer, queue = site.add("answerers", "c"), site.add("queues", "c")
    others = [site.add(kind, "other") for kind in ("answerers", "queues", "askers")]
    for end in (answerer, queue, *others):
        end.reset_mock()
    for frame in FRAMES.values():
        site.hear(frame)
    assert answerer.mock_calls == [call.on_open(PEER, FRAMES["open"])]
    assert queue.mock_calls == [
        call.out.on_pull(PEER, FRAMES["pull"]),
        call.into.on_payload(FRAMES["payload"], MESSAGE),
        call.into.on_missing(PEER, FRAMES["missing"]),
    ]
    assert all(end.mock_calls == [] for end in others)


async def test_what_a_peer_says_of_a_channel_that_is_not_there_is_left_out(site):
    for frame in FRAMES.values():
        site.hear(frame)


async def test_ends_hear_of_peers_that_come_go_and_are_replaced(site):
    ends = {kind: [site.add(kind, name) for name in "ab"] for kind in ("queues", "askers", "answerers")}
    for end in (one for of_kind in ends.values() for one in of_kind):
        end.reset_mock()
    for listening, arguments in (
        (site.links.on_up, ()), (site.links.on_unreachable, ("refused",)), (site.links.on_superseded, ()),
    ):  # fmt: skip
        (listener,) = listening
        listener(PEER, *arguments)
    assert site.weights.mock_calls == [call.on_up(PEER)]
    for queue in ends["queues"]:
        assert queue.mock_calls == [call.into.on_up(PEER), call.into.on_unreachable(PEER, "refused")]
    for asker in ends["askers"]:
        assert asker.mock_calls == [call.on_unreachable(PEER), call.on_superseded(PEER)]
    for answerer in ends["answerers"]:
        assert answerer.mock_calls == [call.on_superseded(PEER)]


async def test_an_item_is_finished_by_its_queue(site):
    queue, other = site.add("queues", "c"), site.add("queues", "other")
    queue.reset_mock()
    other.reset_mock()
    item: Any = SimpleNamespace(channel="c")
    site.ends.finish_item(item)
    stranger: Any = SimpleNamespace(channel="gone")
    site.ends.finish_item(stranger)
    assert (queue.mock_calls, other.mock_calls) == ([call.finish(item)], [])


async def test_all_shelves_count_for_what_is_unfinished_and_for_what_a_spill_moves(site):
    for name, size, moved in (("a", 2, 10), ("b", 3, 5)):
        shelf = Mock(spill=lambda moved=moved: moved, __len__=lambda self, size=size: size)
        site.add("queues", name).out.shelf = shelf
    assert (site.ends.unfinished, site.ends.spill()) == (5, 15)


@pytest.mark.parametrize(
    ("ends", "has_input"),
    [
        ([], True),
        ([("queues", {})], True),
        ([("queues", {"taken": 1})], False),
        ([("queues", {"taken": 1, "waiting": 1})], True),
        ([("askers", {"taken": 1})], False),
        ([("askers", {"taken": 1, "waiting": 1})], True),
        ([("answerers", {"taken": 1})], False),
        ([("answerers", {"taken": 1, "waiting": 1})], True),
        ([("queues", {"taken": 1}), ("queues", {"taken": 1, "in_hand": 1})], True),
        ([("queues", {"taken": 1}), ("answerers", {"taken": 1, "in_hand": 1})], True),
        ([("queues", {"taken": 1}), ("queues", {"waiting": 1})], False),
        ([("queues", {"taken": 1}), ("askers", {"waiting": 1}), ("answerers", {"waiting": 1})], False),
        ([("queues", {"taken": 1}), ("askers", {"taken": 1, "waiting": 1})], True),
    ],
)
async def test_a_role_has_input_where_an_end_that_is_in_use_has_something_for_it(site, ends, has_input):
    for number, (kind, fields) in enumerate(ends):
        site.add(kind, str(number), **fields)
    assert site.ends.has_input is has_input
