"""The time that calls of `put` and `take` wait, as the metrics have it."""

import asyncio

import pytest

from rlinf_worker.channels import account
from rlinf_worker.channels.account import Account
from tests.builders_driver import Clock


async def test_each_wait_counts_also_beside_others_while_it_lasts_and_when_it_fails(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(account, "monotonic", clock)
    kept, ends = Account(channel="c", side="producer"), [asyncio.Event() for _ in range(3)]

    async def put(end: asyncio.Event, *, fails: bool = False) -> None:
        with kept.waiting():
            await end.wait()
            if fails:
                raise TimeoutError

    calls = [asyncio.create_task(put(end, fails=end is ends[2])) for end in ends]
    seen = []
    for step in range(3):
        await asyncio.sleep(0)
        clock.now += 1
        seen.append(kept.wait_s)
        ends[step].set()
        await asyncio.wait([calls[step]])
        seen.append(kept.wait_s)
    with pytest.raises(TimeoutError):
        await calls[2]
    assert seen == [3, 3, 5, 5, 6, 6], "it never falls"


def test_reasons_of_a_roles_own_are_so_many_series_and_no_more():
    """One that names each item would have the worker keep a number for each, for as long as it lives."""
    kept = Account(channel="c", side="consumer")
    for n in range(1000):
        kept.drop(f"prompt {n} is too long")
    kept.drop("prompt 31 is too long")
    assert (len(kept.dropped), sum(kept.dropped.values())) == (33, 1001)
    assert (kept.dropped["prompt 31 is too long"], kept.dropped["others"]) == (2, 968)
    assert Account(channel="c", side="consumer").drop("x" * 101) == "others"
