"""What a worker may say, by its role and rank: a sentence where it says what is another's to say. Pure.

    to_announce(placed, "tickets", producer="")     UserError: worker sampler/0 has put units into 'tickets': ...

Called by core.py, which fails the job with it: a role does so by mistake, and would again.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlinf_api.errors import UserError
from rlinf_api.slots import PlacedWorker


def to_end_a_step(placed: PlacedWorker, step: int, rank: int, *, gangs: Sequence[str]) -> UserError | None:
    if placed.role in gangs and placed.rank == rank:
        return None
    return UserError(
        f"worker {placed.id} says that step {step} is done", got=f"rank {rank} of {placed.role!r}",
        wanted=f"a rank of {_or(gangs)}, which takes rounds", next="leave ctx.step_done to such a role",
    )  # fmt: skip


def to_announce(placed: PlacedWorker, channel: str, *, producer: str) -> UserError | None:
    if placed.role == producer:
        return None
    return UserError(
        f"worker {placed.id} has put units into {channel!r}",
        got=f"a worker of {placed.role!r}", wanted=f"one of {producer!r}" if producer else "the flow alone",
        next="put what it makes into a channel that the flow gives it as the producer",
    )  # fmt: skip


def to_save(placed: PlacedWorker, checkpoint: object, *, gangs: Sequence[str]) -> UserError | None:
    if placed.role in gangs:
        return None
    return UserError(
        f"worker {placed.id} says what became of checkpoint {checkpoint}", got=f"a worker of {placed.role!r}",
        wanted=f"one of {_or(gangs)}, which takes rounds", next="leave ctx.checkpoints to such a role",
    )  # fmt: skip


def _or(roles: Sequence[str]) -> str:
    return " or ".join(map(repr, roles))
