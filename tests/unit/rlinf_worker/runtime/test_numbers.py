"""A worker's numbers for /metrics: every one by its name and labels, and none of what a role does not have."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from rlinf_worker.channels.account import Account, Level
from rlinf_worker.links.link import Counters
from rlinf_worker.runtime import numbers


def test_an_end_of_a_channel_tells_all_that_it_has_done():
    account = Account(channel="units", side="producer", items=3, bytes=40, resent=2, duplicates=1, _waited_s=1.5)
    account.level = lambda: Level(depth=4, bytes=50, oldest_s=6.5)
    account.refused.update({"UserError": 7})
    account.dropped.update({"stale": 8})
    at = ("channel=units", "side=producer")
    assert list(numbers.of_account(account)) == [
        ("rlinf_channel_items_total", at, 3.0),
        ("rlinf_channel_bytes_total", at, 40.0),
        ("rlinf_channel_wait_seconds_total", at, 1.5),
        ("rlinf_channel_resent_items_total", at, 2.0),
        ("rlinf_channel_duplicate_items_total", at, 1.0),
        ("rlinf_channel_depth", at, 4.0),
        ("rlinf_channel_held_bytes", at, 50.0),
        ("rlinf_channel_oldest_seconds", at, 6.5),
        ("rlinf_channel_refused_items_total", (*at, "reason=UserError"), 7.0),
        ("rlinf_channel_dropped_items_total", (*at, "reason=stale"), 8.0),
    ]


@pytest.mark.parametrize(
    "done",
    [
        {"items": 1},
        {"_waited_s": 0.5},
        {"dropped": Counter(stale=1)},
        {"refused": Counter(UserError=1)},
        {"level": lambda: Level(depth=1)},
    ],
)
def test_an_end_at_which_anything_has_happened_is_told_of(done: dict[str, Any]):
    assert list(numbers.of_account(Account(channel="units", side="consumer", **done)))


def test_an_end_that_a_role_does_not_have_is_not_told_of():
    assert list(numbers.of_account(Account(channel="units", side="consumer"))) == []


def peers_with(counters: Counters, **known: Any) -> Any:
    tally = SimpleNamespace(
        open=lambda: Counter(shm=2), totals=lambda: {"shm": counters}, breaks=known.pop("breaks", Counter())
    )
    given = {"around_shm": 0, "dials": 0, "refused": {}} | known
    listener = SimpleNamespace(refused=given.pop("refused"))
    return SimpleNamespace(tally=tally, listener=listener, **given)


USUAL = [
    ("rlinf_links", ("kind=shm",), 2.0),
    ("rlinf_link_messages_total", ("kind=shm", "direction=sent"), 3.0),
    ("rlinf_link_messages_total", ("kind=shm", "direction=received"), 4.0),
    ("rlinf_link_bytes_total", ("kind=shm", "direction=sent"), 5.0),
    ("rlinf_link_bytes_total", ("kind=shm", "direction=received"), 6.0),
    ("rlinf_link_send_wait_seconds_total", ("kind=shm",), 7.5),
]


def carried(**more: int) -> Counters:
    usual: dict[str, Any] = {"sent_messages": 3, "received_messages": 4, "sent_bytes": 5, "received_bytes": 6}
    return Counters(**usual, send_wait_s=7.5, **more)


def test_links_without_trouble_tell_what_they_have_carried_and_no_zeros():
    assert list(numbers.of_links(peers_with(carried()))) == USUAL


def test_links_tell_of_every_kind_of_trouble():
    counters = carried(bulk_messages=8, device_messages=9, refused_messages=10)
    peers = peers_with(counters, breaks=Counter(shm=1), around_shm=11, refused={"certificate": 12})
    assert list(numbers.of_links(peers)) == [
        *USUAL,
        ("rlinf_link_bulk_messages_total", ("kind=shm",), 8.0),
        ("rlinf_link_device_messages_total", ("kind=shm",), 9.0),
        ("rlinf_link_refused_messages_total", ("kind=shm",), 10.0),
        ("rlinf_link_breaks_total", ("kind=shm",), 1.0),
        ("rlinf_link_fallbacks_total", ("reason=shm",), 11.0),
        ("rlinf_link_refused_dials_total", ("reason=certificate",), 12.0),
    ]


@pytest.mark.parametrize(("streams", "connections"), [(0, 0.0), (1, 0.0), (2, 1.0), (5, 4.0)])
def test_a_worker_tells_of_its_channels_time_weights_driver_and_links(streams, connections):
    weights = SimpleNamespace(
        seconds=1.5,
        published=2,
        account_in=SimpleNamespace(items=3),
        sender=SimpleNamespace(sent_bytes=4),
        subscribers=SimpleNamespace(taken_over=5, late=6),
        receiver=SimpleNamespace(corrupt=7, refused=8, retries=9, reroutes=10),
        checksums=SimpleNamespace(conflicts=11),
    )
    session: Any = SimpleNamespace(weights=weights, stale_instructions=12)
    driver: Any = SimpleNamespace(streams=streams, frames=13, dropped=14)
    recorder: Any = SimpleNamespace(so_far=lambda: {"compute": 15.5}, exclusive={"other": 16.5}, instrument_s=17.5)
    peers = peers_with(carried(), dials=18)
    accounts = [Account(channel="a", side="producer", items=1), Account(channel="b", side="consumer")]
    told = list(numbers.of_worker(session, driver=driver, peers=peers, recorder=recorder, accounts=accounts))
    assert told == [
        *numbers.of_account(accounts[0]),
        ("rlinf_worker_seconds_total", ("kind=compute",), 15.5),
        ("rlinf_worker_account_seconds_total", ("kind=other",), 16.5),
        ("rlinf_worker_instrument_seconds_total", (), 17.5),
        ("rlinf_weights_seconds_total", (), 1.5),
        ("rlinf_weights_versions_total", ("side=published",), 2.0),
        ("rlinf_weights_versions_total", ("side=received",), 3.0),
        ("rlinf_weights_sent_bytes_total", (), 4.0),
        ("rlinf_weights_refused_total", ("reason=checksum",), 7.0),
        ("rlinf_weights_refused_total", ("reason=schema",), 8.0),
        ("rlinf_weights_retries_total", ("reason=checksum",), 9.0),
        ("rlinf_weights_retries_total", ("reason=holder_lost",), 10.0),
        ("rlinf_weights_retries_total", ("reason=holder_slow",), 5.0),
        ("rlinf_weights_late_total", (), 6.0),
        ("rlinf_weights_conflicts_total", (), 11.0),
        ("rlinf_worker_driver_connections_total", (), connections),
        ("rlinf_worker_driver_batches_total", (), 13.0),
        ("rlinf_worker_stale_instructions_total", (), 12.0),
        ("rlinf_worker_dials_total", (), 18.0),
        *USUAL,
        ("rlinf_worker_reports_dropped_total", (), 14.0),
    ]
