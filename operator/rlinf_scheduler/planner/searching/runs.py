"""Candidates that were run: how each scores, the best of them, and how many more moves may be simulated.

Effort is counted in simulated moves of units and turns and never in time, so that the same problem has the same answer
on any machine. Many slots are run as classes of workers that do alike, and the finalists in full.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Final

from rlinf_scheduler.planner import candidate as candidates
from rlinf_scheduler.planner.candidate import Candidate
from rlinf_scheduler.planner.problem import PlanProblem
from rlinf_scheduler.planner.searching.layouts import layout_of
from rlinf_scheduler.planner.simulate import Prediction, alike, simulate
from rlinf_scheduler.planner.simulation.clock import Aborted

MOST_EFFORT: Final = 600_000  # about 1.5 s, however long a run is
SET_UP: Final = 60
"""Moves that it takes as long to begin a run as, and to look at it."""
FINALISTS: Final = 3
"""Best candidates of many slots that are simulated once more, worker by worker up to ALL_WORKERS slots."""
ALL_WORKERS: Final = 512
KEPT: Final = 16
"""Best layouts that are told of; an RLPlan has room for as many alternatives."""
SLACK: Final = 1 + 1e-12


@dataclass(frozen=True, slots=True)
class Scored:
    candidate: Candidate
    prediction: Prediction
    score: float
    paid: int
    """Slots of the pods that it needs, and of those that are there anyway."""
    pods: tuple[int, ...]
    """How many it needs in each pool of the problem."""

    @property
    def key(self) -> tuple[float, int, int, int]:
        """The better score; of two the fewer slots, then the fewer turns."""
        turns = sum(len(region.turns) for region in self.candidate.regions)
        return self.score, self.paid, self.candidate.slots, turns


def candidate_key(candidate: Candidate) -> object:
    return candidate.regions, tuple(candidate.choices.values())


class Runs:
    def __init__(self, problem: PlanProblem, *, effort: int, grain: int, fewest: int) -> None:
        """`fewest`: runs that effort is added for, once it is known how long one is. `grain`: workers that one may
        stand for."""
        self._problem, self._grain, self._fewest = problem, grain, fewest
        self.effort = effort
        self.spent = self.count = 0
        self.best: Scored | None = None
        self._scored: list[Scored] = []
        self._ran: set[object] = set()

    def has_run(self, candidate: Candidate) -> bool:
        return candidate_key(candidate) in self._ran

    def run(self, candidate: Candidate, *, worse: float = 1.0, than: Scored | None = None) -> Scored | None:
        """Until it is so much worse than the best one, or than another. None: it is, or it was run before."""
        if self.has_run(candidate):
            return None
        self.count += 1
        self._ran.add(candidate_key(candidate))
        limit = inf
        if (best := than or self.best) is not None:
            limit = self.within(candidate, best.score) * worse * SLACK
        try:
            prediction = simulate(self._problem, candidate, classes=self._classes(candidate), limit_ms=limit)
        except Aborted as left:
            self._took(SET_UP + left.moves)
            return None
        self._took(SET_UP + prediction.effort)
        scored = self._score_of(candidate, prediction)
        self._scored.append(scored)
        if self.best is None or scored.key < self.best.key:
            self.best = scored
        return scored

    def _took(self, moves: int) -> None:
        self.effort -= moves
        self.spent += moves
        if self._fewest:
            self.effort = max(self.effort, min(MOST_EFFORT, self._fewest * moves) - moves)
            self._fewest = 0

    def run_finalists(self) -> None:
        """Many slots were simulated as classes: the best once more, each worker by itself as far as there are no more
        than ALL_WORKERS."""
        if self._grain == 1:
            return
        ranked = sorted(self._scored, key=lambda s: s.key)
        again = []
        for scored in ranked[:FINALISTS]:
            one = scored.candidate
            again.append(self._score_of(one, simulate(self._problem, one, classes=self._fine(one))))
        self.count += len(again)
        again.sort(key=lambda s: s.key)
        # Those behind stay behind: a run of classes says a little less, or more, than one of all.
        self._scored = again + [s for s in ranked[FINALISTS:] if s.key >= again[0].key]

    def _fine(self, candidate: Candidate) -> int:
        """The fewest that one may stand for, so that no more than ALL_WORKERS are simulated."""
        most = self._classes(candidate)
        return next((n for n in range(1, most) if most % n == 0 and candidate.slots <= n * ALL_WORKERS), most)

    def _classes(self, candidate: Candidate) -> int:
        return alike(self._problem, candidate, at_least=self._grain, at_most=self._grain) if self._grain > 1 else 1

    # --- scores -------------------------------------------------------------------------------------------------------
    def score(self, candidate: Candidate, period_ms: float) -> float:
        if not self._problem.has_price:
            return period_ms
        return self._problem.score(period_ms, candidates.paid(self._problem, candidate))

    def _score_of(self, candidate: Candidate, prediction: Prediction) -> Scored:
        paid = candidates.paid(self._problem, candidate)
        score = self._problem.score(prediction.period_ms, paid)
        return Scored(candidate, prediction, score, paid, candidates.pods(self._problem, candidate))

    def within(self, candidate: Candidate, score: float) -> float:
        """The period with which it has that score."""
        if not self._problem.has_price:
            return score
        return self._problem.within(score, candidates.paid(self._problem, candidate))

    def ranked(self) -> list[Scored]:
        """The best of each layout."""
        found: dict[object, Scored] = {}
        for scored in sorted(self._scored, key=lambda s: s.key):
            found.setdefault(layout_of(scored.candidate), scored)
        return list(found.values())[:KEPT]

    @property
    def is_empty(self) -> bool:
        return not self._scored
