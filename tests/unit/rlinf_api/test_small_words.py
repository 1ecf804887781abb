"""The small words of the contract: times, conditions, variables that set nothing, log lines."""

import io
import json
import logging
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from rlinf_api import conditions, declared, logs, times, variables
from rlinf_api.conditions import Condition, Reason, Status
from rlinf_api.errors import UserError
from rlinf_api.job import RoleSpec

NOON = datetime(2026, 11, 21, 12, 0, 0, tzinfo=UTC)


# --- times ------------------------------------------------------------------------------------------------------------
def test_now_is_told_in_utc():
    assert times.utc_now().tzinfo is UTC


def test_a_time_is_written_in_utc_and_whole_seconds():
    assert times.text(NOON.astimezone(timezone(timedelta(hours=2)))) == "2026-11-21T12:00:00Z"


@pytest.mark.parametrize(
    ("written", "moment"),
    [
        ("2026-11-21T12:00:00Z", NOON),
        ("2026-11-21T12:00:00.500000Z", NOON + timedelta(seconds=0.5)),
        ("2026-11-21T14:00:00+02:00", NOON),
        ("2026-11-21T12:00:00", NOON),
        ("", None),
        (None, None),
        (7, None),
    ],
)
def test_a_written_time_is_read(written, moment):
    assert times.parse(written) == moment


@pytest.mark.parametrize(
    ("since", "limit_s", "left_s"), [(NOON, 90.0, 60.0), (NOON, 10.0, -20.0), (None, 90.0, None), (NOON, None, None)]
)
def test_what_is_left_of_a_limit(since, limit_s, left_s):
    assert times.remaining_s(since, limit_s, now=NOON + timedelta(seconds=30)) == left_s


@pytest.mark.parametrize(
    ("moments", "first"), [((5.0, None, 3.0), 3.0), ((-2.0, 4.0), 0.0), ((None,), None), ((), None), ((0.5,), 0.5)]
)
def test_the_soonest_of_several_moments_is_never_in_the_past(moments, first):
    assert times.soonest(*moments) == first


# --- conditions -------------------------------------------------------------------------------------------------------
def condition(kind: str, status: Status = Status.TRUE, at: str = "t0", **fields: Any) -> Condition:
    return Condition(type=kind, status=status, last_transition_time=at, **fields)


def test_a_condition_keeps_its_place_and_moves_its_time_only_with_its_status():
    running, failed = condition("Running"), condition("Failed", Status.FALSE)
    again = condition("Running", at="t9", reason="Recovering", message="m", observed_generation=3)
    assert conditions.set_condition([running, failed], again) == (
        condition("Running", at="t0", reason="Recovering", message="m", observed_generation=3), failed,
    )  # fmt: skip
    stopped = condition("Running", Status.FALSE, at="t9")
    assert conditions.set_condition([failed, running], stopped) == (failed, stopped)
    assert conditions.set_condition([failed], running) == (failed, running)
    assert conditions.set_condition([], running) == (running,)


@pytest.mark.parametrize(
    ("found", "is_true"),
    [([], False), ([condition("Complete")], True), ([condition("Complete", Status.FALSE)], False),
     ([condition("Complete", Status.UNKNOWN)], False), ([condition("Running")], False), ([condition("Failed")], True),
     ([condition("Complete", Status.FALSE), condition("Failed")], True)],
)  # fmt: skip
def test_a_job_is_finished_when_it_is_complete_or_has_failed(found, is_true):
    assert conditions.is_finished(found) is is_true


def test_a_condition_is_found_by_its_type():
    running, failed = condition("Running"), condition("Failed", Status.FALSE)
    assert conditions.find([running, failed], "Failed") is failed
    assert conditions.find([running], "Failed") is None
    assert (conditions.is_true([running, failed], "Running"), conditions.is_true([failed], "Failed")) == (True, False)
    assert conditions.is_true([], "Running") is False


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("CheckpointUnreadable", Reason.CHECKPOINT_UNREADABLE),
        ("CheckpointUnwritable", Reason.CHECKPOINT_UNWRITABLE),
        ("UserError", Reason.USER_ERROR),
        ("Infeasible", Reason.USER_ERROR),
        ("ValueError", Reason.USER_ERROR),
    ],
)
def test_a_failure_of_the_users_has_a_reason_of_those_that_only_users_repair(said, reason):
    assert conditions.of_user(said) is reason


def test_a_condition_is_as_kubernetes_writes_it_and_knows_no_other_field():
    assert condition("Running").model_dump(mode="json", by_alias=True) == {
        "type": "Running", "status": "True", "reason": "", "message": "", "lastTransitionTime": "t0",
        "observedGeneration": 0,
    }  # fmt: skip
    with pytest.raises(ValueError, match="extra"):
        Condition.model_validate({"type": "Running", "status": "True", "colour": "red"})
    longest: dict[str, Any] = {"type": "t" * 316, "reason": "r" * 1024, "message": "m" * 32768}
    Condition(status=Status.TRUE, **longest)
    for field, text in longest.items():
        with pytest.raises(ValueError, match="at most"):
            Condition(status=Status.TRUE, **{**longest, field: text + "x"})


