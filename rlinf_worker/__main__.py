"""`python -m rlinf_worker agent|driver|worker`: what a pod's container and an agent start.

Each part is imported only when it is the one asked for: a worker of a light role must not pay for gRPC servers, nor an
agent for torch. Whatever ends a part ends here: one sentence as the last line of stderr, the same as JSON in the
termination message, and an exit code of `names.EXIT_*`. Tracebacks are log lines.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence

from rlinf_api import names
from rlinf_api.errors import RLinfError, WorkerUnreachable
from rlinf_worker import last_words, logs

logger = logging.getLogger("rlinf_worker")


def _agent() -> int:
    from rlinf_worker.agent import main as agent

    return agent.run()


def _driver() -> int:
    from rlinf_worker.driver import main as driver

    return driver.run()


def _worker() -> int:
    from rlinf_worker.agent import leash

    leash.put_on(os.environ)  # before the imports of a role, which take seconds
    from rlinf_worker.runtime import main as runtime

    return runtime.run()


RUN: dict[str, Callable[[], int]] = {"agent": _agent, "driver": _driver, "worker": _worker}


def main(argv: Sequence[str]) -> int:
    if len(argv) != 1 or argv[0] not in RUN:
        got = repr(" ".join(argv)) if argv else "nothing"
        sys.stderr.write(f"python -m rlinf_worker: got {got}, wanted one of {', '.join(RUN)}\n")
        return names.EXIT_USER_ERROR
    part = argv[0]
    logs.configure(part, os.environ)
    try:
        return RUN[part]()
    except KeyboardInterrupt:
        return names.EXIT_TERMINATED
    except Exception as error:  # noqa: BLE001  top of the process: everything becomes a sentence and an exit code
        return _ended_by(error, part)


def _ended_by(error: Exception, part: str) -> int:
    # A role's own exception is its worker's death, after which the driver starts the next attempt; in driver and agent
    # what is not of our error tree is a bug of ours.
    failure = last_words.of(error, unknown=names.EXIT_RETRYABLE if part == "worker" else names.EXIT_BUG)
    ours = isinstance(error, RLinfError) and failure.exit_code != names.EXIT_BUG
    # What the user's own code raised is chained; its stack is theirs to read. A peer that is away has no such stack.
    away = isinstance(error, WorkerUnreachable)
    theirs = not away and not isinstance(error.__cause__, RLinfError | OSError | ImportError | None)
    level = logging.ERROR if theirs or not ours else logging.DEBUG
    logger.log(level, "%s ended by %s", part, failure.reason, exc_info=error)
    last_words.write(failure, os.environ.get(names.ENV_TERMINATION_LOG, ""))
    sys.stderr.write(f"{failure.message}\n")
    return failure.exit_code


if __name__ == "__main__":
    # Until the part has a handler of its own: the kernel drops a signal to a container's first process that has none,
    # so that a pod that was deleted while it still imports would live until the end of its grace.
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(names.EXIT_TERMINATED))
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: taking torch apart costs seconds, and a thread that is still importing it would be waited for. What
    # has to be told and cleared away has been by now.
    os._exit(code)
