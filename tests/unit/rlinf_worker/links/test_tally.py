"""What a worker's links carried: by kind, with those that have ended, and how they ended. test_link_numbers.py has the
same with real links."""

from typing import Any, cast

from rlinf_worker.links.errors import LinkBroken, LinkClosed
from rlinf_worker.links.link import Counters, Link, Tally


class FakeLink:
    def __init__(self, kind: str, **counted: Any) -> None:
        self.kind, self.counters, self.broken = kind, Counters(**counted), None  # type: str, Counters, Any


def link(kind: str, **counted: Any) -> Link:
    return cast(Link, FakeLink(kind, **counted))


def test_what_ended_links_carried_stays_and_is_added_to_what_the_living_carry():
    tally = Tally()
    shm, first = link("shm", sent_messages=2, refused_messages=1), link("tcp", sent_messages=5, bulk_messages=3)
    for each in (shm, first):
        tally.began(each)
    assert tally.open() == {"shm": 1, "tcp": 1}
    cast(Any, first).broken = LinkBroken("b", "pulled out")
    tally.ended(first)
    tally.ended(first)  # told twice, counted once
    second = link("tcp", sent_messages=1, send_wait_s=0.5)
    tally.began(second)
    second.counters.sent_messages += 1
    cast(Any, shm).broken = LinkClosed("b", "said goodbye")
    tally.ended(shm)
    assert tally.open() == {"shm": 0, "tcp": 1}
    totals = tally.totals()
    assert totals["shm"] == Counters(sent_messages=2, refused_messages=1)
    assert totals["tcp"] == Counters(sent_messages=7, bulk_messages=3, send_wait_s=0.5)
    assert tally.breaks == {"tcp": 1}, "the other one was closed in good order"
    assert first.counters == Counters(sent_messages=5, bulk_messages=3), "a link's own account is left as it is"