# --- variables --------------------------------------------------------------------------------------------------------
SERVICE = {
    "RLINF_X_SERVICE_HOST": "10.0.0.1", "RLINF_X_SERVICE_PORT": "80", "RLINF_X_SERVICE_PORT_HTTP": "80",
    "RLINF_X_PORT": "tcp://10.0.0.1:80", "RLINF_X_PORT_80_TCP": "tcp://10.0.0.1:80",
    "RLINF_X_PORT_80_TCP_ADDR": "10.0.0.1",
}  # fmt: skip


def test_variables_of_services_of_others_and_known_ones_are_no_mistake():
    variables.check({**SERVICE, "RLINF_LEVEL": "1", "OTHER": "2"}, prefix="RLINF_", known={"RLINF_LEVEL"})


@pytest.mark.parametrize("strange", [{"RLINF_HTTP_PORT": "8080"}, {"RLINF_X": "tcp://a"}, {"RLINF_SERVICE_HOSTS": "a"}])
def test_a_variable_that_sets_nothing_is_named_with_those_that_do(strange):
    (name,) = strange
    with pytest.raises(
        UserError, match=f"variable {name} sets nothing: wanted one of RLINF_A, RLINF_B; correct its name"
    ):
        variables.check({**SERVICE, **strange, "RLINF_Z": ""}, prefix="RLINF_", known={"RLINF_B", "RLINF_A"})


# --- log lines --------------------------------------------------------------------------------------------------------
@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    root, named = logging.getLogger(), [logging.getLogger(n) for n in ("asyncio", "grpc", "kopf")]
    before = (root.handlers[:], root.level, [one.level for one in named])
    yield io.StringIO()
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    for one, level in zip(named, before[2], strict=True):
        one.setLevel(level)


def test_a_line_says_when_who_and_what_with_its_fields(lines):
    logs.configure({"part": "operator", "job": "own"}, level="info", stream=lines)
    record = logging.makeLogRecord(
        {"name": "a.b", "levelno": 30, "levelname": "WARNING", "msg": "%d gone", "args": (2,), "created": 1790000000.25,
         "msecs": 250.0, "job": "other", "step": 3, "path_of": {1}}
    )  # fmt: skip
    logging.getLogger().handle(record)
    assert json.loads(lines.getvalue()) == {
        "time": "2026-09-21T14:13:20.250Z", "level": "WARNING", "logger": "a.b", "message": "2 gone", "job": "own",
        "step": 3, "path_of": "{1}", "part": "operator",
    }  # fmt: skip


def test_an_error_has_its_traceback(lines):
    logs.configure({}, level="INFO", stream=lines)
    try:
        raise ValueError("no floor")
    except ValueError:
        logging.getLogger("a").exception("broken")
    assert json.loads(lines.getvalue())["traceback"].endswith("ValueError: no floor")


@pytest.mark.parametrize(
    ("level", "root", "asyncio_level", "kopf_level"),
    [("debug", 10, 20, 30), ("INFO", 20, 20, 30), ("WARNING", 30, 30, 30), ("error", 40, 40, 40)],
)
def test_loggers_that_say_something_of_every_poll_are_held_back(lines, level, root, asyncio_level, kopf_level):
    logs.configure({}, level=level, stream=lines, noisy={"kopf": 30})
    found = [logging.getLogger(name).level for name in ("", "asyncio", "grpc", "kopf")]
    assert found == [root, asyncio_level, asyncio_level, kopf_level]
    assert lines.getvalue() == ""


def test_a_level_that_does_not_exist_is_said_first_and_info_is_used(lines):
    logs.configure({}, level="LOUD", level_of="RLINF_LOG_LEVEL", stream=lines)
    (line,) = [json.loads(text) for text in lines.getvalue().splitlines()]
    assert (line["level"], line["message"]) == ("WARNING", "RLINF_LOG_LEVEL is none that exists, INFO is used")
    assert (line["got"], line["wanted"]) == ("LOUD", "DEBUG, INFO, WARNING, ERROR")
    assert logging.getLogger().level == logging.INFO


def test_lines_go_to_stderr_where_nobody_says_otherwise(lines, capsys):
    logs.configure({}, level="INFO")
    logging.getLogger("a").info("hello")
    assert json.loads(capsys.readouterr().err)["message"] == "hello"


# --- what a kind declares ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("kind", "config", "lanes"),
    [
        ("synthetic", {"service": "concurrent", "lanes": 4}, 4),
        ("synthetic", {"service": "concurrent"}, 1),
        ("synthetic", {"lanes": 4}, 1),
        ("synthetic", {"service": "concurrent", "lanes": "many"}, 0),
        ("my.package:Role", {"service": "concurrent", "lanes": 4}, 0),
    ],
)
def test_how_many_units_are_in_work_at_once_is_known_of_synthetic_roles_alone(kind, config, lanes):
    assert declared.lanes(RoleSpec(name="rollout", kind=kind, config=config)) == lanes
