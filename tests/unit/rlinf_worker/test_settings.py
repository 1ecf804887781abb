"""Every default of the worker side, pinned; and what an override may be."""

import dataclasses
import re
from pathlib import Path

import pytest

import rlinf_worker
from rlinf_api.errors import UserError
from rlinf_worker import settings
from rlinf_worker.driver.settings import DriverSettings
from rlinf_worker.links.settings import LinkSettings
from rlinf_worker.runtime import agent_link


def test_the_defaults_are_these():
    assert dataclasses.asdict(settings.load({})) == {
        "heartbeat_interval_s": 1.0,
        "agent_dead_after_s": 4.0,
        "agent_replaced_after_s": 60.0,
        "absent_pod_s": 120.0,
        "connect_timeout_s": 5.0,
        "welcome_timeout_s": 30.0,
        "reconnect_backoff_s": 0.1,
        "reconnect_backoff_max_s": 2.0,
        "driver_absence_timeout_s": 300.0,
        "start_deadline_s": 60.0,
        "load_deadline_s": 300.0,
        "compile_deadline_s": 600.0,
        "idle_deadline_s": 20.0,
        "first_step_deadline_s": 300.0,
        "step_deadline_min_s": 20.0,
        "step_deadline_factor": 10.0,
        "stop_grace_s": 10.0,
        "hurry_after_s": 1.0,
        "leave_reserve_s": 3.0,
        "reap_timeout_s": 2.0,
        "stacks_timeout_s": 1.0,
        "peer_wait_s": 1800.0,
        "meet_wait_s": 600.0,
        "watch_interval_s": 0.1,
        "oversleep_s": 1.0,
        "final_flush_s": 0.5,
        "turn_release_s": 120.0,
        "probe_interval_s": 2.0,
        "probe_deadline_s": 10.0,
        "rehome_after_s": 30.0,
        "turn_most_s": 3600.0,
        "turn_patience_s": 0.05,
        "turn_idle_s": 0.0005,
        "worker_log_bytes": 16 << 20,
        "last_words_bytes": 2048,
        "stacks_bytes": 16 << 10,
        "outbox_messages": 1024,
        "results_kept": 1024,
        "spans_file_bytes": 64 << 20,
        "metric_series": 6144,
    }


def test_the_defaults_of_a_link_are_these():
    assert dataclasses.asdict(LinkSettings()) == {
        "ring_bytes": 1 << 20,
        "max_ring_bytes": 256 << 20,
        "copy_out_bytes": 64 << 10,
        "max_message_bytes": 4 << 30,
        "outbox_bytes": 24 << 20,
        "inbox_bytes": 24 << 20,
        "bulk": "plain",
        "gpu": "direct",
        "bulk_from_bytes": 256 << 10,
        "dial_timeout_s": 5.0,
        "hello_timeout_s": 5.0,
        "lost_after_s": 5.0,
        "linger_s": 5.0,
    }


def test_a_dead_agent_misses_four_beats_each_with_news_and_a_lost_pod_is_known_within_six_seconds():
    limits = settings.Settings()
    assert limits.agent_dead_after_s == 4 * limits.heartbeat_interval_s
    assert limits.heartbeat_interval_s == agent_link.MARK_INTERVAL_S, "a beat tells what workers have marked since"
    assert limits.agent_dead_after_s + limits.reconnect_backoff_max_s <= 6.0


@pytest.mark.parametrize(("median_s", "deadline_s"), [(0.0, 20.0), (0.1, 20.0), (2.0, 20.0), (2.5, 25.0), (60.0, 600)])
def test_the_deadline_of_a_step_is_the_larger_of_twenty_seconds_and_ten_medians(median_s, deadline_s):
    assert settings.Settings().phase_deadline_s("step", median_step_s=median_s) == deadline_s


@pytest.mark.parametrize(
    ("phase", "deadline_s"),
    [("start", 60), ("load", 300), ("compile", 600), ("ready", 20), ("idle", 20), ("stop", 10)],
)
def test_every_phase_has_a_deadline(phase, deadline_s):
    assert settings.Settings().phase_deadline_s(phase) == deadline_s


def test_the_driver_has_the_same_defaults():
    assert DriverSettings().limits == settings.load({})
    assert DriverSettings().spare_start_timeout_s == 420.0


def test_what_is_set_for_agents_and_driver_alike_holds_for_the_driver():
    text = '{"heartbeat_interval_s": 0.2, "agent_dead_after_s": 9, "oversleep_s": 3, "start_deadline_s": 200}'
    found = DriverSettings(limits=settings.load({"RLINF_SETTINGS": text}))
    assert (found.limits.heartbeat_interval_s, found.limits.agent_dead_after_s) == (0.2, 9.0)
    assert (found.limits.oversleep_s, found.limits.start_deadline_s, found.spare_start_timeout_s) == (3.0, 200.0, 560.0)


def test_no_setting_is_accepted_that_nothing_reads():
    """One that does nothing costs whoever sets it a day."""
    sources = [p for p in Path(rlinf_worker.__file__).parent.rglob("*.py") if p != Path(settings.__file__)]
    text = "\n".join(path.read_text() for path in sources)
    by_phase = {"load_deadline_s", "compile_deadline_s", "idle_deadline_s", "step_deadline_min_s"}
    by_phase |= {"step_deadline_factor"}  # through phase_deadline_s
    unread = [f.name for f in dataclasses.fields(settings.Settings) if not re.search(rf"\.{f.name}\b", text)]
    assert set(unread) - by_phase == set()


def test_an_override_replaces_what_it_names():
    limits = settings.load({"RLINF_SETTINGS": '{"stop_grace_s": 1, "results_kept": 5}'})
    assert (limits.stop_grace_s, limits.results_kept, limits.heartbeat_interval_s) == (1.0, 5, 1.0)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "RLINF_SETTINGS is not JSON"),
        ("[]", "is not a JSON object: got list"),
        ('{"grace": 1}', "got 'grace', wanted one of absent_pod_s"),
        ('{"results_kept": 1.5}', "got 1.5, wanted a whole number above 0"),
        ('{"stop_grace_s": -1}', "got -1, wanted a number above 0"),
        ('{"stop_grace_s": true}', "got True, wanted a number above 0"),
        ('{"stop_grace_s": Infinity}', "got inf, wanted a number above 0"),
        (
            '{"heartbeat_interval_s": 5}',
            "got agent_dead_after_s 4, heartbeat_interval_s 5, wanted agent_dead_after",
        ),
        ('{"agent_dead_after_s": 0.3}', "agents that are well would be called dead"),
    ],
)
def test_an_override_that_cannot_be_used_is_a_sentence(text, sentence):
    with pytest.raises(UserError) as error:
        settings.load({"RLINF_SETTINGS": text})
    assert sentence in str(error.value)
