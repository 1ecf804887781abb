"""The import-linter contracts of pyproject.toml report what they are there for."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("rlinf_api", "operator/rlinf_operator", "operator/rlinf_scheduler", "rlinf_worker", "rljob")


def lint_imports(folder):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder / "operator"), str(folder)])}
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-logo", "--no-cache"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


VIOLATIONS = {
    "rlinf_api/probe_heavy.py": "import numpy",
    "operator/rlinf_operator/policies/probe_torch.py": "import torch",
    "operator/rlinf_operator/reconcile/decide.py": "import asyncio",
    "operator/rlinf_operator/policies/probe_client.py": "import rlinf_operator.clients.probe_clients",
    "operator/rlinf_operator/clients/probe_clients.py": "",
    "operator/rlinf_operator/manifests/probe_worker.py": "import rlinf_worker",
    "operator/rlinf_operator/misc_stray.py": "",
    "operator/rlinf_scheduler/planner/probe_torch.py": "import torch",
    "rlinf_worker/roles/actor/probe_actor.py": "import rlinf_worker.roles.rollout.probe_rollout",
    "rlinf_worker/roles/rollout/probe_rollout.py": "",
    "rlinf_worker/links/probe_up.py": "import rlinf_worker.channels.probe_channel",
    "rlinf_worker/channels/probe_channel.py": "",
    "rlinf_worker/queues/given.py": "import socket",
    "rlinf_worker/weights/probe_one.py": "if TYPE_CHECKING:\n    import rlinf_worker.weights.probe_other",
    "rlinf_worker/weights/probe_other.py": "import rlinf_worker.weights.probe_one",
}


def named_in_contracts() -> set[str]:
    """Modules of ours that a contract names one by one: they have to be there."""
    linter = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    lists = ("source_modules", "forbidden_modules", "skip_descendants")
    listed = {module for contract in linter["contracts"] for each in lists for module in contract.get(each, ())}
    return {m for m in listed if m.partition(".")[0] in linter["root_packages"] and "." in m and "*" not in m}


def drawn(package):
    """The layers of a package in the picture of docs/architecture.md, from the top."""
    _, _, picture = (ROOT / "docs" / "architecture.md").read_text().partition("## Layers\n")
    lines = re.search(rf"^{package} +(\w.*(?:\n +\S.*)*)", picture.split("```")[1], re.MULTILINE)
    assert lines is not None, package
    return [{name.strip() for name in level.split("|")} for level in lines[1].partition(";")[0].split(">")]


@pytest.mark.parametrize("package", ["rlinf_operator", "rlinf_scheduler", "rlinf_worker", "rlinf_worker.roles"])
def test_the_picture_of_the_layers_is_that_of_the_contracts_and_of_what_there_is(package):
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = (c["layers"] for c in contracts if c.get("containers") == [package])
    source = "operator" if package in ("rlinf_operator", "rlinf_scheduler") else ""
    folder = ROOT / source / package.replace(".", "/")
    levels = [{name.strip(" ()") for name in layer.split("|")} for layer in layers]
    there = [
        {name for name in level if list(folder.glob(f"{name}.py")) + list(folder.glob(f"{name}/*.py"))}
        for level in levels
    ]
    assert drawn(package.rpartition(".")[2]) == [level for level in there if level]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """One run over bare packages with the real contracts, and one violation of each kind."""
    folder = tmp_path_factory.mktemp("bare")
    shutil.copy(ROOT / "pyproject.toml", folder)
    for name, line in {**{f"{package}/__init__.py": "" for package in PACKAGES}, **VIOLATIONS}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(line + "\n")
    for module in named_in_contracts():
        source = folder / "operator" if module.startswith(("rlinf_operator", "rlinf_scheduler")) else folder
        path = source / (module.replace(".", "/") + ".py")
        if not path.exists() and not path.with_suffix("").is_dir():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("")
    for path in [*folder.rglob("*")]:
        if path.is_dir() and path.name != "operator":
            (path / "__init__.py").touch()
    return lint_imports(folder)


@pytest.mark.parametrize(
    "sentence",
    [
        r"rlinf_api is not allowed to import numpy",
        r"rlinf_operator is not allowed to import torch",
        r"rlinf_operator\.policies is not allowed to import rlinf_operator\.clients",
        r"rlinf_operator\.reconcile\.decide is not allowed to import asyncio",
        r"rlinf_operator is not allowed to import rlinf_worker",
        r"- rlinf_operator\.misc_stray|misc_stray",
        r"rlinf_scheduler is not allowed to import torch",
        r"rlinf_worker\.roles\.actor is not allowed to import rlinf_worker\.roles\.rollout",
        r"rlinf_worker\.links is not allowed to import rlinf_worker\.channels",
        r"rlinf_worker\.queues\.given is not allowed to import socket",
        r"No cycles are allowed in rlinf_worker\.weights\.",
    ],
)
def test_a_violation_is_reported_by_name(report, sentence):
    status, text = report
    assert status != 0
    assert re.search(sentence, text), text
