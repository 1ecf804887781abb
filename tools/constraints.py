"""`make constraints`: writes constraints/*.txt, the exact version of every package, from pyproject.toml.

Run it after a change of dependencies; with --upgrade it takes newer versions where pyproject.toml allows them. The
files hold no index address, so that a clone works with whatever index its machine has, and no hashes, as indexes of one
organisation may hold other builds of the same version. They are solved for the platform of the images (Linux x86-64,
Python 3.11); the others are solved under all.txt, so that they agree with it on every package they share.

    all.txt       every extra but rollout: what `make env` installs, and the constraints of every image without vLLM.
                  vLLM for CPUs asks for packages that no common index has: overrides.txt says what it gets
    rollout.txt   worker and rollout: the image with vLLM
    bench.txt     what benchmarks compare with (tools/bench), solved under all.txt too
"""

import subprocess
import sys
from pathlib import Path

from tools import env

ROOT = Path(__file__).resolve().parent.parent
FILES = {
    "all.txt": ("control", "worker", "actor", "reasoning", "rollout-cpu", "env", "cli", "dev"),
    "rollout.txt": ("worker", "rollout"),
    "bench.txt": ("bench",),
}
APART = {"apache-tvm-ffi"}
"""What vLLM for CPUs and vLLM for GPUs pin differently: in all.txt and rollout.txt each has its own. Only engines have
it, and nothing that passes between two pods is of it."""


def shared() -> str:
    """What the other files are solved under."""
    lines = (ROOT / "constraints" / "all.txt").read_text(encoding="utf-8").splitlines()
    return "\n".join(line for line in lines if line.partition("==")[0] not in APART)


def compile_file(name: str, extras: tuple[str, ...], *, arguments: list[str]) -> int:
    command = [str(ROOT / ".venv" / "bin" / "uv"), "pip", "compile", "--quiet", "--no-header", "--no-emit-index-url"]
    command += ["--python-version", "3.11", "--python-platform", "x86_64-manylinux_2_28"]
    command += [part for extra in extras for part in ("--extra", extra)]
    if name == "all.txt":
        command += ["--override", "constraints/overrides.txt"]
    else:
        command += ["--constraints", "-"]
    command += [*arguments, "pyproject.toml", "--output-file", f"constraints/{name}"]
    print(f"constraints: solving constraints/{name} for {', '.join(extras)}", flush=True)
    under = "" if name == "all.txt" else shared()
    return subprocess.run(command, cwd=ROOT, env=env.environment(), input=under, text=True, check=False).returncode


def main() -> int:
    return max(compile_file(name, extras, arguments=sys.argv[1:]) for name, extras in FILES.items())


if __name__ == "__main__":
    sys.exit(main())
