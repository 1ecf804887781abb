"""docs/troubleshooting.md has each condition and each reason, and none that there is not."""

import re
from collections import Counter
from pathlib import Path

from rlinf_api.conditions import JobCondition, PlanCondition, Reason, Status
from rlinf_operator.reconcile import decide, events

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
OF_JOBS = TEXT.partition("\n## Conditions of an RLJob\n")[2].partition("\n## Conditions of an RLPlan\n")[0]
OF_PLANS = TEXT.partition("\n## Conditions of an RLPlan\n")[2].partition("\n## Events\n")[0]
OF_EVENTS = TEXT.partition("\n## Events\n")[2].partition("\n## ")[0]
MADE = re.compile(r'Event\(type="\w+", reason="(\w+)"')


def sections():
    """(the conditions of a heading, its rows as (status, reason))."""
    for heading, *_, body in re.findall(r"^### (.*)\n((?:(?!^### ).*\n?)*)", OF_JOBS, re.MULTILINE):
        yield heading.split(", "), re.findall(r"^\| `(\w+)` `(\w+)`", body, re.MULTILINE)


def test_each_condition_of_a_job_has_its_table():
    assert Counter(kind for kinds, _ in sections() for kind in kinds) == Counter(map(str, JobCondition))


def test_each_reason_has_its_row_and_each_row_its_reason():
    rows = [row for _, rows in sections() for row in rows]
    assert {reason for _, reason in rows} == set(map(str, Reason))
    assert {status for status, _ in rows} <= set(map(str, Status))
    assert all(len(rows) == len(set(rows)) and rows for _, rows in sections()), "one row each"


def test_each_row_says_what_it_means_and_every_trouble_what_to_do():
    rows = re.findall(r"^\| `\w+` `(\w+)`.*$", OF_JOBS, re.MULTILINE)
    lines = [line for line in OF_JOBS.splitlines() if line.startswith("| `")]
    assert len(lines) == len(rows)
    troubles = {str(reason) for reason in events._TROUBLES} | {"UserError", "TooManyRestarts", "Infeasible"}
    for reason, line in zip(rows, lines, strict=True):
        _, means, look_at, do = (cell.strip() for cell in line[1:-1].split("|"))
        assert means, reason
        assert (look_at and do) or reason not in troubles, reason


def test_each_condition_of_a_plan_has_its_row():
    assert set(re.findall(r"^\| `(\w+)` \|", OF_PLANS, re.MULTILINE)) == set(map(str, PlanCondition))


def test_each_event_beside_the_conditions_has_its_row():
    source = "".join(Path(str(module.__file__)).read_text(encoding="utf-8") for module in (decide, events))
    assert set(re.findall(r"^\| `(\w+)` \|", OF_EVENTS, re.MULTILINE)) == set(MADE.findall(source))
