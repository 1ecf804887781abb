"""`make env`: brings .venv to exactly what pyproject.toml and constraints/all.txt say.

It is run by the system's Python, before anything is installed, so it uses the standard library only. It installs uv
into .venv with pip and everything else with uv, from whatever index pip is configured for. It does nothing when the
stamp in .venv says that the environment is current. Packages that somebody added by hand are removed when it does run:
a leftover hides a dependency that nobody declared.

    python3 tools/env.py            make .venv or bring it up to date
    python3 tools/env.py --force    install again although the stamp is current
"""

from __future__ import annotations  # an old Python must get as far as check_python

import ctypes
import fcntl
import hashlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / "rlinf-env.json"
CONSTRAINTS = ROOT / "constraints" / "all.txt"
OLDEST = (3, 11)
NUMA = "libnuma.so.1"


class EnvError(Exception):
    """The environment cannot be made; the message is for the person who typed `make env`."""


def say(text: str) -> None:
    print(f"env: {text}", flush=True)


def check_python() -> None:
    """Debian's python3 comes without venv and ensurepip; both are in one package that is not always installed."""
    have = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] < OLDEST:
        raise EnvError(
            f"{sys.executable} is Python {have}, but 3.11 or newer is needed; "
            "install one and name it: make env PYTHON=python3.11"
        )
    try:
        import ensurepip  # noqa: F401, PLC0415  (its absence is what is asked here)
        import venv  # noqa: F401, PLC0415
    except ImportError as err:
        raise EnvError(
            f"{sys.executable} (Python {have}) has no module {err.name!r}, which makes virtual environments; "
            "on Debian and Ubuntu: apt-get install python3-venv, then make env again"
        ) from None


def wanted_hash() -> str:
    """What the installed packages depend on. Tool settings in pyproject.toml are left out: they install nothing."""
    import tomllib  # noqa: PLC0415  (not in a Python too old; check_python has said so in a sentence)

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    parts = {
        "build-system": project["build-system"],
        "project": project["project"],
        "hatch": project["tool"]["hatch"],
        "constraints": CONSTRAINTS.read_text(encoding="utf-8"),
        "how": Path(__file__).read_text(encoding="utf-8"),
        "root": str(ROOT),  # an editable install holds absolute paths: a moved clone is not current
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def is_current(wanted: str) -> bool:
    try:
        return bool(json.loads(STAMP.read_text(encoding="utf-8"))["hash"] == wanted) and runs(VENV / "bin" / "python")
    except (OSError, ValueError, KeyError):
        return False


def runs(python: Path) -> bool:
    if not python.exists():
        return False
    return subprocess.run([str(python), "-S", "-c", ""], capture_output=True, check=False).returncode == 0


def index_settings() -> dict[str, str]:
    """pip's index in uv's words: uv reads neither pip.conf nor PIP_*, and a machine has usually only set up pip."""
    listing = subprocess.run(
        [str(VENV / "bin" / "python"), "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
    ).stdout
    found: dict[str, str] = {}
    for section in ("global", "install", ":env:"):  # pip's own order, the later wins
        for name, value in re.findall(rf"^{re.escape(section)}\.([\w-]+)='(.*)'$", listing, re.MULTILINE):
            found[name] = value
    names = {
        "index-url": ("UV_DEFAULT_INDEX",),
        "extra-index-url": ("UV_INDEX",),
        "cert": ("SSL_CERT_FILE",),
        "default-timeout": ("UV_HTTP_TIMEOUT",),
        "timeout": ("UV_HTTP_TIMEOUT",),
    }
    settings = {uv: found[pip] for pip, uvs in names.items() for uv in uvs if pip in found}
    links = [link for link in found.get("find-links", "").split() if "://" in link or Path(link).is_dir()]
    if links:
        settings["UV_FIND_LINKS"] = ",".join(links)
    return {name: value for name, value in settings.items() if name not in os.environ}


def environment() -> dict[str, str]:
    """For a uv that is about to ask an index."""
    return {**os.environ, **index_settings()}


def run(what: str, *command: str, env: dict[str, str] | None = None) -> None:
    started = time.monotonic()
    say(what)
    done = subprocess.run(command, cwd=ROOT, env=env, check=False)
    if done.returncode != 0:
        raise EnvError(
            f"{what}: {Path(command[0]).name} exited with {done.returncode} (its message is above); "
            "when it is about the network or an index, see `pip config list`; then make env again"
        )
    say(f"... {time.monotonic() - started:.0f} s")


def pinned(name: str) -> str:
    match = re.search(rf"^{name}==(\S+)", CONSTRAINTS.read_text(encoding="utf-8"), re.MULTILINE)
    if match is None:
        raise EnvError(f"constraints/all.txt has no line '{name}==...'; run make constraints with a working .venv")
    return match.group(1)


def installed_uv() -> str:
    uv = VENV / "bin" / "uv"
    if not uv.exists():
        return ""
    words = subprocess.run([str(uv), "--version"], capture_output=True, text=True, check=False).stdout.split()
    return words[1] if len(words) > 1 else ""


def make() -> None:
    python, uv = str(VENV / "bin" / "python"), str(VENV / "bin" / "uv")
    if not runs(Path(python)) or not (VENV / "bin" / "pip").exists():
        clear = ["--clear"] if VENV.exists() else []  # half-made, or its Python is gone
        run("making .venv", sys.executable, "-m", "venv", *clear, str(VENV))
    settings = environment()
    if installed_uv() != pinned("uv"):
        run(f"installing uv {pinned('uv')}", python, "-m", "pip", "install", "--quiet", f"uv=={pinned('uv')}")
    # Bytecode is compiled here once: where PYTHONDONTWRITEBYTECODE is set, every process would compile it again.
    common = ["--python", python, "--compile-bytecode"]
    run(
        "installing the packages of constraints/all.txt (the first time about 7 GB, torch the most of it)",
        *[uv, "pip", "sync", *common, str(CONSTRAINTS)],
        env=settings,
    )
    run(
        "installing rlinf-operator, editable",
        *[
            uv,
            "pip",
            "install",
            *common,
            "--quiet",
            "--no-deps",
            "--no-build-isolation",
            "--reinstall",
            "-e",
            str(ROOT),
        ],
        env=settings,
    )


def missing_libraries() -> list[str]:
    """Sentences for shared libraries that no wheel brings: without them only what needs them fails, and late."""
    try:
        ctypes.CDLL(NUMA)
    except OSError:
        return [
            f"no {NUMA}, without which role kind `vllm` does not start; on Debian and Ubuntu: apt-get install libnuma1"
        ]
    return []


def main() -> int:
    try:
        check_python()
        with open(ROOT / ".venv.lock", "w", encoding="utf-8") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say("waiting for another make env in this clone")
                fcntl.flock(lock, fcntl.LOCK_EX)
            wanted = wanted_hash()
            if "--force" not in sys.argv and is_current(wanted):
                return 0
            STAMP.unlink(missing_ok=True)
            started = time.monotonic()
            make()
            STAMP.write_text(json.dumps({"hash": wanted}) + "\n", encoding="utf-8")
            for sentence in missing_libraries():
                say(sentence)
            say(f".venv is ready after {time.monotonic() - started:.0f} s")
    except EnvError as err:
        print(f"env: {err}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("env: interrupted; make env goes on where it stopped", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
