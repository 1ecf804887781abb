"""Units that nobody needs, whose holder is told, and what a holder leaves of a unit for whoever is given it next."""

import json
from typing import Any

import pytest

from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_api.errors import UserError
from rlinf_worker.channels.protocol import PARTIAL_BYTES
from rlinf_worker.queues.units import UnitInfo
from tests.unit.rlinf_worker.queues.test_queue_in_memory import Site, unit


@pytest.fixture
async def site():
    return Site()


async def taken(site: Site, *keys: str, partial: bytes = b"") -> list[Any]:
    units = [unit(key) for key in keys]
    for one in units:
        one.partial = partial
    site.into.on_assign(pb.Assign(channel="units", units=units, producers=[pb.Endpoint(worker="env/3", attempt=2)]))
    for key in keys:
        site.deliver(key, {"n": 1})
    items = [await site.channel.take() for _ in keys]
    site.drained()
    return items


async def test_of_single_units_those_alone_are_cancelled_and_their_holder_is_told_once(site):
    first, second = await taken(site, "a", "b")
    told = list[str]()
    for item in (first, second):
        item.on_cancel(lambda key=item.key: told.append(key))
    site.channel.on_cancel(pb.Cancel(branch=1, keys=["a", "z"]))
    site.channel.on_cancel(pb.Cancel(branch=1, keys=["a"]))
    assert (told, first.cancelled, second.cancelled) == (["a"], True, False)
    first.on_cancel(lambda: told.append("late"))
    assert told == ["a", "late"], "at once, of what is cancelled already"
    site.channel.drop(first, "cancelled")
    site.channel.on_cancel(pb.Cancel(branch=1))
    assert (told, second.cancelled) == (["a", "late", "b"], True)


async def test_who_has_acknowledged_an_item_is_told_nothing_more_of_it(site):
    [item] = await taken(site, "a")
    site.channel._parents.seal = lambda item: False  # what was made of it is not held yet
    item.on_cancel(lambda: pytest.fail("it is through with it"))
    site.channel.ack(item)
    site.channel.on_cancel(pb.Cancel(branch=1))


async def test_a_cancelled_unit_that_is_on_its_way_or_here_is_never_handed_out(site):
    site.assign("a", "b", "c")
    site.deliver("b")
    site.channel.on_cancel(pb.Cancel(branch=1, keys=["a", "b"]))
    site.deliver("a")
    site.deliver("c")
    assert (await site.channel.take()).key == "c"
    assert site.channel.take_now() is None
    assert site.into.given.waiting == 0, "and room is made"


async def test_what_is_kept_of_a_unit_is_told_in_the_next_batch_the_last_word_alone(site):
    [item] = await taken(site, "a")
    assert site.channel.keep(item, {"ids": [1]})
    assert site.channel.keep(item, {"ids": [1, 2]})
    said = pb.Partial(channel="units", key="a", branch=1, json=b'{"ids":[1,2]}')
    assert site.drained() == [said]
    assert site.drained() == []
    site.into.hello()
    site.into.on_welcome(is_new_driver=True)
    assert said in site.drained(), "another driver knows of none"
    site.channel.ack(item)
    site.into.hello()
    site.into.on_welcome(is_new_driver=True)
    assert not any(isinstance(word, pb.Partial) for word in site.drained()), "it is finished"


async def test_what_another_has_kept_comes_with_the_unit_and_is_told_to_a_new_driver(site):
    [item] = await taken(site, "a", partial=b'{"ids":[1,2]}')
    assert item.partial == {"ids": [1, 2]}
    site.into.hello()
    site.into.on_welcome(is_new_driver=False)
    assert pb.Partial(channel="units", key="a", branch=1, json=b'{"ids":[1,2]}') in site.drained()
    [other] = await taken(site, "b")
    assert other.partial is None


async def test_of_a_branch_that_is_dead_nothing_is_kept(site):
    [item] = await taken(site, "a")
    site.channel.keep(item, [1])
    site.channel.on_cancel(pb.Cancel(branch=1))
    site.channel.keep(item, [2])
    assert not any(isinstance(word, pb.Partial) for word in site.drained())


async def test_what_is_too_large_is_left_out_and_what_was_kept_stands(site):
    [item] = await taken(site, "a")
    most = "x" * (PARTIAL_BYTES - 2)
    assert site.channel.keep(item, most)
    assert not site.channel.keep(item, most + "y")
    [said] = site.drained()
    assert len(said.json) == PARTIAL_BYTES
    assert site.channel.account_in.dropped == {"PartialTooLarge": 1}
    with pytest.raises(UserError, match="what there is of 'a' cannot be kept"):
        site.channel.keep(item, {1, 2})


def test_in_no_other_word_of_a_unit_there_is_what_was_kept():
    found = UnitInfo.from_pb(pb.Unit(key="a", partial=json.dumps([1]).encode()))
    assert (found.partial, found.to_pb().partial) == (b"[1]", b"")
