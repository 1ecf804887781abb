"""Part of `make verify`: the places that state a version agree.

* the newest entry of CHANGELOG.md, and the chart's version and appVersion, are pyproject.toml's version;
* each requirement of pyproject.toml has an exact pin in constraints/ that satisfies it, and the files agree.
"""

import re
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tools.constraints import APART, FILES

ROOT = Path(__file__).resolve().parent.parent


def project(root: Path) -> dict[str, object]:
    table: dict[str, object] = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return table


def pins(text: str) -> dict[str, Version]:
    """`numpy==2.3.5` and the like; comments that say who needs it are skipped."""
    return {canonicalize_name(name): Version(v) for name, v in re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE)}


def version_problems(root: Path) -> list[str]:
    want = str(project(root)["version"])
    problems = []
    newest = re.search(r"^## (\S+)", (root / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    if newest is None or newest[1] != want:
        problems.append(
            f"CHANGELOG.md begins with version {newest[1] if newest else 'none'}, pyproject.toml says {want}; "
            f"write the entry '## {want}' or correct the version"
        )
    chart = root / "helm" / "rlinf-operator" / "Chart.yaml"
    if chart.exists():
        for key, got in re.findall(r"^(version|appVersion): *\"?([^\s\"]+)", chart.read_text("utf-8"), re.MULTILINE):
            if got != want:
                problems.append(f"helm/rlinf-operator/Chart.yaml has {key} {got}, pyproject.toml says {want}; set it")
    return problems


def pin_problems(root: Path) -> list[str]:
    table = project(root)
    extras = table["optional-dependencies"]
    base = table["dependencies"]
    assert isinstance(extras, dict)
    assert isinstance(base, list)
    problems = []
    held = {name: pins((root / "constraints" / name).read_text(encoding="utf-8")) for name in FILES}
    for name, wanted_extras in FILES.items():
        for text in [*base, *(text for extra in wanted_extras for text in extras[extra])]:
            requirement = Requirement(text)
            pin = held[name].get(canonicalize_name(requirement.name))
            if pin is None or not requirement.specifier.contains(pin, prereleases=True):
                problems.append(
                    f"constraints/{name} pins {requirement.name} to {pin or 'nothing'}, pyproject.toml wants "
                    f"{requirement.specifier or 'some version'}; run make constraints"
                )
    first, *others = (held[name] for name in FILES)
    problems += [
        f"constraints disagree on {name}: {first[name]} and {second[name]}; run make constraints"
        for second in others
        for name in sorted((first.keys() & second.keys()) - APART)
        if first[name] != second[name]
    ]
    unused = set(extras) - {extra for wanted in FILES.values() for extra in wanted}
    problems += [f"extra {extra!r} is in no constraints file; add it to tools/constraints.py" for extra in unused]
    return problems


def main() -> int:
    problems = version_problems(ROOT) + pin_problems(ROOT)
    for problem in problems:
        print(f"check_versions: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
