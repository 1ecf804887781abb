"""`make mutants`: seeded mistakes in the product's code, and which of them no unit test sees.

    make mutants ARGS="--seed 7 --count 150"
    make mutants ARGS="--seed 7 --count 40 --under rlinf_worker/turns --under rlinf_api/rpc.py"
    make mutants ARGS="--seed 7 --count 150 --again"         the survivors of that sample once more, after new tests

Each mistake is one token or statement (tools/mutants/mutations.py); the tests are the unit tests that import the module
(tests_of.py), in a copy of the tree under TMPDIR (trial.py), each trial forked from a warm process (warm.py). Verdicts
are lines of build/mutants/SEED.jsonl as they come: a run that was broken off goes on from there, and a file that has
changed since is tried anew. Not in CI: of another seed each time, it finds what to test next. A survivor is a missing
test or means the same as the original.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.mutants import mutations
from tools.mutants.mutations import Mutation
from tools.mutants.tests_of import Imports
from tools.mutants.trial import Tree

ROOT = Path(__file__).parents[2]
UNDER = ("operator", "rlinf_worker", "rlinf_api")
GENERATED = "/_pb/"


def sample(root: Path, files: Iterable[str], *, under: Sequence[str], seed: int, count: int) -> list[Mutation]:
    """Without replacement, each site and kind as likely as any other; the first n of it are the sample of count n."""
    chosen = [
        name for name in sorted(files)
        if name.endswith(".py") and GENERATED not in name and any(_is_under(name, folder) for folder in under)
    ]  # fmt: skip
    sources = {name: (root / name).read_bytes() for name in chosen}
    all_of_them = [m for name, source in sources.items() for m in mutations.of_source(name, source)]
    random.Random(seed).shuffle(all_of_them)
    made: list[Mutation] = []
    for mutation in all_of_them:
        if len(made) == count:
            break
        if mutation.applied(sources[mutation.path]) is not None:
            made.append(mutation)
    return made


def _is_under(name: str, folder: str) -> bool:
    folder = folder.rstrip("/")
    return name == folder or name.startswith(f"{folder}/")


def read(journal: Path) -> dict[str, dict[str, Any]]:
    """The last line of each mutation. A line that was torn as its writer was killed does not count."""
    known: dict[str, dict[str, Any]] = {}
    for line in journal.read_text(encoding="utf-8").splitlines() if journal.exists() else ():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        known[entry["key"]] = entry
    return known


def run(root: Path, options: argparse.Namespace, *, journal: Path) -> list[dict[str, Any]]:
    """The entries of the whole sample, those of earlier runs among them."""
    known = read(journal)
    if options.again:
        known = {key: entry for key, entry in known.items() if entry["verdict"] == "killed"}
    journal.parent.mkdir(parents=True, exist_ok=True)
    with Tree.copied(root) as tree, journal.open("a", encoding="utf-8") as file:
        chosen = sample(tree.root, tree.files, under=options.under, seed=options.seed, count=options.count)
        imports = Imports.of(tree.root, tree.files)
        for number, mutation in enumerate(chosen, start=1):
            if mutation.key in known:
                continue
            started = time.monotonic()
            tests = imports.tests_of(mutation.path, most=options.tests)
            found = tree.tried(mutation, tests, within_s=options.seconds)
            seconds = round(time.monotonic() - started, 1)
            entry = {"key": mutation.key, "said": mutation.said(), "verdict": found.verdict, "by": found.by}
            known[mutation.key] = entry | {"tests": len(tests), "seconds": seconds}
            file.write(json.dumps(known[mutation.key]) + "\n")
            file.flush()
            print(f"mutants: {number}/{len(chosen)} {found.verdict:10} {mutation.said()}", flush=True)
    return [known[mutation.key] for mutation in chosen]


def told(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """The rate, and what there is to do."""
    counts = Counter(entry["verdict"] for entry in entries)
    judged = counts["killed"] + counts["survived"]
    rate = f"{100 * counts['killed'] / judged:.0f}%" if judged else "none"
    others = ", ".join(f"{counts[name]} {name}" for name in ("unfinished", "void") if counts[name])
    lines = [f"{counts['killed']} of {judged} killed: {rate}" + (f"; {others}" if others else "")]
    for name in ("survived", "unfinished", "void"):
        for entry in sorted((e for e in entries if e["verdict"] == name), key=lambda e: str(e["said"])):
            lines.append(f"{name:10} {entry['said']}" + (f"  ({entry['by']})" if entry["by"] else ""))
    return lines


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    summary, _, details = (__doc__ or "").partition("\n")
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="make mutants", description=summary, epilog=details, formatter_class=form)
    parser.add_argument("--seed", type=int, required=True, metavar="N", help="of the sample")
    parser.add_argument("--count", type=int, default=150, metavar="N", help="of mistakes (default 150)")
    parser.add_argument(
        "--under", action="append", metavar="PATH", help=f"files or folders (default {' '.join(UNDER)})"
    )
    parser.add_argument(
        "--tests", type=int, default=40, metavar="N", help="test files per mistake, at most (default 40)"
    )
    parser.add_argument("--seconds", type=float, default=90.0, metavar="N", help="per mistake, at most (default 90)")
    parser.add_argument("--again", action="store_true", help="try those of the sample once more that were not killed")
    options = parser.parse_args(arguments)
    options.under = options.under or list(UNDER)
    if options.count < 1 or options.tests < 1 or options.seconds <= 0:
        parser.error("wanted --count, --tests and --seconds above 0")
    if missing := [path for path in options.under if not (ROOT / path).exists()]:
        parser.error(f"--under {missing[0]} is not there; wanted a path from the root, as rlinf_worker/turns")
    return options


def main() -> int:
    options = parse()
    entries = run(ROOT, options, journal=ROOT / "build" / "mutants" / f"{options.seed}.jsonl")
    print("\n".join(told(entries)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
