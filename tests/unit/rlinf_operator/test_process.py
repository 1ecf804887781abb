"""The process' settings, its probes, its check of Kopf's watch."""

import dataclasses
import json
from pathlib import Path

import aiohttp
import pytest

from rlinf_api.errors import UserError
from rlinf_operator import __main__ as main
from rlinf_operator import process
from rlinf_operator.handlers.probes import Probes
from rlinf_operator.manifests import pods
from rlinf_operator.manifests.metadata import JobKey, JobMeta
from rlinf_operator.metrics import Metrics
from rlinf_operator.settings import OperatorSettings
from tests.builders import ppo_job

KEY = JobKey(namespace="team", name="math")


def test_flags_go_before_variables_and_those_before_defaults():
    flags = process.parse_flags(["--lease-s", "30", "--worker-image", "w:1"])
    environ = {"RLINF_OPERATOR_LEASE_S": "20", "RLINF_OPERATOR_HTTP_PORT": "9", "RLINF_OTHER": "x"}
    own, operator = process.read(flags, environ)
    assert (own.lease_s, own.http_port, operator.worker_image) == (30.0, 9, "w:1")
    assert own.api_timeout_s == process.ProcessSettings().api_timeout_s


@pytest.mark.parametrize(
    ("environ", "sentence"),
    [
        ({"RLINF_OPERATOR_LEASE": "20"}, "RLINF_OPERATOR_LEASE sets nothing"),
        ({"RLINF_OPERATOR_LEASE_S": "soon"}, "RLINF_OPERATOR_LEASE_S is no float: got 'soon'"),
        ({"RLINF_OPERATOR_LEASE_S": "9"}, "raise RLINF_OPERATOR_LEASE_S"),
        ({"RLINF_OPERATOR_LEASE_RETRY_S": "0.5"}, "RLINF_OPERATOR_LEASE_RETRY_S"),
        ({"RLINF_OPERATOR_LEASE_S": "30", "RLINF_OPERATOR_LEASE_RETRY_S": "6"}, "at most two thirds of lease_renew"),
        (
            {
                "RLINF_OPERATOR_LEASE_S": "30",
                "RLINF_OPERATOR_LEASE_RENEW_DEADLINE_S": "20",
                "RLINF_OPERATOR_LEASE_RETRY_S": "5",
            },
            "more than twice lease_retry_s",
        ),
        ({"RLINF_OPERATOR_RESYNC_S": "0"}, "RLINF_OPERATOR_RESYNC_S is out of its bounds: got 0, wanted 1 to 86400"),
        ({"RLINF_OPERATOR_QUEUE_STALE_S": "0"}, "RLINF_OPERATOR_QUEUE_STALE_S is out of its bounds"),
        ({"RLINF_OPERATOR_RESYNC_S": "nan"}, "RLINF_OPERATOR_RESYNC_S is out of its bounds: got nan"),
        ({"RLINF_OPERATOR_API_TIMEOUT_S": "inf"}, "RLINF_OPERATOR_API_TIMEOUT_S is out of its bounds"),
        ({"RLINF_OPERATOR_INFRASTRUCTURE_RESTARTS": "-1"}, "wanted 0 to 999"),
        ({"RLINF_OPERATOR_CA_LIFE_DAYS": "180"}, "lower RLINF_OPERATOR_CERTIFICATE_LIFE_S or raise"),
        ({"RLINF_OPERATOR_DRIVER_LATE_S": "60"}, "lower RLINF_OPERATOR_DRIVER_LATE_S"),
        ({"RLINF_OPERATOR_WATCH_STALE_S": "90"}, "raise RLINF_OPERATOR_WATCH_STALE_S or lower"),
        ({"RLINF_OPERATOR_RETRY_MIN_S": "61"}, "lower RLINF_OPERATOR_RETRY_MIN_S"),
    ],
)
def test_settings_that_cannot_be_used_are_named(environ, sentence):
    with pytest.raises(UserError, match=sentence):
        process.read({}, environ)


