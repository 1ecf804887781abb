"""An actor and its critic end the steps of a whole job together; whichever is killed, both go back to one checkpoint,
and learn what they would have learnt."""

import json

import pytest
import yaml

from tests.fakes.critic_job import PROMPTS, learnt
from tests.rljob_runs import Run, own_job

STEPS = 60
JOB = own_job(
    "tests.fakes.critic_job:flow",
    {
        "sampler": {"kind": "tests.fakes.critic_job:Sampler", "workers": 2},
        "critic": {"kind": "tests.fakes.critic_job:Critic"},
        "actor": {"kind": "tests.fakes.critic_job:Actor", "workers": 2},
    },
    steps=STEPS,
    slots=5,
)


@pytest.mark.timeout(120)
def test_what_both_learn_is_the_same_whatever_is_killed(tmp_path):
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(JOB))
    with Run(tmp_path, file=file, small=False) as run:
        run.until_step(5)
        run.kill("critic/0")
        run.until_step(11, branch=1)
        run.kill("actor/1")
        run.until_step(17, branch=2)
        run.kill("driver")
        run.until_step(23, branch=2)
        run.kill("sampler/1")
        assert run.end(timeout_s=100) == 0, run.said
        assert run.answer["condition"] == "Complete", run.said
        lines, metrics = run.lines("lineage"), run.lines("metrics")
        saved = max((run.work_dir / "checkpoints").glob("*/COMMIT"), key=lambda path: path.stat().st_mtime).parent
        totals = {role: int((saved / role / "total").read_text()) for role in ("actor", "critic")}
        words = json.loads((saved / "COMMIT").read_text())
    last = {line["step"]: line for line in lines}
    assert sorted(last) == list(range(1, STEPS + 1))
    assert all((line["units"], line["critic"]["units"]) == (PROMPTS, PROMPTS) for line in lines)
    assert max(line["branch"] for line in lines) == 2, "each loss of a gang, and no other, made a branch"
    told = {line["step"]: (int(line["total"]), int(line["critic_total"])) for line in metrics}
    assert told == learnt(upto=STEPS)
    assert (totals["actor"], totals["critic"]) == learnt(upto=STEPS)[STEPS]
    assert words["roles"] == ["actor", "critic"], "one COMMIT for the parts of both"
