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


def saved(folder, *shards, **state):
    """As Dataset.save_to_disk of datasets 5.0 lays it down."""
    folder.mkdir(parents=True)
    names = []
    for number, rows in enumerate(shards):
        names.append(f"data-{number:05}-of-{len(shards):05}.arrow")
        table = pa.Table.from_pylist(rows)
        with pa.ipc.new_stream(str(folder / names[-1]), table.schema) as stream:
            stream.write_table(table, max_chunksize=2)
    found = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "5", "_split": None, **state}
    (folder / "state.json").write_text(json.dumps(found))
    return folder


def test_a_saved_datasets_shards_one_after_the_other(tmp_path):
    folder = saved(tmp_path / "rows", ROWS[:4], ROWS[4:7], ROWS[7:])
    rows = open_rows(str(folder), field="spec.data.train")
    assert len(rows) == 10
    assert [rows.row(n) for n in range(10)] == ROWS
    assert [rows.row(n) for n in (7, 3, 4)] == [ROWS[7], ROWS[3], ROWS[4]]
    other = open_rows(str(saved(tmp_path / "other", ROWS[:4], ROWS[7:], ROWS[4:7])), field="spec.data.train")
    assert other.digest != rows.digest
    again = saved(tmp_path / "again", ROWS[:4], ROWS[4:7], ROWS[7:])
    assert open_rows(str(again), field="spec.data.train").digest == rows.digest


def test_a_folder_of_several_splits_names_them(tmp_path):
    saved(tmp_path / "rows" / "train", ROWS)
    (tmp_path / "rows" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(
        UserError, match=r"has several splits: got train, test, wanted one of them; write .*/rows/train"
    ):
        open_rows(str(tmp_path / "rows"), field="spec.data.train")


@pytest.mark.parametrize("broken", ["a shard is gone", "a shard is cut", "no list", "no JSON", "no rows"])
def test_a_saved_dataset_that_is_not_whole_is_said(tmp_path, broken):
    folder = saved(tmp_path / "rows", *([] if broken == "no rows" else [ROWS, ROWS]))
    last = folder / "data-00001-of-00002.arrow"
    says = "has a shard that cannot be read: got .*, wanted the files that state.json names, whole; save it again"
    match broken:
        case "a shard is gone":
            last.unlink()
        case "a shard is cut":
            last.write_bytes(last.read_bytes()[:-300])
        case "no list":
            (folder / "state.json").write_text("{}")
            says = r"has no list of its files: got state.json without _data_files \(KeyError\('_data_files'\)\)"
        case "no JSON":
            (folder / "state.json").write_text("{")
            says = "has no list of its files"
        case _:
            says = "is empty: got 0 rows"
    with pytest.raises(UserError, match=says):
        open_rows(str(folder), field="spec.data.train")


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
        ("folder", "folder", "is a folder: got no state.json in it, wanted a .jsonl or .parquet file, or a folder"),
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
