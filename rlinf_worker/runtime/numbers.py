"""The worker's numbers for /metrics: absolute counters by name and labels, read twice a second by the agent's link.

Names are `rlinf_*` with base units; the agent adds job, role and worker.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlinf_worker.channels.account import Account
from rlinf_worker.runtime.driver_link import DriverLink
from rlinf_worker.runtime.peers import Peers
from rlinf_worker.runtime.session import WorkerSession
from rlinf_worker.runtime.turns import Progress, Turns
from rlinf_worker.spans import Recorder

Number = tuple[str, tuple[str, ...], float]


def of_account(account: Account) -> Iterator[Number]:
    labels = (f"channel={account.channel}", f"side={account.side}")
    if not account.items and not account.wait_s and not account.dropped:
        return  # the end that this role does not have
    yield "rlinf_channel_items_total", labels, float(account.items)
    yield "rlinf_channel_bytes_total", labels, float(account.bytes)
    yield "rlinf_channel_wait_seconds_total", labels, account.wait_s
    yield "rlinf_channel_resent_items_total", labels, float(account.resent)
    yield "rlinf_channel_duplicate_items_total", labels, float(account.duplicates)
    for reason, count in account.dropped.items():
        yield "rlinf_channel_dropped_items_total", (*labels, f"reason={reason}"), float(count)


def progress(accounts: list[Account]) -> Progress:
    """Of a worker, for its turns. Counted in rounds where it takes rounds, else in units of queues, else in items."""
    inputs = [account for account in accounts if account.side == "consumer"]
    rounds = sum(account.rounds for account in inputs)
    units = sum(account.items for account in inputs if account.units)
    return Progress(
        units=rounds or units or sum(account.items for account in inputs or accounts),
        items=sum(account.items for account in accounts),
        step=max((account.step for account in inputs), default=-1),
    )


def has_input(session: WorkerSession) -> bool:
    """Something waits for the role to take it, or nothing ever came in this way."""
    waits = [bool(queue.waiting) for queue in session.queues.values() if queue.account_in.items]
    waits += [bool(stream.inbox) for stream in session.streams.values() if stream.account_in.items]
    return any(waits) or not waits


def of_turns(turns: Turns) -> Iterator[Number]:
    if turns.lease_set or turns.switches:
        yield "rlinf_worker_turn_switches_total", (), float(turns.switches)
        for what, seconds in turns.seconds.items():
            yield f"rlinf_worker_turn_{what}_seconds_total", (), seconds


def of_worker(
    session: WorkerSession,
    *,
    driver: DriverLink,
    peers: Peers,
    recorder: Recorder,
    accounts: list[Account],
    turns: Turns,
) -> Iterator[Number]:
    yield from of_turns(turns)
    for account in accounts:
        yield from of_account(account)
    for kind, seconds in recorder.seconds.items():
        yield "rlinf_worker_seconds_total", (f"kind={kind}",), seconds
    for kind, seconds in recorder.exclusive.items():
        yield "rlinf_worker_account_seconds_total", (f"kind={kind}",), seconds
    yield "rlinf_worker_instrument_seconds_total", (), recorder.instrument_s
    weights = session.weights
    yield "rlinf_weights_seconds_total", (), weights.seconds
    yield "rlinf_weights_versions_total", ("side=published",), float(weights.published)
    yield "rlinf_weights_versions_total", ("side=received",), float(weights.account_in.items)
    yield "rlinf_weights_sent_bytes_total", (), float(weights.subscribers.sent_bytes)
    yield "rlinf_weights_refused_total", ("reason=checksum",), float(weights.receiver.corrupt)
    yield "rlinf_weights_refused_total", ("reason=schema",), float(weights.receiver.refused)
    yield "rlinf_weights_retries_total", ("reason=checksum",), float(weights.receiver.retries)
    yield "rlinf_weights_retries_total", ("reason=holder_lost",), float(weights.receiver.reroutes)
    yield "rlinf_weights_conflicts_total", (), float(weights.conflicts)
    yield "rlinf_worker_driver_connections_total", (), float(driver.reconnects)
    yield "rlinf_worker_driver_batches_total", (), float(driver.sent_messages)
    yield "rlinf_worker_dials_total", (), float(peers.dials)
    yield "rlinf_worker_reports_dropped_total", (), float(session.reports_dropped)
