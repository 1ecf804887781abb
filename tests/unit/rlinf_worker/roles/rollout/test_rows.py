"""Rows of data files: which there are, what each is, and a sentence for each way to be none."""

import datetime
import json

import pyarrow as pa
import pytest
from pyarrow import parquet

from rlinf_api.errors import UserError
from rlinf_worker.roles.rollout.rows import open_rows

ROWS = [{"prompt": f"{n}+1=", "answer": n + 1, "of": ["a", "b"]} for n in range(10)]


def written(path, text):
    path.write_text(text, encoding="utf-8")
    return open_rows(str(path), field="spec.data.train")


@pytest.mark.parametrize("end", ["\n", ""])
def test_lines_of_json(tmp_path, end):
    rows = written(tmp_path / "t.jsonl", "\n".join(json.dumps(row) for row in ROWS) + end)
    assert [rows.row(n) for n in (9, 0, 3)] == [ROWS[9], ROWS[0], ROWS[3]]
    assert len(rows) == 10


def test_blank_lines_are_no_rows(tmp_path):
    rows = written(tmp_path / "t.jsonl", '\n{"a": 1}\n\n  \n{"a": "ü"}\n')
    assert [rows.row(n) for n in range(len(rows))] == [{"a": 1}, {"a": "ü"}]


def test_parquet_over_several_row_groups(tmp_path):
    parquet.write_table(pa.Table.from_pylist(ROWS), tmp_path / "t.parquet", row_group_size=3)
    rows = open_rows(str(tmp_path / "t.parquet"), field="spec.data.train")
    assert len(rows) == 10
    assert [rows.row(n) for n in range(10)] == ROWS
    assert rows.row(2) == ROWS[2], "one that was read before"


def test_what_no_message_can_have_is_text(tmp_path):
    day = datetime.date(2026, 1, 2)
    parquet.write_table(pa.Table.from_pylist([{"day": day}]), tmp_path / "t.parquet")
    assert open_rows(str(tmp_path / "t.parquet"), field="spec.data.train").row(0) == {"day": "2026-01-02"}


def test_the_digest_is_of_the_bytes(tmp_path):
    one, same = written(tmp_path / "a.jsonl", '{"a": 1}\n'), written(tmp_path / "b.jsonl", '{"a": 1}\n')
    assert one.digest == same.digest != written(tmp_path / "c.jsonl", '{"a": 2}\n').digest
    for name, column in (("a", "x"), ("b", "x"), ("c", "y")):
        parquet.write_table(pa.table({column: [1]}), tmp_path / f"{name}.parquet")
    found = [open_rows(str(tmp_path / f"{name}.parquet"), field="spec.data.train").digest for name in "abc"]
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("t.jsonl", b"", "is empty: got 0 rows, wanted a row per prompt"),
        ("t.jsonl", b"\n\n", "is empty"),
        ("t.parquet", b"PAR1 and no more", "is no Parquet file: got Parquet"),
        ("missing", None, "is not there"),
        ("folder", "folder", "is a folder: .*to_json or to_parquet"),
    ],
)
def test_what_is_no_file_of_rows_is_said(tmp_path, name, content, says):
    path = tmp_path / name
    if content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=says):
        open_rows(str(path), field="spec.data.train")


@pytest.mark.parametrize(
    ("line", "got"), [('{"prompt": ', "Expecting value"), ("[1]", "got a list"), ("\x00", "Expecting value")]
)
def test_a_line_that_is_no_row_is_named(tmp_path, line, got):
    rows = written(tmp_path / "t.jsonl", f'{{"a": 1}}\n\n{line}\n')
    assert rows.row(0) == {"a": 1}
    with pytest.raises(UserError, match=f"line 3 is no row: .*{got}.*correct the line"):
        rows.row(1)


def test_a_line_that_no_message_should_be_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("rlinf_worker.roles.rollout.rows.MOST_PER_ROW", 20)
    rows = written(tmp_path / "t.jsonl", '{"prompt": "12345"}\n{"prompt": "123456789"}\n')
    assert rows.row(0) == {"prompt": "12345"}
    with pytest.raises(UserError, match="line 2 is no row: got 23 bytes, of at most 20"):
        rows.row(1)
