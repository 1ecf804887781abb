"""job.json as a driver's image reads it, also where the operator that wrote it is newer."""

import json

import pytest

from rlinf_api import names, unknown
from rlinf_api.errors import UserError
from rlinf_worker.driver.main import make_driver, read_job
from tests.builders import ppo_job
from tests.builders_driver import make_job


@pytest.fixture
def job_file(tmp_path):
    def write(**more):
        path = tmp_path / "job.json"
        path.write_text(json.dumps(unknown.compact(ppo_job().parsed()) | more))
        return str(path)

    return write


def test_what_is_left_at_its_default_is_there_again(job_file):
    assert read_job(job_file(), attempt=1) == (ppo_job().parsed(), ())


def test_a_job_that_begins_is_refused_where_it_asks_for_a_field_that_the_image_has_not(job_file):
    with pytest.raises(UserError, match=r"got spec\.quota.*set jobImages\.driver"):
        read_job(job_file(quota="team"), attempt=1)


def test_of_many_fields_that_the_image_has_not_eight_are_named(job_file):
    with pytest.raises(UserError) as caught:
        read_job(job_file(**{f"new{n}": 1 for n in range(20)}), attempt=1)
    assert str(caught.value).count("spec.new") == 8


def test_a_job_that_has_begun_goes_on_without_it(job_file):
    pools = unknown.compact(ppo_job().parsed())["pools"]
    path = job_file(quota="team", pools=[{**pools[0], "color": "red"}, *pools[1:]])
    spec, unheeded = read_job(path, attempt=2)
    assert spec == ppo_job().parsed()
    assert sorted(unheeded) == [f"spec.pools[{pools[0]['name']}].color", "spec.quota"]


@pytest.mark.parametrize("text", ["", "{", "[1]", '"ppo"', "{}"])
def test_what_is_no_spec_is_the_users_to_repair(tmp_path, text):
    path = tmp_path / "job.json"
    path.write_text(text)
    with pytest.raises(UserError, match="job file"):
        read_job(str(path), attempt=2)


@pytest.fixture
def environ(tmp_path):
    path = tmp_path / "job.json"
    path.write_text(json.dumps(unknown.compact(make_job().spec)))
    return {names.ENV_ATTEMPT: "1", names.ENV_JOB_FILE: str(path), names.ENV_JOB_UID: "5f2c"}


@pytest.mark.parametrize(
    ("said", "is_first"), [({}, False), ({names.ENV_FIRST_OF_LIFE: ""}, False), ({names.ENV_FIRST_OF_LIFE: "1"}, True)]
)
def test_a_driver_is_the_first_of_its_life_where_its_environment_says_so(environ, said, is_first):
    driver, _, _ = make_driver({**environ, names.ENV_ATTEMPT: "3", **said})
    assert driver.job.is_first == is_first
    assert make_driver({**environ, names.ENV_ATTEMPT: "1", **said})[0].job.is_first


def test_a_driver_counts_in_what_its_environment_says(environ):
    text = '{"agent_dead_after_s": 9, "start_deadline_s": 200, "rehome_after_s": 5}'
    driver, _, _ = make_driver({**environ, names.ENV_SETTINGS: text})
    assert (driver.job.settings.limits.agent_dead_after_s, driver.job.settings.limits.start_deadline_s) == (9.0, 200.0)
    assert driver.presence._after_s == 5.0


def test_a_driver_with_a_setting_that_does_not_exist_does_not_start(environ):
    with pytest.raises(UserError, match=r"a setting that does not exist: got 'restart_backoff_s'"):
        make_driver({**environ, names.ENV_SETTINGS: '{"restart_backoff_s": 1}'})
