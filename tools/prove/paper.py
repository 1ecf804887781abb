"""Proof `paper`: the cases of the RLinf paper (arXiv 2509.15965, rebuilt in tests/workloads) as the search places them,
beside the paper's own figures. Nothing is tuned: an entry's numbers go in, a mode and a gain come out.

python -m tools.prove paper          a second per case

    chosen     what the search takes, of whatever mode
    temporal   the best of all in turns on all slots (mode Collocated)
    spatial    the best of all side by side (mode Disaggregated)

A gain is of the chosen one over the better of the paper's others: of `temporal` 712, `spatial` 774, `hybrid` 460 the
paper's choice is hybrid, and its gain 1.55.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from rlinf_api.errors import InvariantBroken
from rlinf_api.job import PlacementMode
from rlinf_scheduler.planner import search
from rlinf_scheduler.planner.candidate import Candidate
from rlinf_scheduler.planner.infeasible import Infeasible
from tools.prove.problems import of_entry
from tools.resumable import Line
from tools.workloads import entries

CASES: Final = tuple(name for name, entry in sorted(entries().items()) if "paper" in entry)
MODES: Final = {"temporal": PlacementMode.COLLOCATED, "spatial": PlacementMode.DISAGGREGATED}
SAYS: Final = {"paper-cpu-simulator": {"temporal": "temporal", "hybrid": "spatial"}}
"""The paper's words for placements, where ours are others. There simulators have machines of CPUs to themselves: what
it calls hybrid has policy and trainer side by side, what it calls temporal these two in turns."""


def one(seed: int) -> Line:
    name = CASES[seed]
    entry = entries()[name]
    problem = of_entry(entry)
    asked = {"chosen": problem} | {word: replace(problem, mode=mode) for word, mode in MODES.items()}
    found = {word: search.plan(of_mode) for word, of_mode in asked.items()}
    fits = {word: answer for word, answer in found.items() if not isinstance(answer, Infeasible)}
    if fits.keys() != found.keys():
        raise InvariantBroken(f"case {name} has room for each mode, as the paper measured them", got=f"{[*fits]} fit")
    ours = {word: answer.best.prediction.period_ms for word, answer in fits.items()}
    words = SAYS.get(name, {word: word for word in ("temporal", "spatial", "hybrid")})
    papers = {words[word]: float(s) for word, s in entry["paper"].items() if word in words}
    chosen = mode_of(fits["chosen"].best.candidate)
    papers_choice = min(papers, key=papers.__getitem__)
    return {
        "seed": seed,
        "name": name,
        "paper_s": entry["paper"],
        "ours_ms": {word: round(ms, 1) for word, ms in ours.items()},
        "chosen": chosen,
        "gain": round(min(ms for word, ms in ours.items() if word not in ("chosen", chosen)) / ours["chosen"], 2),
        "papers_choice": papers_choice,
        "papers_gain": round(min(s for word, s in papers.items() if word != papers_choice) / papers[papers_choice], 2),
        "why": fits["chosen"].explanation,
        "ok": chosen == papers_choice and ours["chosen"] <= min(ours.values()),
    }


def mode_of(candidate: Candidate) -> str:
    """How the roles share slots: spatial, nobody takes turns; temporal, all that may have a pool do on all of its
    slots; else hybrid."""
    if all(len(region.turns) == 1 for region in candidate.regions):
        return "spatial"
    pools = [{pool for pool, slots in enumerate(region.slots) if slots} for region in candidate.regions]
    is_parted = any(one & other for number, one in enumerate(pools) for other in pools[:number])
    return "hybrid" if is_parted else "temporal"


def summary(found: Sequence[Line]) -> str:
    print("| case | chosen | ms: chosen, temporal, spatial | gain | the paper's choice | its gain |")
    print("|---|---|---|---|---|---|")
    for line in found:
        ms = ", ".join(str(line["ours_ms"][word]) for word in ("chosen", *MODES))
        said = (line["name"], line["chosen"], ms, line["gain"], line["papers_choice"], line["papers_gain"])
        print(f"| {' | '.join(map(str, said))} |")
    print("\n".join(line["why"] for line in found))
    return f"{sum(line['ok'] for line in found)} of {len(found)} cases have the paper's mode"
