"""torch's DCP over a job's checkpoints, in a bucket: two processes with half of the tensors each, and one with all.

What is in the processes: tests/fakes/shard_rank.py, which compares what it has read with what was written.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rlinf_api.errors import UserError
from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.checkpoints.store import Checkpoints
from rlinf_worker.roles.shards import Shards, copied
from tests.fakes import shard_rank
from tests.fakes.s3_server import S3Server

WHOLE_BYTES = shard_rank.TENSORS * shard_rank.ROWS * shard_rank.COLUMNS * 4


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[dict[str, Any]]]:
    """Of rank 0, of rank 1."""
    folder = tmp_path_factory.mktemp("shards")
    with S3Server() as s3:
        s3.make_bucket("ckpt")
        command = [sys.executable, "-W", "ignore", "-m", "tests.fakes.shard_rank", str(folder), "s3://ckpt/shards"]
        environment = {**shard_rank.inherited(), **s3.variables, "TMPDIR": str(folder)}
        ranks = [subprocess.Popen([*command, str(rank)], env=environment) for rank in (0, 1)]
        try:
            assert [rank.wait(shard_rank.WITHIN_S) for rank in ranks] == [0, 0]
        finally:
            for rank in ranks:
                rank.kill()
        yield [json.loads((folder / f"told-{rank}.json").read_text()) for rank in (0, 1)]


def test_each_rank_writes_its_half_and_no_rank_the_whole(told):
    for of_rank in told:
        assert 0.5 * WHOLE_BYTES <= of_rank["written 20"] <= 0.55 * WHOLE_BYTES


@pytest.mark.parametrize("way", ["read 20 by 1", "read 40 by 2", "read 20 by 2"])
def test_ranks_that_are_more_or_fewer_than_those_that_wrote_have_all_that_was_written(told, way):
    assert all(of_rank[way][1] for of_rank in told if way in of_rank)
    assert sum(way in of_rank for of_rank in told) == int(way[-1])


def test_each_rank_reads_its_half_of_what_as_many_wrote(told):
    for of_rank in told:
        assert of_rank["read 20 by 2"][0] <= 0.55 * WHOLE_BYTES


def test_what_one_rank_wrote_in_one_piece_is_held_a_tensor_at_a_time(told):
    for of_rank in told:
        assert of_rank["most at once"] <= 1.1 * WHOLE_BYTES / shard_rank.TENSORS


def test_a_copy_is_not_changed_by_the_next_step():
    tensor = torch.ones(3)
    state = copied({"model": {"w": tensor}, "step": 3})
    tensor.zero_()
    assert state["model"]["w"].tolist() == [1.0, 1.0, 1.0]
    assert state["step"] == 3


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_another_model_is_a_sentence_and_a_disk_that_fails_is_none_of_the_spec(tmp_path: Path, monkeypatch):
    store, shards = Checkpoints(str(tmp_path)), Shards(None)
    shards.write(store.begin(PolicyVersion(0, 20)), {"w": torch.ones(3)})
    store.finish(PolicyVersion(0, 20), "{}")
    saved = store.of("b0-20")
    for other in ({"v": torch.ones(3)}, {"w": torch.ones(4)}):
        with pytest.raises(
            UserError, match=r"b0-20/actor does not fit: got rank 0: .*; use another checkpoint uri, or"
        ):
            shards.read(saved, into=other)
    (tmp_path / "b0-20" / "actor" / "__0_0.distcp").unlink()
    with pytest.raises(OSError, match="rank 0: FileNotFoundError"):
        shards.read(saved, into={"w": torch.ones(3)})
