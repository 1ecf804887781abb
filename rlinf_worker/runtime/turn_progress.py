"""What a turn is counted in, read off the accounts of a worker's channels. Called by runtime.worker."""

from __future__ import annotations

from rlinf_worker.channels.account import Account
from rlinf_worker.runtime.session import WorkerSession
from rlinf_worker.turns.worker import Progress


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
    """Whether a role that was stopped at a safe point has something to go on with: an item that waits for it, or one
    that it has in hand, or nothing ever came to it this way."""
    queues, streams = session.queues.values(), session.streams.values()
    if any(queue.in_hand for queue in queues) or any(stream.in_hand for stream in streams):
        return True
    waits = [bool(queue.waiting) for queue in queues if queue.account_in.items]
    waits += [bool(stream.inbox) for stream in streams if stream.account_in.items]
    return any(waits) or not waits
