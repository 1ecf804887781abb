"""What every test runs under: a clean environment, no network but loopback, nothing left running.

Builders and fakes live in files of their own; nothing here is about one part.

`--slow`, `--long` and `--cluster` add the tests of that marker (`make test-slow`, `make test-long` and `make
test-cluster` give them); a bare `pytest` has none of them, which are the tests of `make test`. A mark slow or long says
why: `@pytest.mark.slow("waits for ...")`.
A test marked gpu is skipped where there is no NVIDIA device.

What a test starts must be gone when it ends. On Linux pytest becomes the reaper of its orphans
(PR_SET_CHILD_SUBREAPER), so that a worker whose parent was killed is seen, reported and killed too, and not left to
eat the machine. An orphan that has died is a zombie until its test ends, though, where init would have reaped it at
once: a test that asks whether a process is gone counts a zombie as gone.
"""

import ctypes
import ipaddress
import os
import socket
import sys
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

EXIT_GRACE_S = 10.0
"""How long a process may still be exiting when its test is over, on a busy machine too."""

_PR_SET_CHILD_SUBREAPER = 36
_HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
"""Processes that Python keeps for the whole session, on purpose."""


def _clean_environment() -> None:
    """Before any test module is imported, as libraries read some of these when they are imported."""
    for name in list(os.environ):
        if name.startswith("RLINF_TESTCLUSTER_"):
            continue  # where the test cluster's files lie on this machine: its errors say to set it
        if name.lower().endswith("_proxy") or name.startswith(("RLINF_", "KUBERNETES_")):
            del os.environ[name]
    # Not only unset: clients would take the person's own ~/.kube/config then.
    os.environ["KUBECONFIG"] = os.devnull
    os.environ["RES_OPTIONS"] = "timeout:1 attempts:3"  # as workers have it: torch's stores ask the DNS for names


_clean_environment()
if sys.platform == "linux":
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run tests marked slow")
    parser.addoption("--long", action="store_true", help="also run tests marked long")
    parser.addoption("--cluster", action="store_true", help="also run tests marked cluster")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _says_why(items)
    left_out = [
        item
        for item in items
        if any(
            item.get_closest_marker(name) and not config.getoption(f"--{name}") for name in ("slow", "long", "cluster")
        )
    ]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]
    if not Path("/dev/nvidia0").exists():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no NVIDIA device (/dev/nvidia0) on this machine"))


def _says_why(items: list[pytest.Item]) -> None:
    """What takes time has to be worth it, and who waits for it, or does not, may ask what for."""
    for name in ("slow", "long"):
        silent = [item.nodeid for item in items for mark in item.iter_markers(name) if not _is_sentence(mark.args)]
        if silent:
            raise pytest.UsageError(
                f"{len(silent)} test(s) are marked {name} without the reason, {silent[0]} the first; "
                f'say in a few words what takes so long: @pytest.mark.{name}("trains for 60 steps")'
            )


def _is_sentence(told: tuple[object, ...]) -> bool:
    return len(told) == 1 and isinstance(told[0], str) and len(told[0].split()) >= 3


@pytest.fixture(autouse=True)
def only_loopback(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that would reach the network fails here with the address, on a machine with a network too."""
    if request.node.get_closest_marker("cluster"):
        return
    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, _checked(getattr(socket.socket, name)))


def _checked(connect: Any) -> Any:
    def checked(self: socket.socket, address: Any) -> Any:
        if self.family in (socket.AF_INET, socket.AF_INET6) and not _is_loopback(str(address[0])):
            raise AssertionError(
                f"a test may connect to loopback addresses only, but this one went for {address[0]}:{address[1]}; "
                "use a fake, or mark the test cluster"
            )
        return connect(self, address)

    return checked


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host in ("localhost", "")


@pytest.fixture(autouse=True)
def nothing_left_running() -> Iterator[None]:
    """Runs before a test's own fixtures and ends after them; those of a module or session started earlier."""
    before = set(_children())
    yield
    deadline = time.monotonic() + EXIT_GRACE_S
    while (left := _alive(set(_children()) - before)) and time.monotonic() < deadline:
        time.sleep(0.02)
    if left:
        told = [f"  {child.pid}: {' '.join(_command(child))[:200]}" for child in left]
        _kill(left)
        pytest.fail(
            "\n".join([f"the test left {len(left)} process(es) running (killed now); stop and await them:", *told]),
            pytrace=False,
        )


def _children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def _alive(children: set[psutil.Process]) -> list[psutil.Process]:
    """Those still running; a zombie is reaped here, as it may be an orphan that nobody else waits for."""
    running = []
    for child in children:
        try:
            if child.status() != psutil.STATUS_ZOMBIE:
                running.append(child)
            elif child.ppid() == os.getpid():
                os.waitpid(child.pid, os.WNOHANG)
        except (psutil.NoSuchProcess, ChildProcessError):
            continue
    return [child for child in running if not any(helper in " ".join(_command(child)) for helper in _HELPERS)]


def _command(child: psutil.Process) -> list[str]:
    try:
        return child.cmdline()
    except psutil.Error:
        return ["?"]


def _kill(children: list[psutil.Process]) -> None:
    for child in children:
        try:
            child.kill()
        except psutil.NoSuchProcess:
            continue
    _, stubborn = psutil.wait_procs(children, timeout=EXIT_GRACE_S)
    assert not stubborn, f"not killed within {EXIT_GRACE_S} s: {stubborn}"


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish() -> Generator[None, object, object]:
    """Session fixtures have ended; what they left running is killed, so that no run leaves a process behind."""
    result = yield
    _kill(_alive(set(_children())))
    return result
