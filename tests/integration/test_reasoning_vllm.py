"""vLLM in jobs of flow grpo: in turns on one slot, hanging, and reading the folder that comes out."""

import json

import pytest
import torch
import yaml

from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.roles import models
from rlinf_worker.roles.rollout.engine import Sampling
from tests.fakes import reasoning
from tests.fakes.vllm_process import VllmProcess
from tests.rljob_runs import Run

STEPS = 4
STARTS_S = 600.0
"""A run in which vLLM is imported and started: 14 s on an idle machine, seen 220 s at a load of 27 on 2 cores."""
LEARNT = ("reward_mean", "policy_loss", "grad_norm", "entropy", "tokens_count")
ENDED = {"step_deadline_min_s": 8, "first_step_deadline_s": 60}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return reasoning.make_folder(tmp_path_factory.mktemp("vllm"), hidden=128)  # vLLM has no heads of 8 numbers


@pytest.fixture(scope="module")
def beside(folder):
    """The job with a slot for each role."""
    with Run(folder, file=reasoning.manifest(folder, steps=STEPS, kind="vllm"), small=False, name="beside") as run:
        assert run.end(timeout_s=STARTS_S) == 0, run.said
        yield run


def lineage(run):
    return [(line["step"], line["units"], line["digest"]) for line in run.lines("lineage")]


@pytest.mark.slow("imports and starts vLLM in two jobs, 14 s each")
@pytest.mark.timeout(2 * STARTS_S + 60)
def test_in_turns_vllm_writes_what_it_writes_side_by_side(folder, beside):
    sets = ("spec.placement.mode=Collocated", "spec.pools[cpu].slots.perPod=1")
    job = reasoning.manifest(folder, steps=STEPS, kind="vllm")
    with Run(folder, *sets, file=job, small=False, name="turns") as turns:
        assert turns.end(timeout_s=STARTS_S) == 0, turns.said
        assert turns.answer["condition"] == "Complete", turns.said
    assert lineage(turns) == lineage(beside), "the same groups, in the same order"
    for mine, theirs in zip(turns.lines("metrics"), beside.lines("metrics"), strict=True):
        assert [mine[n] for n in LEARNT] == pytest.approx([theirs[n] for n in LEARNT], rel=1e-4, abs=1e-5)
        assert mine["engine_difference_max"] < 1e-4, "back on its slot it has the newest weights"
    lines = [line for path in (turns.work_dir / "spans").iterdir() for line in path.read_text().splitlines()]
    spans = [span for span in map(json.loads, lines) if "kind" in span]
    assert {span["slot"] for span in spans} == {"cpu/0/0"}
    kinds = [span["kind"] for span in spans if span["role"] == "rollout"]
    assert kinds.count("offload") >= STEPS, "each step it leaves the slot"


@pytest.mark.slow("imports and starts vLLM in a job and once more, 14 s each")
@pytest.mark.timeout(2 * STARTS_S + 60)
def test_vllm_reads_the_folder_that_comes_out_to_the_actors_log_probabilities(beside):
    [saved] = (beside.work_dir / "checkpoints").glob(f"b0-{STEPS}/actor/huggingface")
    ours = models.language_model(str(saved), dtype=torch.float32)
    prompt = models.tokenizer(str(saved))("12+34=?")["input_ids"]
    sampling = Sampling(samples=8, temperature=1.0, most=16, least=4, stops=(2,))
    block = 32 * models.kv_bytes_of(ours.config, itemsize=4)
    with VllmProcess(saved, block_bytes=block) as process:
        engine = process.engine_as_read(seed=3, version=PolicyVersion(0, STEPS))
        answer = engine.begin("a", key="train:0/0/0", prompt=prompt, sampling=sampling)
        while engine.busy:
            engine.step()
    made = answer.result()
    for ids, logprobs in zip(made.ids, made.logprobs, strict=True):
        with torch.no_grad():
            logits = ours(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        logits[:4, 2] = -torch.inf
        wanted = torch.log_softmax(logits, -1).gather(-1, torch.tensor(ids)[:, None])[:, 0]
        assert logprobs == pytest.approx(wanted.tolist(), abs=2e-5)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("HungTransformersRole", marks=pytest.mark.slow("waits for the deadline of a step that hangs")),
        pytest.param("HungVllmRole", marks=pytest.mark.long("waits for a deadline, and starts vLLM twice, 14 s each")),
    ],
)
@pytest.mark.timeout(2 * STARTS_S + 60)
def test_an_engine_that_hangs_is_ended_at_its_steps_deadline_and_its_groups_are_made_again(folder, kind):
    job = yaml.safe_load(reasoning.manifest(folder, steps=STEPS, kind=f"tests.fakes.hung_engines:{kind}").read_text())
    del job["spec"]["data"]["eval"]
    environ = [{"name": "RLINF_SETTINGS", "value": json.dumps(ENDED)}]
    job["spec"]["pools"][0]["template"] = {"spec": {"containers": [{"name": "agent", "env": environ}]}}
    file = folder / f"{kind}.yaml"
    file.write_text(yaml.safe_dump(job))
    with Run(folder, file=file, small=False, name=kind) as run:
        assert run.end(timeout_s=2 * STARTS_S) == 0, run.said
        assert run.answer["condition"] == "Complete", run.said
        events, lines = run.lines("events"), run.lines("metrics")
    [hung] = [line for line in events if line["event"] == "hung"]
    assert hung["worker"] == "rollout/0"
    assert "hung_engines.py" in hung["stacks"], "where it hangs is told"
    exits = [line["message"] for line in events if line["event"] == "worker-exited"]
    assert any("span compute" in each and "deadline" in each for each in exits), exits
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert [line["groups_count"] for line in lines] == [16] * STEPS, "no group is lost, and none is there twice"
