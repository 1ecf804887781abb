"""docs/metrics.md names what operator and scheduler serve, no more and no less, with the labels that it has."""

import re
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

from rlinf_api.errors import ClusterBusy, RLinfError
from rlinf_api.store import NotFound
from rlinf_operator.metrics import Metrics
from rlinf_scheduler.__main__ import MeasuredPlanning
from rljob.local.store import MemoryStore
from tests.builders import ppo_job

PAGE = Path(__file__).resolve().parents[3] / "docs" / "metrics.md"


def of_the_operator():
    return Metrics().registry


def of_the_scheduler():
    registry = CollectorRegistry()
    MeasuredPlanning(MemoryStore(), registry=registry)
    return registry


def served(registry):
    """Name -> labels. From the metrics themselves: one whose labels nobody has used yet has no sample to look at."""
    found = {}
    for metric in set(registry._collector_to_names):
        assert isinstance(metric, MetricWrapperBase)
        name = f"{metric._name}_total" if metric._type == "counter" else metric._name
        found[name] = set(metric._labelnames)
    return found


def on_the_page(heading):
    section = PAGE.read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \|[^|]*\|([^|]*)\|", section, re.MULTILINE)
    return {name: set(re.findall(r"`(\w+)`", labels)) for name, labels in rows}


def test_a_result_of_a_pass_is_there_before_the_first_so_that_an_alert_sees_it_rise():
    value = Metrics().registry.get_sample_value
    for result in ("done", "repeated", "broke"):
        assert value("rlinf_operator_reconcile_seconds_count", {"result": result}) == 0


@pytest.mark.parametrize(
    ("error", "answer"),
    [
        (ClusterBusy("create"), "ClusterBusy"),
        (RLinfError("create"), "RLinfError"),
        (NotFound("create"), "NotFound"),
        (KeyError("a bug"), "broke"),
    ],
)
async def test_an_answer_without_a_plan_is_counted_and_was_there_before_the_first(error, answer):
    class Refusing:
        async def create(self, obj):
            raise error

        async def get(self, kind, name, *, namespace="default"):
            assert kind == "RLProfile"
            raise NotFound(name)

        async def list(self, kind, *, namespace, label_selector):
            raise AssertionError("never asked")

        async def patch(self, kind, name, *, patch, namespace="default"):
            raise AssertionError("never asked")

        async def delete(self, kind, name, *, namespace="default"):
            raise AssertionError("never asked")

    registry = CollectorRegistry()
    planning = MeasuredPlanning(Refusing(), registry=registry)

    def value():
        return registry.get_sample_value("rlinf_scheduler_plans_total", {"answer": answer})

    assert value() == 0
    with pytest.raises(type(error)):
        await planning.request_plan(ppo_job().build(), reason="Initial", highest_revision=0)
    assert value() == 1


@pytest.mark.parametrize("answer", ["planned", "infeasible"])
def test_a_plan_and_why_there_is_none_are_there_before_the_first(answer):
    assert of_the_scheduler().get_sample_value("rlinf_scheduler_plans_total", {"answer": answer}) == 0


@pytest.mark.parametrize(("heading", "registry"), [("Operator", of_the_operator), ("Scheduler", of_the_scheduler)])
def test_the_page_names_what_is_served(heading, registry):
    assert on_the_page(heading) == served(registry())
    assert on_the_page(heading)
