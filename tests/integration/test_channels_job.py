"""What channels cost the driver, counted on whole jobs: a cycle nothing per question, a queue a few messages per
unit."""

import urllib.request

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from rlinf_api import names
from tests.rljob_runs import ROOT, Run

FAN = ROOT / "tools" / "bench" / "runtime_parts" / "fan.yaml"
HOP = ROOT / "tools" / "bench" / "foundation_parts" / "hop.yaml"


def scrape(run: Run, pod: str, *, role: str = "") -> dict[str, float]:
    """Name with the labels that tell series apart here -> value. `role`: of its workers alone."""
    path = run.work_dir / "objects" / f"pod-default-{pod}.yaml"
    address = yaml.safe_load(path.read_text())["status"]["podIP"]
    with urllib.request.urlopen(f"http://{address}:{names.PORT_METRICS}/metrics", timeout=30) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    found: dict[str, float] = {}
    for sample in (s for family in families for s in family.samples):
        if role and sample.labels.get("role") != role:
            continue
        labels = [sample.labels[key] for key in ("direction", "channel", "state", "side") if key in sample.labels]
        name = " ".join([sample.name, *labels])
        found[name] = found.get(name, 0.0) + sample.value
    return found


def messages(found: dict[str, float]) -> float:
    return found["rlinf_driver_messages_total in"] + found["rlinf_driver_messages_total out"]


@pytest.mark.timeout(120)
def test_a_unit_of_a_queue_costs_the_driver_three_messages_at_most(tmp_path):
    sets = ("spec.flow.steps=1000", "spec.flow.config.units=2000")
    with Run(tmp_path, *sets, file=FAN, small=False) as run:
        run.until_step(3)
        found = scrape(run, "fan-driver-a1")
        units = found["rlinf_queue_units_total units announced"]
        assert units >= 4000
        assert messages(found) <= 3 * units


@pytest.mark.timeout(120)
def test_a_question_and_its_answer_cost_the_driver_a_twentieth_of_a_message_at_most(tmp_path):
    sets = ("spec.flow.steps=1000", "spec.flow.config.paced=50", "spec.flow.config.flood=5000")
    with Run(tmp_path, *sets, file=HOP, small=False) as run:
        run.until_step(3)

        def flooded():
            """What the worker has said of itself, twice a second."""
            found = scrape(run, "hop-cpu-0-a1", role="receiver")
            questions = found.get("rlinf_channel_items_total messages consumer", 0.0)
            return questions if questions >= 5000 else None

        questions = run.until(flooded, what="its numbers")
        assert messages(scrape(run, "hop-driver-a1")) <= 0.05 * questions
