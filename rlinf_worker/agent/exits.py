"""What is told of a worker's end: the best account there is. Called by supervisor.py, once nothing of it is left."""

from __future__ import annotations

import signal

from rlinf_api import names
from rlinf_api.report import Failure
from rlinf_worker import last_words
from rlinf_worker.agent import proctree
from rlinf_worker.agent.identity import PodIdentity
from rlinf_worker.agent.lifecycle import SayExited
from rlinf_worker.agent.process import Process


def account(worker: str, said: SayExited, ended: Process | None, *, identity: PodIdentity, limit_bytes: int) -> Failure:
    """That it hung, its own words, the words in its file, the end of its stderr. Closes what ended."""
    role, number = names.split_worker_id(worker)
    tail, left = ended.close() if ended is not None else ("", None)
    words = said.words or left
    exit_code = said.exit_code
    if said.failed_to_start:
        reason, message, exit_code = "SpawnFailed", said.failed_to_start, names.EXIT_RETRYABLE
    elif said.hung:
        reason, message = "Hung", f"worker {worker} hung and was killed: {said.hung}"
    elif words is not None:
        reason, message = words.reason, words.message
    elif said.exit_code == 0:
        reason, message = "Finished", ""
    else:
        reason, how = how_it_ended(said.exit_code)
        message = f"worker {worker} {how}" + (f"; its last lines: {tail}" if tail and not said.asked else "")
    if said.survivors:
        message += f"; still there: {', '.join(said.survivors)}"
    message = last_words.shorten(message, limit_bytes)
    if reason == "Killed" and not said.asked and _is_out_of_memory(said, ended):
        reason = "OOMKilled"
        message += "; by the kernel, most likely: the pod reached its memory limit; raise it, or make the role smaller"
    return Failure(
        role=role,
        worker=number,
        pod=identity.pod,
        node=identity.node,
        exit_code=exit_code,
        reason=reason,
        message=message,
    )


def _is_out_of_memory(said: SayExited, ended: Process | None) -> bool:
    is_killed = said.exit_code == 128 + signal.SIGKILL
    return is_killed and ended is not None and proctree.oom_kills() > ended.oom_kills


def how_it_ended(exit_code: int) -> tuple[str, str]:
    """
    >>> how_it_ended(137)
    ('Killed', 'was killed by signal 9 (SIGKILL)')
    """
    number = exit_code - 128
    if 0 < number < signal.NSIG:
        try:
            name = signal.Signals(number).name
        except ValueError:
            name = "no name"
        return "Killed", f"was killed by signal {number} ({name})"
    return "ExitCode", f"exited with code {exit_code}"
