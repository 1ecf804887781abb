"""`make generate` and `make verify`: runs every generator of the repository, which is every tools/gen_*.py.

A generator is a module with `main()` (run as `python -m tools.gen_NAME`) that writes files which are committed. With
--verify this compares what lay there before with what the generators wrote, and fails on a difference. It compares
file contents, not with git, so that a change that is not committed yet can be verified too. The new files stay: what
is left to do is to look at them and commit them.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUTPUTS = ("crds", "rlinf_api/_pb", "helm", "docs", "rljob")
"""Folders that generators write to; a generator that writes elsewhere adds its folder here."""


def generators() -> list[str]:
    return sorted(path.stem for path in (ROOT / "tools").glob("gen_*.py"))


def contents() -> dict[str, bytes]:
    files = (path for folder in OUTPUTS for path in sorted((ROOT / folder).rglob("*")))
    return {
        str(path.relative_to(ROOT)): path.read_bytes()
        for path in files
        if path.is_file() and "__pycache__" not in path.parts
    }


def changed(before: dict[str, bytes], after: dict[str, bytes]) -> list[str]:
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))


def environment() -> dict[str, str]:
    """Generators call programs of .venv by name (protoc's plugins), and `make` does not activate it."""
    return {**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])}


def main() -> int:
    before = contents()
    for name in generators():
        done = subprocess.run([sys.executable, "-m", f"tools.{name}"], cwd=ROOT, env=environment(), check=False)
        if done.returncode != 0:
            print(f"generate: tools/{name}.py exited with {done.returncode}; its message is above", file=sys.stderr)
            return 1
    stale = changed(before, contents())
    if "--verify" in sys.argv and stale:
        print("verify: these generated files were not what their sources say, or were edited by hand:", file=sys.stderr)
        for name in stale:
            print(f"  {name}", file=sys.stderr)
        print("verify: they are written again now; read the difference and commit it", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
