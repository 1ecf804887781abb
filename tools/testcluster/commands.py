"""Runs a program to its end: bounded in time, and an error that quotes what it said. Used by the whole package."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tools.testcluster.errors import CommandFailed

END_S = 2.0
"""From the polite end of a command that is overdue to the other one."""
_TIMED_OUT = (124, 137)
"""Exit statuses of `timeout`: it ended the command, and it had to kill it."""


def run(
    argv: Sequence[str | Path],
    *,
    timeout_s: float = 60.0,
    stdin: str | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    check: bool = True,
    within: Sequence[str] = (),
) -> str:
    """Its standard output. CommandFailed names the command, the exit status and the last lines of its output.

    `within` are words that lead into other namespaces first.
    """
    words = [str(word) for word in argv]
    overdue = f"`{shlex.join([*within, *words])}` was not done after {timeout_s:g} s and was ended"
    patience_s = timeout_s
    if within:
        words = [*within, *bounded(words, timeout_s=timeout_s)]
        patience_s += 2 * END_S
    try:
        done = subprocess.run(
            words, input=stdin, capture_output=True, text=True, timeout=patience_s, env=env, cwd=cwd, check=False
        )
    except FileNotFoundError as err:
        raise CommandFailed(f"{words[0]} is not there; install it or run `make testcluster-build`") from err
    except subprocess.TimeoutExpired as err:
        raise CommandFailed(overdue) from err
    if within and done.returncode in _TIMED_OUT:
        raise CommandFailed(overdue)
    if check and done.returncode != 0:
        said = "\n".join((done.stdout + done.stderr).strip().splitlines()[-15:])
        raise CommandFailed(f"`{shlex.join(words)}` ended with {done.returncode}: {said or 'it said nothing'}")
    return done.stdout


def bounded(words: Sequence[str], *, timeout_s: float) -> list[str]:
    """A command that ends itself in time: who kills `nsenter` from outside leaves what it started inside alive."""
    return ["timeout", f"--kill-after={END_S:g}", f"{timeout_s:g}", *words]


def says(
    argv: Sequence[str | Path], *, timeout_s: float, env: Mapping[str, str] | None = None, within: Sequence[str] = ()
) -> str:
    """A probe's standard output; nothing where it failed or took too long. Whoever waits asks again."""
    try:
        return run(argv, timeout_s=timeout_s, env=env, within=within)
    except CommandFailed:
        return ""
