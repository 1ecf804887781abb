"""Defaults are pinned: each has its reason beside it in settings.py."""

from dataclasses import fields
from pathlib import Path

from rljob.local.settings import LocalSettings


def test_defaults(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    made = LocalSettings(work_dir=Path("w"))
    assert {field.name: getattr(made, field.name) for field in fields(made)} == {
        "work_dir": Path("w"),
        "working_dir": tmp_path,
        "node_name": "local",
        "log_limit_bytes": 67108864,
        "retry_s": 0.5,
        "env": {},
        "checkpoint_uri": "",
        "stop_timeout_s": 15.0,
    }
