"""`python -m tools.bench NAME...`, `--all`, or `--show FILE [--markdown]` for the table of a result that exists."""

import argparse
import contextlib
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from tools.bench import harness, idle, publish, report

OWN = {"__init__", "__main__", "harness", "idle", "publish", "report"}
"""Modules of the harness; every other one is a benchmark. The Makefile has the same list."""


def names() -> list[str]:
    return sorted(path.stem for path in Path(__file__).parent.glob("*.py") if path.stem not in OWN)


def module_of(name: str) -> ModuleType:
    if name not in names():
        raise harness.BenchError(
            f"there is no benchmark {name!r}; there are {', '.join(names()) or 'none yet'}, each a file in tools/bench"
        )
    return importlib.import_module(f"tools.bench.{name}")


def rows_of(module: ModuleType, *, small: bool) -> Sequence[harness.Row]:
    if small:
        if not hasattr(module, "small_rows"):
            raise harness.BenchError(f"{module.__name__} has no small size (no small_rows()); leave --small out")
        return list(module.small_rows())
    if hasattr(module, "rows"):
        return list(module.rows())
    if hasattr(module, "ROWS"):
        return list(module.ROWS)
    raise harness.BenchError(f"{module.__name__} has neither ROWS nor rows(); see the text of tools/bench/__init__.py")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.bench", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names()) or 'none yet'}")
    parser.add_argument("--all", action="store_true", help="every benchmark there is")
    parser.add_argument("--row", action="append", metavar="ROW", help="only this row (again for more)")
    parser.add_argument("--runs", type=int, default=harness.LEAST_RUNS, help="runs of each subject and reference")
    parser.add_argument("--small", action="store_true", help="a size for trying it out, where there is one")
    parser.add_argument("--busy", action="store_true", help="do not wait for an idle machine; the result says how busy")
    parser.add_argument("--publish", action="store_true", help="run nothing: the last result into docs/bench")
    parser.add_argument("--show", type=Path, metavar="FILE", help="print the table of this JSON and run nothing")
    parser.add_argument("--markdown", action="store_true", help="with --show: as in docs/bench")
    return parser.parse_args(arguments)


def bench(name: str, options: argparse.Namespace) -> bool:
    """Whether all bars were met."""
    module = module_of(name)
    all_rows = rows_of(module, small=options.small)
    rows = [row for row in all_rows if options.row is None or row.name in options.row]
    if not rows or set(options.row or ()) - {row.name for row in rows}:
        raise harness.BenchError(f"{name} has no row {options.row}; it has {[row.name for row in all_rows]}")

    def say(text: str) -> None:
        print(f"bench {name}: {text}", flush=True)

    path = harness.ROOT / "build" / "bench" / f"{name}{'-small' if options.small else ''}.json"
    written: list[dict[str, object]] = []

    def done(results: Sequence[harness.Result]) -> None:
        # The first of a whole benchmark begins the file anew; what comes after it, and rows asked for, are put in.
        written[:] = report.write(path, results, keep_others=options.row is not None or bool(written))

    with module.session(say) if hasattr(module, "session") else contextlib.nullcontext():
        harness.run(
            rows,
            runs=options.runs,
            wait_until_idle=idle.measured_idle_share if options.busy else idle.Patience(say=say).wait,
            commit=report.commit(),
            say=say,
            done=done,
        )
    print(f"\n{report.text_table(written)}\n\nbench {name}: written to {path.relative_to(harness.ROOT)}", flush=True)
    return not any(harness.missed(row) for row in written)


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    try:
        if options.show:
            rows = json.loads(options.show.read_text(encoding="utf-8"))["rows"]
            print(report.markdown_table(rows) if options.markdown else report.text_table(rows))
            return 0
        wanted = names() if options.all else options.names
        if not wanted and not options.all:
            raise harness.BenchError(
                f"no benchmark named; there are {', '.join(names()) or 'none yet'} (or give --all)"
            )
        if options.publish:
            for name in wanted:
                source = harness.ROOT / "build" / "bench" / f"{name}.json"
                if not source.is_file():
                    raise harness.BenchError(f"there is no result {source}; run `make bench-{name}` first")
                print(f"bench {name}: written to {publish.publish(name, source=source)}")
            return 0
        met = [bench(name, options) for name in wanted]
    except harness.BenchError as err:
        print(f"bench: {err}", file=sys.stderr)
        return 2
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
