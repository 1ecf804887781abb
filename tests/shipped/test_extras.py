"""Each extra brings what its part imports, and nothing that nobody does: parts are loaded with all else refused."""

import ast
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
MODULES = metadata.packages_distributions()
"""Top-level module to the distributions that have files in it."""

AGENT = ["rlinf_worker.agent.main", "rlinf_worker.runtime.main", "rlinf_worker.runtime.worker"]
DRIVER = [
    "rlinf_worker.driver.main", "rlinf_worker.flows.grpo", "rlinf_worker.flows.ppo", "rlinf_worker.flows.synthetic",
]  # fmt: skip
RLJOB = ["rljob.__main__", "rljob.app", "rljob.manifest", "rljob.plan", "rljob.run", "rljob.timeline", "rljob.picture"]
NEEDED = {
    ("control",): ["rlinf_operator.__main__", "rlinf_operator.handlers.rljobs", "rlinf_scheduler.__main__"],
    ("worker",): [*AGENT, *DRIVER, "rlinf_worker.roles.synthetic.role"],
    ("cli",): [*RLJOB, *AGENT, *DRIVER, "rljob.local.runner", "rlinf_worker.roles.synthetic.role"],
    ("worker", "env"): ["rlinf_worker.roles.env.role"],
    ("worker", "actor"): ["rlinf_worker.roles.actor.role", "rlinf_worker.roles.rollout.role"],
    ("worker", "reasoning"): [
        "rlinf_worker.roles.actor.role",
        "rlinf_worker.roles.actor.text",
        "rlinf_worker.roles.rollout.language",
        "rlinf_worker.roles.reward.role",
        "rlinf_worker.roles.reward.child",
    ],
}
OF_PART = {
    "control": ("operator",),
    "worker": ("rlinf_worker", "rlinf_api"),
    "cli": ("rljob", "operator", "rlinf_worker", "rlinf_api"),
    "env": ("rlinf_worker/roles/env",),
    "reasoning": ("rlinf_worker/roles", "examples/grpo"),
    "actor": ("rlinf_worker/roles/actor", "rlinf_worker/algorithms", "rlinf_worker/weights"),
}
"""Extra to the folders of its part. Not `rollout`: its engine has no role in this version."""

LATE = {"reasoning": {"jinja2", "math-verify"}}
"""What a library of the extra imports for what we ask of it (a chat template), and does not require itself; what is
loaded by its name, in the child process of a reward."""

REFUSING = """
import importlib, sys
sys.modules.update(dict.fromkeys({refused!r}))
for name in {modules!r}:
    importlib.import_module(name)
"""


def brought(extras):
    """Every distribution that `pip install rlinf-operator[extras]` brings, by pyproject.toml as it is now."""
    seen, todo = set(), [*PROJECT["dependencies"], *(text for extra in extras for text in EXTRAS[extra])]
    while todo:
        requirement = Requirement(todo.pop())
        marker = requirement.marker
        if marker and not any(marker.evaluate({"extra": extra}) for extra in requirement.extras | {""}):
            continue
        key = canonicalize_name(requirement.name)
        if key not in seen:
            seen.add(key)
            todo += metadata.requires(key) or []
    return seen


def refusing(extras, modules):
    """A program that loads the modules where nothing else is installed than what the extras bring."""
    known = brought(extras) | {"rlinf-operator"}
    refused = sorted(top for top, owners in MODULES.items() if not {canonicalize_name(o) for o in owners} & known)
    assert "pytest" in refused
    return REFUSING.format(refused=refused, modules=modules)


def program(code, *arguments):
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("extras", NEEDED, ids=",".join)
def test_an_extra_brings_all_that_its_part_loads(extras):
    done = program(refusing(extras, NEEDED[extras]))
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_driver_loads_no_library_that_only_workers_compute_with():
    """Its pod begins sooner, and runs where those were never built; a name that the protocol of roles mentions has
    once brought the library of checksums."""
    workers = ["xxhash", "numpy", "torch", "safetensors", "gymnasium"]
    done = program(REFUSING.format(refused=workers, modules=DRIVER))
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*/rljob.yaml")), ids=lambda path: path.parent.name)
def test_the_extra_of_the_command_line_is_enough_to_validate(example):
    code = refusing(("cli",), ["rljob.__main__"]) + "\nfrom rljob.__main__ import main\nmain()"
    done = program(code, "validate", example)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.endswith("is valid\n")


@pytest.mark.parametrize("extra", OF_PART)
def test_nothing_is_required_that_nobody_imports(extra):
    imported = {name for folder in OF_PART[extra] for path in (ROOT / folder).rglob("*.py") for name in imports(path)}
    used = {canonicalize_name(owner) for name in imported for owner in MODULES.get(name, ())}
    wanted = {canonicalize_name(Requirement(text).name) for text in EXTRAS[extra]}
    assert wanted - used - LATE.get(extra, set()) == set()


def imports(path):
    """Top-level modules that a file imports anywhere, late imports too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]
