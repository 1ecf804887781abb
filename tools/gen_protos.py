"""Generate rlinf_api/_pb from rlinf_api/proto: `python -m tools.gen_protos [--check]`, by make generate and verify.

The proto files keep their package path (rlinf/<name>/v1alpha1); protoc's virtual path puts the generated modules under
rlinf_api._pb, so that nothing named `rlinf` appears at the top level of site-packages.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "rlinf_api" / "proto"
TARGET = ROOT / "rlinf_api" / "_pb"
HEADER = '"""Generated from rlinf_api/proto by tools/gen_protos.py; not for editing."""\n'


def generate(out: Path) -> None:
    """Write the tree of generated modules to `out`/rlinf_api/_pb."""
    protos = sorted(str(Path("rlinf_api/_pb") / p.relative_to(SOURCE)) for p in SOURCE.rglob("*.proto"))
    arguments = [
        "protoc",
        f"--proto_path=rlinf_api/_pb={SOURCE}",
        f"--python_out={out}",
        f"--grpc_python_out={out}",
        f"--mypy_out=quiet:{out}",
        f"--mypy_grpc_out=quiet:{out}",
        *protos,
    ]
    if protoc.main(arguments) != 0:
        raise SystemExit("protoc failed; see its message above")
    for folder in [out / "rlinf_api" / "_pb", *(p for p in (out / "rlinf_api" / "_pb").rglob("*") if p.is_dir())]:
        (folder / "__init__.py").write_text(HEADER)


def contents(folder: Path) -> dict[str, bytes]:
    files = (p for p in folder.rglob("*") if p.suffix in (".py", ".pyi"))
    return {str(p.relative_to(folder)): p.read_bytes() for p in files}


def main() -> int:
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        fresh = Path(scratch) / "rlinf_api" / "_pb"
        if "--check" in sys.argv:
            new, old = contents(fresh), contents(TARGET)
            stale = sorted(name for name in new.keys() | old.keys() if new.get(name) != old.get(name))
            if stale:
                print(f"rlinf_api/_pb is not what the proto files give: {', '.join(stale[:5])}; run make generate")
                return 1
            return 0
        shutil.rmtree(TARGET, ignore_errors=True)
        shutil.copytree(fresh, TARGET)
    return 0


if __name__ == "__main__":
    sys.exit(main())