@pytest.mark.parametrize(
    ("values", "taken"),
    [
        ({"resync_s": "1"}, True),
        ({"resync_s": "86400"}, True),
        ({"resync_s": "86401"}, False),
        ({"http_port": "0"}, True),
        ({"http_port": "-1"}, False),
        ({"lease_s": "10.1"}, True),
        ({"lease_s": "10"}, False),
        ({"lease_renew_deadline_s": "3", "lease_retry_s": "2"}, True),
        ({"lease_renew_deadline_s": "2.9", "lease_retry_s": "2"}, False),
        ({"stop_timeout_s": "4.1"}, True),
        ({"stop_timeout_s": "4"}, False),
        ({"watch_inactivity_s": "239"}, True),
        ({"watch_inactivity_s": "240"}, False),
        ({"driver_late_s": "59"}, True),
        ({"driver_late_s": "60"}, False),
        ({"retry_min_s": "60"}, True),
        ({"retry_min_s": "60.1"}, False),
        ({"ca_life_days": "180.1"}, True),
        ({"ca_life_days": "180"}, False),
    ],
)
def test_a_value_at_its_bound_is_taken_and_the_next_one_is_not(values, taken):
    if taken:
        process.read(values, {})
    else:
        with pytest.raises(UserError):
            process.read(values, {})


def test_a_text_that_is_no_setting_is_cut_and_peers_are_not_shown():
    with pytest.raises(UserError) as caught:
        process.read({}, {"RLINF_OPERATOR_LEASE_S": "x" * 5000})
    assert len(str(caught.value)) < 200
    with pytest.raises(
        UserError, match="RLINF_OPERATOR_NETWORK_POLICY_CALLERS is no Peers: wanted peers of a"
    ) as caught:
        process.read({}, {"RLINF_OPERATOR_NETWORK_POLICY_CALLERS": '[{"hunter2": 1}]'})
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("driver_cpu", "half", "got 'half', wanted a quantity of Kubernetes; write for example 500m or 2Gi"),
        ("driver_memory", "1GB", "got '1GB', wanted a quantity"),
        ("run_dir_size", "64MB", "got '64MB', wanted a quantity"),
        ("accelerator_shm", "8 GB", "got '8 GB', wanted a quantity"),
        ("driver_cpu", "", "got '', wanted a quantity"),
        ("image_pull_policy", "always", "got 'always', wanted one of Always, IfNotPresent, Never"),
        ("gang_scheduler", "yunikorn", "got 'yunikorn', wanted one of kubernetes, coscheduling, volcano"),
        (
            "default_checkpoint_uri",
            "file:///data/{team}/{job}",
            r"wanted /path, file:///path, s3://.*, in it {namespace}, {job}",
        ),
        ("default_checkpoint_uri", "/data/{job", "no other braces"),
        ("default_checkpoint_uri", "/data/{job!r}", "no other braces"),
        ("default_checkpoint_uri", "/data/{}", "no other braces"),
        ("default_checkpoint_uri", "az://bucket/{job}", "name a bucket, or the path of a volume that the pools mount"),
        ("default_checkpoint_uri", "s3://bucket/{team}", "no other braces"),
        ("default_checkpoint_uri", "s3://bucket//{job}", "wanted a bucket and a prefix of letters"),
        ("default_checkpoint_uri", "data/{job}", "wanted /path, file:///path"),
        ("default_checkpoint_uri", "file:///data/{job}#1", "which as a uri ends at its '#'"),
    ],
)
def test_a_text_that_would_break_every_pass_is_named_at_the_start(name, text, sentence):
    with pytest.raises(UserError, match=f"RLINF_OPERATOR_{name.upper()} cannot be used: .*{sentence}"):
        process.read({}, {f"RLINF_OPERATOR_{name.upper()}": text})


@pytest.mark.parametrize(
    "uri",
    [
        "",
        "/data",
        "file:///data/{namespace}/{job}-{uid}",
        "file://localhost/data/{uid}",
        "s3://ckpt/{namespace}/{job}-{uid}",
        "gs://ckpt/{uid}",
    ],
)
def test_a_place_for_checkpoints_that_can_be_filled_in_is_taken(uri):
    _, operator = process.read({}, {"RLINF_OPERATOR_DEFAULT_CHECKPOINT_URI": uri})
    found = pods.checkpoint_uri(JobMeta(namespace="team", name="math", uid="u1"), ppo_job().parsed(), settings=operator)
    assert found == uri.replace("{namespace}", "team").replace("{job}", "math").replace("{uid}", "u1")


def test_every_number_has_bounds_and_its_default_is_within():
    defaults = {**vars_of(process.ProcessSettings()), **vars_of(OperatorSettings())}
    numbers = {name: value for name, value in defaults.items() if type(value) in (int, float)}
    assert set(process.BOUNDS) == set(numbers)
    assert [name for name, (least, most) in process.BOUNDS.items() if not least < numbers[name] < most] == []


