"""`python -I -S watchdog.py AGENT_PID MARK`: waits until that process is dead, then kills every process with the mark.

Started by `leash.start_watchdog`; imports nothing but the standard library's core, as one runs beside every agent.
A process is marked when MARK (NAME=value) is in the environment it was started with; children inherit that.
"""

import os
import select
import signal
import sys
import time

LIMIT_S = 10.0
"""A process that starts others as fast as they are killed must not keep us for ever."""


def marked(mark: bytes) -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                if mark in file.read().split(b"\0"):
                    found.append(int(name))
        except OSError:
            continue  # gone, or of another user
    return found


def main(agent: int, mark: bytes) -> None:
    try:
        fd = os.pidfd_open(agent)
    except ProcessLookupError:
        fd = -1
    if fd >= 0 and os.getppid() == agent:
        select.select([fd], [], [])
    deadline = time.monotonic() + LIMIT_S
    while (pids := marked(mark)) and time.monotonic() < deadline:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.01)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2].encode())
