"""What a consumer has at hand weighs, as its next units go by it."""

from rlinf_api.names import WorkerId
from rlinf_worker.queues.core import QueueCore
from rlinf_worker.queues.units import UnitInfo

A, B = WorkerId("train/0"), WorkerId("train/1")
WEIGHTS = (0.1, 0.2, 0.3)  # which leave a residue when they are taken off a sum of theirs, one after the other


def given(core):
    return {consumer: [unit.key for unit in units] for consumer, units in core.match().items()}


def announced(core, weights, *, first=0):
    made = [
        UnitInfo(key=f"w:1/{number}", branch=0, step=1, producer=WorkerId("reward/0"), weight=weight)
        for number, weight in enumerate(weights, start=first)
    ]
    core.announce(made)
    return [unit.key for unit in made]


def test_who_has_finished_all_of_it_is_as_free_as_who_never_had_any():
    core = QueueCore()
    core.consumers.ranked = [B]
    core.consumers.credit(B, 9)
    keys = announced(core, WEIGHTS)
    assert given(core) == {B: keys}
    assert core.book.loads.weight_of(B) == sum(WEIGHTS)
    for key in reversed(keys):
        core.acked(B, branch=0, keys=[key])
    assert core.book.loads.weight_of(B) == core.book.loads.weight_of(A) == 0.0
