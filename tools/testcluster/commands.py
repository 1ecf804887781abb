"""Runs a program to its end: bounded in time, and an error that quotes what it said. Used by the whole package."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tools.testcluster.errors import CommandFailed


def run(
    argv: Sequence[str | Path],
    *,
    timeout_s: float = 60.0,
    stdin: str | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    check: bool = True,
) -> str:
    """Its standard output. CommandFailed names the command, the exit status and the last lines of its output."""
    words = [str(word) for word in argv]
    try:
        done = subprocess.run(
            words, input=stdin, capture_output=True, text=True, timeout=timeout_s, env=env, cwd=cwd, check=False
        )
    except FileNotFoundError as err:
        raise CommandFailed(f"{words[0]} is not there; install it or run `make testcluster-build`") from err
    except subprocess.TimeoutExpired as err:
        raise CommandFailed(f"`{shlex.join(words)}` was not done after {timeout_s:g} s and was ended") from err
    if check and done.returncode != 0:
        said = "\n".join((done.stdout + done.stderr).strip().splitlines()[-15:])
        raise CommandFailed(f"`{shlex.join(words)}` ended with {done.returncode}: {said or 'it said nothing'}")
    return done.stdout


def says(argv: Sequence[str | Path], *, timeout_s: float, env: Mapping[str, str] | None = None) -> str:
    """A probe's standard output; nothing where it failed or took too long. Whoever waits asks again."""
    try:
        return run(argv, timeout_s=timeout_s, env=env)
    except CommandFailed:
        return ""