def test_helm_refuses_what_the_operator_would():
    chart = json.loads((Path(__file__).parents[3] / "helm/rlinf-operator/values.schema.json").read_text("utf-8"))
    settings = chart["properties"]["operator"]["properties"]["settings"]["properties"]
    said = {name: (node.get("minimum"), node.get("maximum")) for name, node in settings.items() if "minimum" in node}
    assert said == {name: bounds for name, bounds in process.BOUNDS.items() if name in settings}
    assert "resync_s" in said


def test_a_flag_out_of_its_bounds_is_named_as_it_was_written():
    with pytest.raises(UserError, match="--resync-s is out of its bounds"):
        process.read({"resync_s": "0.5"}, {})


def vars_of(settings):
    return {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}


def test_what_kubernetes_adds_for_a_service_is_no_setting():
    links = {
        "RLINF_OPERATOR_METRICS_SERVICE_HOST": "10.96.0.9",
        "RLINF_OPERATOR_METRICS_SERVICE_PORT_HTTP": "8080",
        "RLINF_OPERATOR_METRICS_PORT": "tcp://10.96.0.9:8080",
        "RLINF_OPERATOR_METRICS_PORT_8080_TCP_ADDR": "10.96.0.9",
    }
    assert process.read({}, links) == process.read({}, {})
    with pytest.raises(UserError, match="RLINF_OPERATOR_METRICS_PORT sets nothing"):
        process.read({}, {"RLINF_OPERATOR_METRICS_PORT": "8080"})


def test_namespaces_are_a_list():
    assert process.namespaces(process.ProcessSettings(watch_namespaces="a, b,")) == ("a", "b")
    assert process.namespaces(process.ProcessSettings()) == ()


def test_namespaces_are_listed_or_selected_and_not_both():
    listed, selected = {"watch_namespaces": "a"}, {"watch_namespace_selector": "rlinf=yes"}
    assert process.read(selected, {})[0].watch_namespace_selector == "rlinf=yes"
    with pytest.raises(UserError, match="remove RLINF_OPERATOR_WATCH_NAMESPACES or RLINF_OPERATOR_WATCH_NAMESPACE_SEL"):
        process.read(listed | selected, {})


async def test_an_operator_without_a_scheduler_does_not_start():
    with pytest.raises(UserError, match="set RLINF_OPERATOR_SCHEDULER_ADDRESS"):
        await main.serve(*process.read({}, {}))


async def test_probes_name_what_is_late_and_live_twice_as_long():
    age = [10.0]
    probes = Probes(Metrics())
    probes.checks["watch of Pod"] = lambda: (age[0], 100.0)
    port = await probes.start(host="127.0.0.1", port=0)
    try:
        async with aiohttp.ClientSession() as session:

            async def get(path):
                async with session.get(f"http://127.0.0.1:{port}{path}") as answer:
                    return answer.status, await answer.text()

            assert await get("/readyz") == (200, "ok\n")
            age[0] = 150.0
            assert await get("/readyz") == (503, "watch of Pod: 150 s, wanted at most 100 s\n")
            assert (await get("/healthz"))[0] == 200
            age[0] = 250.0
            assert (await get("/healthz"))[0] == 503
            assert "rlinf_operator_leader" in (await get("/metrics"))[1]
    finally:
        await probes.stop()


def test_without_glibc_memory_is_left_as_it_is(monkeypatch):
    looked_for = []

    class Musl:
        def __getattr__(self, name):
            looked_for.append(name)
            raise AttributeError(name)

    monkeypatch.setattr("ctypes.CDLL", lambda name: Musl())
    process.share_one_heap()
    process.give_memory_back()
    assert set(looked_for) == {"mallopt", "malloc_trim"}, "and nobody minds that they are not there"


def test_with_glibc_all_threads_share_one_heap_and_free_room_goes_back(monkeypatch):
    asked = []

    class Libc:
        mallopt = staticmethod(lambda *arguments: asked.append(("mallopt", *arguments)))
        malloc_trim = staticmethod(lambda *arguments: asked.append(("malloc_trim", *arguments)))

    monkeypatch.setattr("ctypes.CDLL", lambda name: Libc)
    process.share_one_heap()
    process.give_memory_back()
    assert asked == [("mallopt", -8, 1), ("malloc_trim", 0)]
