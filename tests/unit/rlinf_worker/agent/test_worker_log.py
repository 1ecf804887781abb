"""A worker's output: bounded, rotated once, prefixed, and its end kept for the last words."""

import errno
import itertools
import json
import logging
import os
import time
from pathlib import Path

from rlinf_worker.agent import worker_log
from rlinf_worker.agent.worker_log import Prefixed, SpanStore, WorkerLog
from rlinf_worker.bounded_file import BoundedFile


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


def test_a_file_whose_size_could_not_be_asked_for_loses_a_line_and_goes_on(tmp_path, monkeypatch):
    """As on a network's volume that was away."""
    file = BoundedFile(tmp_path / "x", limit=6)

    def away(fd):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with monkeypatch.context() as network:
        network.setattr(os, "fstat", away)
        file.write(b"lost\n")
    file.write(b"after\n")
    file.close()
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("x", b"after\n")]
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


def test_a_line_without_end_is_passed_on_in_pieces():
    lines: list[bytes] = []
    log = Prefixed("env/0", write=lines.append)
    log.write(b"x" * (16 << 10))
    assert lines == [], "it may still end"
    log.write(b"x")
    assert lines == [b"[env/0] " + b"x" * ((16 << 10) + 1) + b"\n"]
    log.write(b"next\n")
    log.close()
    assert lines[1:] == [b"[env/0] next\n"]


def test_lines_of_the_pods_log_go_to_its_stderr(capfd):
    log = Prefixed("env/0")
    log.write(b"hello\n")
    log.close()
    assert capfd.readouterr().err == "[env/0] hello\n"


def test_the_file_is_for_all_to_read_and_what_fills_it_to_the_byte_stays(tmp_path):
    file = BoundedFile(tmp_path / "x", limit=4)
    file.write(b"ab")
    file.write(b"cd")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    file.write(b"e")
    file.close()
    assert sorted((path.name, path.read_bytes()) for path in tmp_path.iterdir()) == [("x", b"e"), ("x.1", b"abcd")]
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o644 & ~os.umask(os.umask(0o022))


def test_a_line_that_is_larger_than_the_file_may_be_is_written_all_the_same(tmp_path):
    file = BoundedFile(tmp_path / "x", limit=2)
    file.write(b"abc")
    file.close()
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("x", b"abc")]


def test_what_fits_into_the_tail_loses_no_line(tmp_path):
    log = WorkerLog(BoundedFile(tmp_path / "x", limit=100), keep=8)
    log.err(b"one\ntwo\n")
    assert log.tail() == "one\ntwo"
    log.err(b"x")
    log.close()
    assert log.tail() == "two\nx", "a half line is none"


def test_of_one_endless_line_the_end_is_kept(tmp_path):
    log = WorkerLog(BoundedFile(tmp_path / "x", limit=100), keep=4)
    log.err(b"0123456789\n")
    assert log.tail() == "789"


# --- spans ------------------------------------------------------------------------------------------------------------
SPAN = {"slot": "sim/0/0", "kind": "compute", "t0": 1.0, "t1": 2.0}


def lines_of(folder):
    return [json.loads(line) for line in (folder / "spans" / "p-0.jsonl").read_text().splitlines()]


def test_spans_of_a_pod_are_lines_and_its_last_line_is_what_they_cost_and_what_is_missing(tmp_path):
    store = SpanStore(output_dir=str(tmp_path), pod="p-0", file_bytes=10_000)
    store.add([SPAN, SPAN], dropped=2)
    store.add([], dropped=3)
    store.close()
    *spans, account = lines_of(tmp_path)
    assert (spans, store.dropped) == ([SPAN, SPAN], 5)
    assert account.pop("agent_instrument_s") >= 0.0
    assert account == {"dropped": 5}


def test_now_and_then_a_line_says_what_is_missing_since_the_last_one(tmp_path, monkeypatch):
    monkeypatch.setattr(worker_log, "ACCOUNT_EVERY", 2)
    cpu = itertools.count(0.0, 0.25)
    monkeypatch.setattr(time, "thread_time", lambda: next(cpu))
    store = SpanStore(output_dir=str(tmp_path), pod="p-0", file_bytes=10_000)
    for _ in range(4):
        store.add([SPAN], dropped=1)
    store.close()
    accounts = [line for line in lines_of(tmp_path) if "kind" not in line]
    assert accounts == [
        {"agent_instrument_s": 0.25, "dropped": 2},
        {"agent_instrument_s": 0.75, "dropped": 2},
        {"agent_instrument_s": 1.0, "dropped": 0},
    ]


def test_spans_that_the_disk_did_not_take_are_named_in_bytes(tmp_path, monkeypatch):
    store = SpanStore(output_dir=str(tmp_path), pod="p-0", file_bytes=10_000)
    store.add([SPAN], dropped=0)
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda fd, data: 0)
        store.add([SPAN], dropped=0)
    store.close()
    assert lines_of(tmp_path)[-1]["lost_bytes"] == len(json.dumps(SPAN, separators=(",", ":"))) + 1


def test_a_pod_without_a_place_for_them_or_without_spans_makes_no_file(tmp_path):
    nowhere = SpanStore(output_dir="", pod="p-0", file_bytes=10)
    nowhere.add([SPAN], dropped=4)
    nowhere.close()
    SpanStore(output_dir=str(tmp_path), pod="p-0", file_bytes=10).close()
    assert (nowhere.dropped, list(tmp_path.iterdir())) == (4, [])
