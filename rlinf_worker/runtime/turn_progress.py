"""What a turn is counted in, read off the accounts of a worker's channels. Called by runtime.worker."""

from __future__ import annotations

from rlinf_worker.channels.account import Account
from rlinf_worker.runtime.session import WorkerSession
from rlinf_worker.runtime.turns import Progress


def of(accounts: list[Account]) -> Progress:
    """Counted in rounds where it takes rounds, else in units of queues, else in items."""
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
