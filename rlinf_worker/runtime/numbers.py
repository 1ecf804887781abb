"""The worker's numbers for /metrics: absolute counters by name and labels, read twice a second by the agent's link.

Names are `rlinf_*` with base units; the agent adds job, role and worker.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rlinf_worker.channels.account import Account
from rlinf_worker.links.peers import PeerLinks
from rlinf_worker.runtime.agent_link import Number
from rlinf_worker.runtime.session import WorkerSession
from rlinf_worker.spans import Recorder
from rlinf_worker.uplink.dialling import Uplink


def of_account(account: Account) -> Iterator[Number]:
    labels = (f"channel={account.channel}", f"side={account.side}")
    level = account.level()
    if not (account.items or account.wait_s or account.dropped or account.refused or level.depth):
        return  # the end that this role does not have
    yield "rlinf_channel_items_total", labels, float(account.items)
    yield "rlinf_channel_bytes_total", labels, float(account.bytes)
    yield "rlinf_channel_wait_seconds_total", labels, account.wait_s
    yield "rlinf_channel_resent_items_total", labels, float(account.resent)
    yield "rlinf_channel_duplicate_items_total", labels, float(account.duplicates)
    yield "rlinf_channel_depth", labels, float(level.depth)
    yield "rlinf_channel_held_bytes", labels, float(level.bytes)
    yield "rlinf_channel_oldest_seconds", labels, level.oldest_s
    for reason, count in account.refused.items():
        yield "rlinf_channel_refused_items_total", (*labels, f"reason={reason}"), float(count)
    for reason, count in account.dropped.items():
        yield "rlinf_channel_dropped_items_total", (*labels, f"reason={reason}"), float(count)


def of_links(peers: PeerLinks) -> Iterator[Number]:
    for kind, count in peers.tally.open().items():
        yield "rlinf_links", (f"kind={kind}",), float(count)
    for kind, counters in peers.tally.totals().items():
        label = f"kind={kind}"
        yield "rlinf_link_messages_total", (label, "direction=sent"), float(counters.sent_messages)
        yield "rlinf_link_messages_total", (label, "direction=received"), float(counters.received_messages)
        yield "rlinf_link_bytes_total", (label, "direction=sent"), float(counters.sent_bytes)
        yield "rlinf_link_bytes_total", (label, "direction=received"), float(counters.received_bytes)
        yield "rlinf_link_send_wait_seconds_total", (label,), counters.send_wait_s
        for name, value in (
            ("rlinf_link_bulk_messages_total", counters.bulk_messages),
            ("rlinf_link_device_messages_total", counters.device_messages),
            ("rlinf_link_refused_messages_total", counters.refused_messages),
            ("rlinf_link_breaks_total", peers.tally.breaks[kind]),
        ):
            if value:
                yield name, (label,), float(value)
    if peers.around_shm:
        yield "rlinf_link_fallbacks_total", ("reason=shm",), float(peers.around_shm)
    for reason, count in peers.listener.refused.items():
        yield "rlinf_link_refused_dials_total", (f"reason={reason}",), float(count)


def of_worker(
    session: WorkerSession, *, driver: Uplink[Any, Any], peers: PeerLinks, recorder: Recorder, accounts: list[Account]
) -> Iterator[Number]:
    for account in accounts:
        yield from of_account(account)
    for kind, seconds in recorder.so_far().items():
        yield "rlinf_worker_seconds_total", (f"kind={kind}",), seconds
    for kind, seconds in recorder.exclusive.items():
        yield "rlinf_worker_account_seconds_total", (f"kind={kind}",), seconds
    yield "rlinf_worker_instrument_seconds_total", (), recorder.instrument_s
    weights = session.weights
    yield "rlinf_weights_seconds_total", (), weights.seconds
    yield "rlinf_weights_versions_total", ("side=published",), float(weights.published)
    yield "rlinf_weights_versions_total", ("side=received",), float(weights.account_in.items)
    yield "rlinf_weights_sent_bytes_total", (), float(weights.sender.sent_bytes)
    yield "rlinf_weights_refused_total", ("reason=checksum",), float(weights.receiver.corrupt)
    yield "rlinf_weights_refused_total", ("reason=schema",), float(weights.receiver.refused)
    yield "rlinf_weights_retries_total", ("reason=checksum",), float(weights.receiver.retries)
    yield "rlinf_weights_retries_total", ("reason=holder_lost",), float(weights.receiver.reroutes)
    yield "rlinf_weights_retries_total", ("reason=holder_slow",), float(weights.subscribers.taken_over)
    yield "rlinf_weights_late_total", (), float(weights.subscribers.late)
    yield "rlinf_weights_conflicts_total", (), float(weights.checksums.conflicts)
    yield "rlinf_worker_driver_connections_total", (), float(max(0, driver.streams - 1))
    yield "rlinf_worker_driver_batches_total", (), float(driver.frames)
    yield "rlinf_worker_stale_instructions_total", (), float(session.stale_instructions)
    yield "rlinf_worker_dials_total", (), float(peers.dials)
    yield from of_links(peers)
    yield "rlinf_worker_reports_dropped_total", (), float(driver.dropped)
