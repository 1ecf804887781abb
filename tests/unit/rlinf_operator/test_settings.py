"""Every default of the operator, pinned; what holds between them; and the documents and chart that repeat them."""

import dataclasses
import re
from pathlib import Path

import pytest

from rlinf_api import __version__
from rlinf_api.report import REPEATED_S
from rlinf_operator.process import ProcessSettings
from rlinf_operator.settings import DEFAULTS, OperatorSettings, Peers

ROOT = Path(__file__).resolve().parents[3]


def test_the_defaults_of_jobs_are_these():
    assert dataclasses.asdict(OperatorSettings()) == {
        "worker_image": f"rlinf-worker-actor-fsdp:{__version__}",
        "driver_image": f"rlinf-worker:{__version__}",
        "driver_template": {"text": ""},
        "image_pull_policy": "IfNotPresent",
        "gang_scheduler": "kubernetes",
        "gang_scheduler_pods": "",
        "scheduler_address": "",
        "default_checkpoint_uri": "",
        "network_policy": True,
        "network_policy_callers": {"text": ""},
        "network_policy_scrapers": {"text": ""},
        "pod_fixed_ids": True,
        "driver_grace_s": 30,
        "worker_grace_s": 30,
        "node_lost_toleration_s": 5,
        "driver_cpu": "500m",
        "driver_memory": "1Gi",
        "run_dir_size": "64Mi",
        "accelerator_shm": "8Gi",
        "shm_share": 0.25,
        "pods_ready_deadline_s": 300.0,
        "homeless_s": 60.0,
        "driver_silent_deadline_s": 60.0,
        "driver_late_s": 10.0,
        "agent_silent_deadline_s": 60.0,
        "drain_deadline_s": 120.0,
        "finish_grace_s": 30.0,
        "exit_zero_grace_s": 10.0,
        "infrastructure_restarts": 100,
        "infrastructure_restarts_per_pod": 3,
        "restart_delay_max_s": 60.0,
        "progress_interval_s": 30.0,
        "coalesce_s": 0.1,
        "resync_s": 300.0,
        "call_timeout_s": 10.0,
        "retry_min_s": 0.5,
        "retry_max_s": 60.0,
        "certificate_life_s": 2_592_000.0,
    }


def test_the_defaults_of_the_process_are_these():
    assert dataclasses.asdict(ProcessSettings()) == {
        "namespace": "rlinf-system",
        "identity": "",
        "watch_namespaces": "",
        "watch_namespace_selector": "",
        "kubeconfig": "",
        "context": "",
        "http_host": "0.0.0.0",
        "http_port": 8080,
        "log_level": "INFO",
        "lease_s": 12.0,
        "lease_renew_deadline_s": 8.0,
        "lease_retry_s": 2.0,
        "api_timeout_s": 10.0,
        "watch_inactivity_s": 90.0,
        "watch_stale_s": 240.0,
        "queue_stale_s": 120.0,
        "stop_timeout_s": 8.0,
        "ca_life_days": 1825.0,
    }


def test_times_that_lean_on_each_other_do():
    process = ProcessSettings()
    assert DEFAULTS.driver_late_s < DEFAULTS.driver_silent_deadline_s, "late is said before lost"
    assert DEFAULTS.retry_min_s < DEFAULTS.retry_max_s < DEFAULTS.resync_s
    assert DEFAULTS.coalesce_s < DEFAULTS.retry_min_s
    assert process.lease_renew_deadline_s + process.lease_retry_s < process.lease_s
    assert 2 * process.watch_inactivity_s < process.watch_stale_s, "two new tries before /readyz fails"
    assert process.stop_timeout_s > 2 * process.lease_retry_s
    assert DEFAULTS.certificate_life_s < process.ca_life_days * 86400 / 3, "a leaf ends before its CA is rotated away"


PLAIN = {
    name: f"{value:g}"
    for settings in (DEFAULTS, ProcessSettings())
    for name, value in dataclasses.asdict(settings).items()
    if isinstance(value, int | float)
}
REPEATED = [
    ("docs/recovery.md", "no ping is answered | {driver_late_s} s: Degraded; {driver_silent_deadline_s} s"),
    (
        "docs/recovery.md",
        f"{REPEATED_S + DEFAULTS.driver_late_s:g} s: Degraded; "
        f"{REPEATED_S + DEFAULTS.driver_silent_deadline_s:g} s | as of a frozen driver",
    ),
    ("docs/limits.md", "`progress_interval_s` ({progress_interval_s} s)"),
    ("helm/rlinf-operator/values.yaml", "stop_timeout_s ({stop_timeout_s})"),
    ("helm/rlinf-operator/values.yaml", "the {lease_s} s of the Lease"),
    ("helm/rlinf-operator/templates/_helpers.tpl", 'define "rlinf.httpPort" -}}}}{http_port}{{{{'),
    ("operator/rlinf_operator/process.py", "killed leader is replaced within 14 s"),
    ("docs/install.md", "the other takes over within 14 s"),
]


@pytest.mark.parametrize(("file", "words"), REPEATED)
def test_where_a_default_is_repeated_it_is_the_same(file, words):
    assert words.format(**PLAIN) in (ROOT / file).read_text(encoding="utf-8")


def test_a_killed_leader_is_replaced_within_what_the_documents_say():
    assert ProcessSettings().lease_s + ProcessSettings().lease_retry_s == 14


def test_every_setting_has_a_reason_under_it():
    for kind, file in ((OperatorSettings, "settings.py"), (ProcessSettings, "process.py")):
        source = (ROOT / "operator/rlinf_operator" / file).read_text(encoding="utf-8")
        for field in dataclasses.fields(kind):
            assert re.search(rf'^    {field.name}: .*\n    """', source, re.MULTILINE), field.name


def test_peers_are_parsed_when_they_are_written_and_not_when_the_first_job_comes():
    with pytest.raises(ValueError, match="wanted a JSON list"):
        Peers('{"podSelector": {}}')
