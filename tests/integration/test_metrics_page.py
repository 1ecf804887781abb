"""docs/metrics.md names what a running job serves, no more and no less, with the labels that it has."""

import re
import urllib.request

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from rlinf_api import names
from tests.rljob_runs import ROOT, Run

ONLY_SOMETIMES = "only there once"
OF_WORKERS = frozenset({"role", "worker"})


def tables():
    """name -> (labels, whether it is always there), of each table of a job's; the last one is of workers."""
    text = (ROOT / "docs" / "metrics.md").read_text().partition("\n## Operator\n")[0]
    found = []
    for table in re.findall(r"(?:^\| `.*\n)+", text, re.MULTILINE):
        rows = [[cell.strip() for cell in row.strip().strip("|").split("|")] for row in table.splitlines()]
        found.append({
            name.strip("`"): (frozenset(re.findall(r"`(\w+)`", labels)), ONLY_SOMETIMES not in means)
            for name, _, labels, means in rows
        })  # fmt: skip
    driver, agent, workers = found
    return driver, agent | {n: (labels | OF_WORKERS, always) for n, (labels, always) in workers.items()}


def scrape(address):
    with urllib.request.urlopen(f"http://{address}:{names.PORT_METRICS}/metrics", timeout=30) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    assert all(family.documentation != "Reported by workers" for family in families), "each says what it means"
    return {sample.name: frozenset(sample.labels) for family in families for sample in family.samples}


def address_of(run, pod):
    return yaml.safe_load((run.work_dir / "objects" / f"pod-default-{pod}.yaml").read_text())["status"]["podIP"]


@pytest.mark.timeout(120)
def test_the_page_names_what_driver_and_agent_serve(tmp_path):
    with Run(tmp_path, "spec.flow.steps=100000") as run:
        run.until_step(3)
        expected = zip(("cartpole-driver-a1", "cartpole-cpu-0-a1"), tables(), strict=True)
        for pod, page in expected:

            def complete(pod=pod, page=page):
                always = {name for name, (_, there) in page.items() if there}
                served = scrape(address_of(run, pod))
                return served if served.keys() >= always else None

            served = run.until(complete, what=f"all metrics of {pod}")  # workers report twice a second
            assert {name: page[name][0] for name in served if name in page} == served
