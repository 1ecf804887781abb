"""What rows of `make bench-reasoning` make of a job's metrics, spans and memory, and that their jobs are jobs."""

import pytest
import yaml

from rljob.manifest import check, read
from tools.bench import reasoning
from tools.bench.harness import BenchError
from tools.bench.reasoning_parts import jobs
from tools.learn_reasoning.rows import manifest


def lines(*steps, account=None, **fields):
    """Metrics of steps; a step's account stands in the line behind it."""
    told = {"previous": {"account": account}} if account else {}
    return [{"step": n, "time": 10.0 * n, "step_s": s, "tokens_count": 160.0, **told, **fields} for n, s in steps]


def test_a_step_is_the_median_behind_the_first_two():
    assert jobs.step_s(lines((1, 50.0), (2, 9.0), (3, 1.0), (4, 3.0), (5, 2.0))) == 2.0


def test_tokens_are_over_what_the_rollout_did_and_not_over_its_waits_and_weights():
    account = {"rollout/0": {"compute": 3.0, "other": 1.0, "wait_data": 90.0, "weights": 50.0, "comm": 5.0}}
    told = lines((1, 1.0), (2, 1.0), (3, 1.0), (4, 1.0), account=account)
    told[1]["tokens_count"] = told[3]["tokens_count"] = 1.0  # warms up; and nobody has its account yet
    assert jobs.tokens_per_busy_s(told) == 40.0


def test_what_no_role_computes_of_a_step_in_turns_is_its_price():
    account = {"rollout/0": {"compute": 1.0, "load": 0.2}, "reward/0": {"compute": 0.5}, "actor/0": {"compute": 1.5}}
    assert jobs.not_computing(lines((1, 4.0), (2, 4.0), (3, 4.0), (4, 9.0), account=account)) == 0.25


def span(kind, step, begin, end, role="rollout"):
    return {"role": role, "kind": kind, "step": step, "t0": begin, "t1": end}


def test_the_first_new_token_is_of_the_engines_next_step_behind_the_weights():
    told = lines(*((n, 1.0) for n in range(1, 5)))
    made = [
        span("weights", 3, 30.25, 30.5), span("compute", 4, 29.9, 30.25), span("compute", 4, 30.5, 30.75),
        span("compute", 4, 30.75, 31.0), span("compute", 9, 30.5, 30.6, role="actor"),
    ]  # fmt: skip
    assert jobs.commit_to_token_s(told, made) == 0.75
    assert jobs.commit_to_loaded_s(told, made) == 0.5
    with pytest.raises(BenchError, match="no step of 4 has weights behind its commit"):
        jobs.commit_to_loaded_s(told, made[1:])
    with pytest.raises(BenchError, match="no step of 4 has weights and tokens behind its commit"):
        jobs.commit_to_token_s(told, made[1:])


def test_memory_that_grows_is_told_in_per_cent_of_the_early_steps():
    told = lines(*((n, 1.0) for n in range(1, 101)))
    flat = [(float(at), 2000) for at in range(1000)]
    assert jobs.growth(flat, told, first=10, last=100, around=10) == 0.0
    grown = [(at, rss + (200 if at > 500 else 0)) for at, rss in flat]
    assert jobs.growth(grown, told, first=10, last=100, around=10) == 10.0
    with pytest.raises(BenchError, match="nothing was seen of memory between steps 90 and 100"):
        jobs.growth(flat[:500], told, first=10, last=100, around=10)


def test_what_is_below_a_process_is_seen():
    with jobs.Memory() as seen:
        pass
    assert seen.samples == [], "nothing was there for half a second"


@pytest.mark.parametrize("change", [{}, reasoning.FEW, reasoning.TINY, reasoning.TURNS, reasoning.BOTH_CORES])
def test_each_row_measures_a_job_that_can_be(tmp_path, change):
    job = manifest(jobs.row_of("sevens-vllm", steps=5), tmp_path)
    jobs.changed(job, change)
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(job))
    spec = check(read(file)).spec
    assert spec is not None
    assert spec.flow.steps == 5


def test_both_engines_have_the_same_rows_and_bars_of_the_issue():
    named = {row.name: row for row in reasoning.rows()}
    assert {name: (named[name].bar, named[name].bar_ratio) for name in named} == {
        "step_transformers": (None, 0.9), "step_vllm": (None, 1.25),
        "tokens_in_job_transformers": (None, 0.85), "tokens_in_job_vllm": (None, 0.85),
        "commit_to_token_transformers": (80.0, None), "commit_to_token_vllm": (80.0, None),
        "commit_to_loaded_92m": (500.0, None), "turns_transformers": (15.0, None), "turns_vllm": (15.0, None),
        "memory_growth": (2.0, None),
    }  # fmt: skip
    assert {row.name for row in reasoning.small_rows()} < set(named)
