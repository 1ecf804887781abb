"""`rljob export`: which checkpoint it takes, and what it refuses. What is in the folder is test_reasoning.py's."""

import pytest
import yaml

from rlinf_api.errors import UserError
from rlinf_worker.channels.protocol import PolicyVersion
from rljob import export
from tests.builders import make_job

THERE = [PolicyVersion(1, 9), PolicyVersion(1, 6), PolicyVersion(0, 12), PolicyVersion(0, 9), PolicyVersion(0, 4)]


@pytest.mark.parametrize(("step", "wanted"), [(9, (1, 9)), (12, (0, 12)), (4, (0, 4)), (None, (1, 9))])
def test_of_a_step_that_several_branches_have_it_is_what_the_job_went_on_with(tmp_path, step, wanted):
    assert export.chosen(THERE, step=step, work_dir=tmp_path) == PolicyVersion(*wanted)


def test_a_step_without_a_checkpoint_is_told_with_those_there_are(tmp_path):
    with pytest.raises(UserError, match=r"no checkpoint of step 5: got those of steps 4, 6, 9, 12, .*choose one"):
        export.chosen(THERE, step=5, work_dir=tmp_path)
    with pytest.raises(UserError, match=r"no checkpoint: got none at all, .*spec\.checkpoint\.everySteps"):
        export.chosen([], step=None, work_dir=tmp_path)


def test_a_run_without_a_language_model_is_told(tmp_path):
    (tmp_path / "objects").mkdir()
    job = make_job("ppo").role("env", "gymnasium").role("rollout", "torch").role("actor", "fsdp").pool("cpu", ["env"])
    (tmp_path / "objects" / "rljob-default-x.yaml").write_text(yaml.safe_dump(job.build()))
    with pytest.raises(UserError, match="has no language model: got flow 'ppo', wanted a run of flow 'grpo'"):
        export.export(tmp_path, step=None, into=None)


def test_a_folder_that_is_no_work_dir_is_told(tmp_path):
    with pytest.raises(UserError, match="is no work dir of a run"):
        export.export(tmp_path, step=None, into=None)
