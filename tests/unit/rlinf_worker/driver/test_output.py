"""What the driver leaves for people: whole lines, each once, and after a full disk how many are missing."""

import errno
import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.driver.metrics import DriverMetrics
from rlinf_worker.driver.output import JsonLines, Output
from rlinf_worker.driver.steps import Committed
from tests.builders_driver import Clock, make_job


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def committed(step: int, *, branch: int = 0) -> Committed:
    version = PolicyVersion(branch, step)
    return Committed(
        step=step,
        version=version,
        keys={"actor": (f"k{step}",)},
        metrics={"loss": 0.5},
        seconds=1.0,
        rare=False,
        checkpoint=False,
        last=False,
    )


class Disk:
    """In the place of os.write: takes `room` bytes of each call, all of them where it is None."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room: int | None = None
        self._write = os.write
        monkeypatch.setattr(os, "write", self.write)

    def write(self, fd: int, data: bytes) -> int:
        if self.room == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._write(fd, data if self.room is None else data[: self.room])


@pytest.mark.parametrize("room", [0, 7])
def test_lines_go_on_when_there_is_room_again_and_the_first_one_counts_what_is_missing(
    tmp_path, monkeypatch, caplog, room
):
    disk, file = Disk(monkeypatch), JsonLines(tmp_path / "x.jsonl")
    with caplog.at_level(logging.INFO):
        file.write({"n": 1})
        disk.room = room
        for n in (2, 3, 4):
            file.write({"n": n})
        disk.room = None
        for n in (5, 6):
            file.write({"n": n})
    first, second, third = lines(tmp_path / "x.jsonl")
    assert (first, third) == ({"n": 1}, {"n": 6})
    gap = second.pop("gap")
    assert second == {"n": 5}
    assert (gap["lines"], "No space left on device" in gap["error"]) == (3, True)
    assert file.lost == 3
    said = [record.message for record in caplog.records]
    assert said == ["cannot write, lines are lost until it can be written again", "lines are written again"]


def test_a_second_gap_is_counted_by_itself_and_one_at_the_end_is_said(tmp_path, monkeypatch, caplog):
    disk, file = Disk(monkeypatch), JsonLines(tmp_path / "x.jsonl")
    for n, room in enumerate((None, 0, None, 0, 0, None, 0)):
        disk.room = room
        file.write({"n": n})
    assert [(line["n"], line.get("gap", {}).get("lines")) for line in lines(tmp_path / "x.jsonl")] == [
        (0, None), (2, 1), (5, 2),
    ]  # fmt: skip
    assert file.lost == 4
    file.flush()
    assert caplog.records[-1].message == "the last lines are missing"


def test_a_folder_without_room_for_a_file_costs_lines_and_not_the_driver(tmp_path, monkeypatch):
    real = os.open

    def full(path: Any, *args: Any) -> int:
        if str(path).endswith("x.jsonl") and not allowed:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(path, *args)

    allowed: list[bool] = []
    monkeypatch.setattr(os, "open", full)
    file = JsonLines(tmp_path / "x.jsonl")
    assert file.last() == {}
    file.write({"n": 1})
    allowed.append(True)
    file.write({"n": 2})
    (line,) = lines(tmp_path / "x.jsonl")
    assert (line["n"], line["gap"]["lines"]) == (2, 1)


def test_a_folder_that_may_not_be_written_is_said_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        JsonLines(tmp_path / "file" / "x.jsonl")


LINE = len('{"n": 0}\n')


def test_a_file_at_its_bound_goes_on_in_a_new_one_and_what_no_file_holds_any_more_is_counted(tmp_path, caplog):
    file = JsonLines(tmp_path / "x.jsonl", max_bytes=2 * LINE)
    for n in range(4):
        file.write({"n": n})
    assert (lines(tmp_path / "x.jsonl.1"), lines(tmp_path / "x.jsonl")) == ([{"n": 0}, {"n": 1}], [{"n": 2}, {"n": 3}])
    assert (file.lost, caplog.records) == (0, [])
    for n in range(4, 7):
        file.write({"n": n})
    assert (lines(tmp_path / "x.jsonl.1"), lines(tmp_path / "x.jsonl")) == ([{"n": 4}, {"n": 5}], [{"n": 6}])
    assert file.lost == 4
    assert [(r.message, r.__dict__["lines"]) for r in caplog.records] == [("the oldest lines made room", 2)] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.jsonl", "x.jsonl.1"]


def test_the_bound_counts_what_earlier_drivers_wrote(tmp_path):
    for n in range(7):  # a driver each
        file = JsonLines(tmp_path / "x.jsonl", max_bytes=2 * LINE)
        file.write({"n": n})
        file.close()
    assert (lines(tmp_path / "x.jsonl.1"), lines(tmp_path / "x.jsonl")) == ([{"n": 4}, {"n": 5}], [{"n": 6}])
    assert file.lost == 2  # of the driver that let them go; the metric is each driver's own


def test_a_file_that_was_longer_than_the_bound_makes_room_at_once(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"n": 0}\n' * 9)
    JsonLines(tmp_path / "x.jsonl", max_bytes=2 * LINE).write({"n": 9})
    assert lines(tmp_path / "x.jsonl") == [{"n": 9}]


def test_a_driver_that_dies_as_a_file_makes_room_leaves_its_successor_the_last_step(tmp_path):
    first = Output(str(tmp_path))
    first.step(committed(1), parts={}, accounts={}, idle={})
    (tmp_path / "lineage.jsonl").replace(tmp_path / "lineage.jsonl.1")
    again = Output(str(tmp_path))
    again.step(committed(1), parts={}, accounts={}, idle={})
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [1]


def test_a_file_that_somebody_took_away_costs_the_line_that_found_it_gone(tmp_path):
    file = JsonLines(tmp_path / "x.jsonl", max_bytes=2 * LINE)
    file.write({"n": 0})
    file.write({"n": 1})
    (tmp_path / "x.jsonl").unlink()
    file.write({"n": 2})
    file.write({"n": 3})
    assert [(line["n"], line.get("gap", {}).get("lines")) for line in lines(tmp_path / "x.jsonl")] == [(3, 1)]


def test_a_disk_that_is_full_as_a_file_makes_room_costs_lines_and_not_the_driver(tmp_path, monkeypatch):
    disk, file = Disk(monkeypatch), JsonLines(tmp_path / "x.jsonl", max_bytes=2 * LINE)
    file.write({"n": 0})
    file.write({"n": 1})
    disk.room = 0
    file.write({"n": 2})
    disk.room = None
    file.write({"n": 3})
    assert [(line["n"], line.get("gap", {}).get("lines")) for line in lines(tmp_path / "x.jsonl")] == [(3, 1)]
    assert lines(tmp_path / "x.jsonl.1") == [{"n": 0}, {"n": 1}]
    assert file.lost == 1


def test_a_step_that_an_earlier_driver_wrote_is_not_written_twice(tmp_path):
    for steps in ((1, 2), (2, 3)):
        made = Output(str(tmp_path))
        for step in steps:
            made.step(committed(step), parts={"collect_s": 0.5}, accounts={}, idle={})
        made.flush()
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    assert [line["step"] for line in lines(tmp_path / "lineage.jsonl")] == [1, 2, 3]


@pytest.mark.parametrize("workers", [64, 65])
def test_a_line_names_sixty_four_workers_one_by_one_and_of_more_the_sums_of_their_roles(tmp_path, workers):
    accounts = {f"env/{n}": {"compute": 0.25, "window_s": 1.0} for n in range(workers)}
    Output(str(tmp_path)).step(committed(2), parts={}, accounts=accounts, idle={})
    (line,) = lines(tmp_path / "metrics.jsonl")
    of_role = {"env": {"compute": 0.25 * workers, "window_s": 1.0 * workers}}
    assert line["previous"]["account"] == (accounts if workers == 64 else of_role)


def test_what_is_missing_is_a_metric(tmp_path, monkeypatch):
    disk, driver = Disk(monkeypatch), make_job().driver(Clock(), output=str(tmp_path))
    disk.room = 0
    driver.job.output.step(committed(1), parts={}, accounts={}, idle={})
    disk.room = None
    driver.job.output.step(committed(2), parts={}, accounts={}, idle={})
    samples = [sample for family in DriverMetrics(driver).collect() for sample in family.samples]
    lost = {s.labels["file"]: s.value for s in samples if s.name == "rlinf_output_lost_lines_total"}
    assert lost == {"metrics": 1.0, "lineage": 1.0}
    assert [line["gap"]["lines"] for line in lines(tmp_path / "metrics.jsonl")] == [1]
