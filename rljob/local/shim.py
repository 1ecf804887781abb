"""One life of one container: starts its main process, keeps its log, and leaves nothing behind. Runs as its own
process.

For: `processes.py`, which starts `python -I -S shim.py` per container life and talks to it over one socket, whose
number is argv[1]. Not for: import by anything that minds start-up time being spent elsewhere; it must start in
milliseconds, so it imports neither site-packages nor json nor asyncio (measured: `-I -S` 10 ms, json another 10 ms;
hence marshal, whose two ends are the same interpreter by construction).

Why a process between backend and container: it is a *subreaper*, so a grandchild that called setsid, or whose parent
was killed with -9, is still its descendant and can be found exactly; it is single-threaded, so fork and prctl are
safe; and the end of file on its socket means that the backend died, however it died. Three nets, then:

| death of | who notices | what goes down |
|---|---|---|
| main process | shim: waitpid | every descendant left (a container's processes die with its PID 1) |
| backend, kill -9 included | shim: end of file on the socket | everything, and the pod's folders |
| shim, kill -9 | kernel: PR_SET_PDEATHSIG; backend: sweep by RLINF_POD_UID | main at once, the rest by the sweep |

| waits for | unblocked by | deadline |
|---|---|---|
| poll on the socket, the log pipe, SIGCHLD | the backend, output, a death | none: it lives as long as its container |
| all descendants dead | their deaths | KILL_TIMEOUT_S, then the pids left are reported |

Messages are length-prefixed marshal: first the request (see processes.py), then commands {"op": "signal" | "kill" |
"exec" | "exec-kill"}; answers {"event": "started" | "failed" | "exec" | "exited"}.
"""

from __future__ import annotations

import ctypes
import errno
import marshal
import os
import select
import sys
import time

TYPE_CHECKING = False  # by hand, as importing typing takes 5 ms
if TYPE_CHECKING:
    import signal
    from typing import Any
else:
    import _signal as signal  # the same functions without the enums, which take 5 ms

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
KILL_TIMEOUT_S = 10.0
EXIT_NOT_EXECUTED = 126
TAIL_BYTES = 8192  # kept in memory for FallbackToLogsOnError, which takes 80 lines or 2 KiB of it
WHY_BYTES = 4096  # less than a pipe holds: written at once, also where nobody reads yet

_libc = ctypes.CDLL(None, use_errno=True)


def prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}): {os.strerror(code)}")


def read_message(fd: int) -> Any:
    """None at end of file."""
    head = _read_exactly(fd, 4)
    body = _read_exactly(fd, int.from_bytes(head, "big")) if head else b""
    return marshal.loads(body) if body else None


def write_message(fd: int, message: dict[str, Any]) -> bool:
    """False: nobody listens any more."""
    data = marshal.dumps(message)
    data = len(data).to_bytes(4, "big") + data
    try:
        while data:
            data = data[os.write(fd, data) :]
    except (BrokenPipeError, ConnectionResetError):
        return False
    return True


def _read_exactly(fd: int, count: int) -> bytes:
    data = b""
    while len(data) < count:
        try:
            part = os.read(fd, count - len(data))
        except ConnectionResetError:
            part = b""
        if not part:
            return b""
        data += part
    return data


def descendants(root: int) -> list[tuple[int, str]]:
    """(pid, start time) of every living or unreaped process below `root`, parents first."""
    children: dict[int, list[tuple[int, str]]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            fields = stat_fields(int(name))
            if fields:
                children.setdefault(int(fields[1]), []).append((int(name), fields[19]))
    found: list[tuple[int, str]] = []
    queue = [root]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += [pid for pid, _ in below]
    return found


def stat_fields(pid: int) -> list[str]:
    """/proc/PID/stat after the command name: [0] state, [1] parent, [19] start time. Empty: no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].decode().split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def kill_exactly(pid: int, start_time: str, number: int) -> None:
    """A signal to this process and to no later one of the same pid."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        fields = stat_fields(pid)
        if fields and fields[19] == start_time:
            signal.pidfd_send_signal(fd, number)
    except ProcessLookupError:
        pass  # died between the two calls
    finally:
        os.close(fd)


class Log:
    """Append-only file of at most two times half the limit: at half, it becomes `<file>.1` and starts anew."""

    def __init__(self, path: str, limit: int) -> None:
        self.path, self.limit, self.tail = path, limit, b""
        self.fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self.size = os.fstat(self.fd).st_size

    def write(self, data: bytes) -> None:
        self.tail = (self.tail + data)[-TAIL_BYTES:]
        while data:
            room = self.limit // 2 - self.size
            if room <= 0:
                self.rotate()
                continue
            try:
                self.size += os.write(self.fd, data[:room])
            except OSError as err:
                if err.errno != errno.ENOSPC:  # a full disk costs the log, never the container
                    raise
            data = data[room:]

    def rotate(self) -> None:
        os.close(self.fd)
        os.replace(self.path, self.path + ".1")
        self.fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self.size = 0


def spawn(argv: list[str], *, env: dict[str, str], cwd: str, output: int) -> tuple[int, str]:
    """(pid, ""), or (0, why) as a container runtime says it. The error travels through a pipe that exec closes."""
    status_r, status_w = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        stage = "prctl"
        try:
            os.setsid()
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(127)
            stage = f"workingDir {cwd!r}"
            os.chdir(cwd)
            stage = f"exec: {argv[0]!r}"
            devnull = os.open("/dev/null", os.O_RDONLY)
            for source, target in ((devnull, 0), (output, 1), (output, 2)):
                os.dup2(source, target)
            for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)  # ignored signals and Python's own survive an exec
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            os.execvpe(argv[0], argv, env)
        except OSError as err:
            not_found = err.errno == errno.ENOENT and "/" not in argv[0]
            say(status_w, f"{stage}: {'executable file not found in $PATH' if not_found else err.strerror}")
        except ValueError as err:  # a NUL, a letter that no file name has, a variable whose name has a `=`
            say(status_w, f"{stage}: {err}")
        os._exit(127)
    os.close(status_w)
    why = os.read(status_r, WHY_BYTES).decode(errors="replace")  # it may be cut within a letter
    os.close(status_r)
    if why:
        os.waitpid(pid, 0)
        return 0, why
    return pid, ""


