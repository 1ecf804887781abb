"""docs/metrics.md names what operator and scheduler serve, no more and no less, with the labels that it has."""

import re
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

from rlinf_operator.metrics import Metrics
from rlinf_scheduler.__main__ import MeasuredPlanning
from rljob.local.store import MemoryStore

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


@pytest.mark.parametrize(("heading", "registry"), [("Operator", of_the_operator), ("Scheduler", of_the_scheduler)])
def test_the_page_names_what_is_served(heading, registry):
    assert on_the_page(heading) == served(registry())
    assert on_the_page(heading)
