"""A worker's output: bounded, rotated once, prefixed, and its end kept for the last words."""

import logging
import os
from pathlib import Path

from rlinf_worker.agent.worker_log import BoundedFile, Prefixed, WorkerLog


def test_a_file_is_rotated_once_and_then_over_itself(tmp_path):
    file = BoundedFile(tmp_path / "a" / "env-0.log", limit=10)
    for line in (b"one\n", b"two\n", b"three\n", b"four\n", b"five\n"):
        file.write(line)
    file.close()
    assert (tmp_path / "a" / "env-0.log").read_bytes() == b"four\nfive\n"
    assert (tmp_path / "a" / "env-0.log.1").read_bytes() == b"three\n"


def test_a_file_that_is_there_goes_on(tmp_path):
    (tmp_path / "x").write_bytes(b"before\n")
    file = BoundedFile(tmp_path / "x", limit=100)
    file.write(b"after\n")
    file.close()
    assert (tmp_path / "x").read_bytes() == b"before\nafter\n"


def test_a_disk_that_takes_nothing_costs_lines_and_one_warning_a_minute(caplog):
    now = [0.0]
    file = BoundedFile(Path("/dev/full"), limit=10_000, clock=lambda: now[0])
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            file.write(b"12345")
        now[0] = 61.0
        file.write(b"12345")
    file.close()
    assert file.dropped_bytes == 20
    assert [r.message for r in caplog.records] == ["cannot write, lines are dropped"] * 2


def test_a_disk_with_room_for_half_a_line_gets_none_of_it_and_the_next_one_whole(tmp_path, monkeypatch):
    file = BoundedFile(tmp_path / "x", limit=10_000)
    file.write(b"before\n")
    with monkeypatch.context() as full:
        real = os.write
        full.setattr(os, "write", lambda fd, data: real(fd, data[:3]))
        file.write(b"lost\n")
    file.write(b"after\n")
    file.close()
    assert (tmp_path / "x").read_bytes() == b"before\nafter\n"
    assert file.dropped_bytes == 5


def test_lines_of_the_pods_log_carry_their_worker():
    lines: list[bytes] = []
    log = Prefixed("env/0", write=lines.append)
    log.write(b"half")
    log.write(b" a line\nnext")
    log.close()
    assert lines == [b"[env/0] half a line\n", b"[env/0] next\n"]


def test_the_tail_is_whole_lines_of_stderr_only(tmp_path):
    log = WorkerLog(BoundedFile(tmp_path / "x", limit=10_000), keep=20)
    log.out(b"not this\n")
    log.err(b"0123456789\n")
    log.err(b"line two\nline three\n")
    log.close()
    assert log.tail() == "line three"


def test_a_tap_gathers_what_comes_after_it(tmp_path):
    log = WorkerLog(BoundedFile(tmp_path / "x", limit=10_000), keep=20)
    log.err(b"before")
    tap = log.tap()
    log.err(b"stacks")
    log.untap()
    log.err(b"after")
    log.close()
    assert bytes(tap) == b"stacks"


def test_the_end_for_people_leaves_out_what_is_no_warning(tmp_path):
    log = WorkerLog(BoundedFile(tmp_path / "x", limit=10_000), keep=2048)
    log.err(b'{"time": "t", "level": "INFO", "logger": "a", "message": "connected", "pod": "p"}\n')
    assert log.tail() == ""
    log.err(b'{"time": "t", "level": "WARNING", "logger": "a", "message": "slow", "error": "why"}\n')
    log.err(b"Segmentation fault\n")
    assert log.tail() == "warning: slow: why\nSegmentation fault"
    log.err(b'{"a": 1}\n{"broken')
    assert log.tail().endswith('Segmentation fault\n{"a": 1}\n{"broken'), "what a program printed is kept as it is"