def say(status_w: int, why: str) -> None:
    os.write(status_w, why.encode(errors="backslashreplace")[:WHY_BYTES])


def exit_code(status: int) -> int:
    """128 + n for a death by signal n, as container runtimes report it."""
    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


class Shim:
    def __init__(self, request: dict[str, Any], *, control: int) -> None:
        self.request, self.control = request, control
        self.log = Log(request["log"], request["log_limit"])
        self.pipe_r, self.pipe_w = os.pipe()
        os.set_blocking(self.pipe_r, False)
        self.main = 0
        self.status: int | None = None
        self.execs: dict[int, int] = {}  # pid -> the backend's number for it

    def run(self) -> None:
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        wake_r, wake_w = os.pipe()
        for fd in (wake_r, wake_w):
            os.set_blocking(fd, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
        self.main, why = spawn(
            self.request["argv"], env=self.request["env"], cwd=self.request["cwd"], output=self.pipe_w
        )
        if not self.main:
            write_message(self.control, {"event": "failed", "message": why})
            return
        write_message(self.control, {"event": "started", "pid": self.main})
        poll = select.poll()
        for fd in (self.control, self.pipe_r, wake_r):
            poll.register(fd, select.POLLIN)
        while self.status is None:
            for fd, _ in poll.poll():
                if fd == self.control:
                    self.obey(read_message(self.control))
                elif fd == self.pipe_r:
                    self.drain(1 << 16)
                else:
                    os.read(wake_r, 4096)
            self.reap()
        left = self.kill_all()
        self.drain(1 << 22)
        code = exit_code(self.status)
        if not write_message(self.control, {"event": "exited", "code": code, "tail": self.log.tail, "left": left}):
            self.clean_up()

    def obey(self, command: dict[str, Any] | None) -> None:
        if command is None:
            self.kill_all()
            self.clean_up()
            sys.exit(0)
        if command["op"] == "signal":
            os.kill(self.main, command["signal"])  # not reaped yet, so the pid is still its own
        elif command["op"] == "kill":
            os.kill(self.main, signal.SIGKILL)
        elif command["op"] == "exec":
            pid, _ = spawn(command["argv"], env=self.request["env"], cwd=self.request["cwd"], output=self.pipe_w)
            if pid:
                self.execs[pid] = command["id"]
            else:
                write_message(self.control, {"event": "exec", "id": command["id"], "code": EXIT_NOT_EXECUTED})
        elif command["op"] == "exec-kill":
            for pid, number in self.execs.items():
                if number == command["id"]:
                    os.killpg(pid, signal.SIGKILL)  # spawn made it its group's leader, and it is not reaped yet

    def reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.main:
                self.status = status
            elif pid in self.execs:
                write_message(self.control, {"event": "exec", "id": self.execs.pop(pid), "code": exit_code(status)})

    def drain(self, limit: int) -> None:
        while limit > 0:
            try:
                data = os.read(self.pipe_r, 1 << 16)
            except BlockingIOError:
                return
            self.log.write(data)
            limit -= len(data)

    def kill_all(self) -> list[int]:
        """Until nothing below is left: new children may appear between the listing and the kill."""
        deadline = time.monotonic() + KILL_TIMEOUT_S
        while below := descendants(os.getpid()):
            for pid, start_time in below:
                kill_exactly(pid, start_time, signal.SIGKILL)
            self.reap()
            if time.monotonic() > deadline:
                return [pid for pid, _ in below]
            time.sleep(0.002)
        return []

    def clean_up(self) -> None:
        import shutil  # 15 ms that only the death of the backend is worth

        for folder in self.request["folders"]:
            shutil.rmtree(folder, ignore_errors=True)
            try:
                os.rmdir(os.path.dirname(folder))
            except OSError:  # another pod's folder is still in it
                continue


if __name__ == "__main__":
    # Ctrl-C and a closed terminal are the backend's to answer; we end when it does.
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    socket_fd = int(sys.argv[1])
    os.set_inheritable(socket_fd, False)
    first = read_message(socket_fd)
    if first is not None:
        try:
            shim = Shim(first, control=socket_fd)
        except OSError as problem:  # the log cannot be opened: say it where a person looks, not on a stderr
            write_message(socket_fd, {"event": "failed", "message": f"log {first['log']}: {problem.strerror}"})
        else:
            shim.run()
