"""The shim's own parts: its log, its answers, its start."""

import os
import subprocess
import sys

from rljob.local import shim


def test_a_full_disk_costs_the_log_and_not_the_container():
    log = shim.Log("/dev/full", 1000)
    log.write(b"x" * 5000)
    os.close(log.fd)
    assert log.tail == b"x" * 5000


def test_it_imports_nothing_that_takes_long():
    code = "import sys; "
    code += (
        f"exec(compile(open({shim.__file__!r}).read(), 'shim', 'exec'), {{'__name__': 'shim'}}); print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True)
    assert not {"json", "typing", "signal", "asyncio", "socket", "re", "site"} & set(done.stdout.split())


def test_processes_below_are_found_with_their_start_times():
    with subprocess.Popen(["sleep", "60"]) as child:
        assert (child.pid, shim.stat_fields(child.pid)[19]) in shim.descendants(os.getpid())
        shim.kill_exactly(child.pid, "0", 9)
        assert child.poll() is None, "another process of the same pid must not be hit"
        shim.kill_exactly(child.pid, shim.stat_fields(child.pid)[19], 9)
        assert child.wait(5) == -9
    shim.kill_exactly(child.pid, "0", 9)
