"""The paper's cases: the search takes the paper's mode of each, and no other mode is quicker."""

import pytest

from rlinf_scheduler.planner.candidate import Candidate, PlannedTurn, Region
from tools.prove import paper


@pytest.mark.parametrize("seed", range(len(paper.CASES)), ids=paper.CASES)
def test_a_case_of_the_paper_is_placed_in_the_papers_mode(seed):
    line = paper.one(seed)
    assert line["ok"], line
    assert line["gain"] >= 1.15, "all three are of cases in which the mode matters"
    assert line["ours_ms"]["chosen"] == min(line["ours_ms"].values())


def region(slots, *roles):
    return Region(slots, tuple(PlannedTurn(role, slots) for role in roles))


@pytest.mark.parametrize(
    ("regions", "mode"),
    [
        ([region((4,), "env"), region((4,), "train")], "spatial"),
        ([region((8,), "env", "train")], "temporal"),
        ([region((0, 8), "env"), region((8, 0), "policy", "train")], "temporal"),
        ([region((4,), "env"), region((4,), "policy", "train")], "hybrid"),
    ],
)
def test_the_mode_of_a_candidate_is_how_its_roles_share_the_slots_of_a_pool(regions, mode):
    assert paper.mode_of(Candidate(regions=tuple(regions), choices={})) == mode


def test_the_table_names_each_case_and_counts_those_of_the_papers_mode(capsys):
    lines = [{**paper.one(2), "ok": False}]
    assert paper.summary(lines) == "0 of 1 cases have the paper's mode"
    assert "| paper-ppo7b | spatial | 429.1, 506.6, 429.1 | 1.18 | spatial | 1.29 |" in capsys.readouterr().out
