"""A language model that is made on the spot learns with flow grpo, and what comes out is a folder of Hugging Face's."""

import signal

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

from rlinf_api import names
from rlinf_api.errors import UserError
from rlinf_worker.channels.protocol import PolicyVersion
from rljob.export import export
from tests.fakes import reasoning
from tests.rljob_runs import Run, rljob

STEPS = 10


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return reasoning.make_folder(tmp_path_factory.mktemp("reasoning"))


@pytest.fixture(scope="module")
def learnt(folder):
    with Run(folder, file=reasoning.manifest(folder, steps=STEPS), small=False, name="learnt") as run:
        assert run.end(timeout_s=100) == 0, run.said
        assert run.answer["condition"] == "Complete", run.said
        yield run


def test_the_reward_rises(learnt):
    lines = learnt.lines("metrics")
    rewards = [line["reward_mean"] for line in lines]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert np.mean(rewards[:2]) < 0.1, rewards
    assert np.mean(rewards[-2:]) > np.mean(rewards[:2]) + 0.2, rewards
    assert learnt.answer["reward_mean"] == pytest.approx(rewards[-1])


def test_each_step_says_how_it_went(learnt):
    last = learnt.lines("metrics")[-1]
    assert {
        "reward_mean", "reward_std", "same_reward_fraction", "response_tokens_mean", "response_tokens_max",
        "truncated_fraction", "entropy", "clip_fraction", "approx_kl", "grad_norm", "tokens_per_s", "engine_kl",
        "engine_difference_max", "updates_skipped_count", "learning_rate",
    } <= set(last)  # fmt: skip
    assert (last["groups_count"], last["updates_skipped_count"], last["response_tokens_max"]) == (16, 0, 8)
    assert 2 <= last["response_tokens_mean"] <= 8, "no sample ends before minResponseTokens"
    assert 0 < last["engine_difference_max"] < 1e-4, "engine and actor score one policy, each in its own way"
    assert last["entropy"] < learnt.lines("metrics")[0]["entropy"]


def test_some_samples_of_each_step_can_be_read(learnt):
    lines = learnt.lines("samples")
    steps = [line["step"] for line in lines if line["key"].startswith("train")]
    assert [line["step"] for line in lines] == sorted(line["step"] for line in lines)
    assert sum(line["key"].startswith("eval") for line in lines) == 3 * 4, "of one sample each"
    assert {n: steps.count(n) for n in steps} == dict.fromkeys(range(1, STEPS + 1), 8), "of four groups two"
    for line in lines:
        assert line["reward"] == pytest.approx(reasoning.sevens([line["response"]], line["row"])[0])
        assert line["row"]["prompt"].endswith("=?")
        assert line["versions"] == [[0, line["step"] - 1]] * 2


def test_it_is_evaluated_every_few_steps_and_nothing_is_learnt_from_that(learnt):
    lines = learnt.lines("metrics")
    told = {line["step"]: line["eval_reward_mean"] for line in lines if "eval_reward_mean" in line}
    assert list(told) == [1, 5, 9]
    assert told[1] < told[9]
    assert [line["eval_groups_count"] for line in lines if line["step"] in told] == [8, 8, 8]
    assert [line["groups_count"] for line in lines] == [16] * STEPS


def test_what_comes_out_is_the_checkpoint_as_a_folder_of_hugging_faces(learnt, folder):
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
    from transformers import AutoModelForCausalLM, AutoTokenizer

    saved = learnt.work_dir / "checkpoints" / f"b0-{STEPS}" / "actor"
    exported = AutoModelForCausalLM.from_pretrained(saved / "huggingface", dtype=torch.float32)
    dcp_to_torch_save(saved, folder / "whole.pt")
    ours = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    before = [parameter.detach().clone() for parameter in ours.parameters()]
    missing = ours.load_state_dict(torch.load(folder / "whole.pt")["model"], strict=False)
    assert missing.unexpected_keys == []
    assert any(not torch.equal(a, b) for a, b in zip(before, ours.parameters(), strict=True)), "it has learnt"
    tokens = AutoTokenizer.from_pretrained(saved / "huggingface")
    ids = torch.tensor([tokens("12+34=?")["input_ids"]])
    assert ids.tolist() == [AutoTokenizer.from_pretrained(folder / "base")("12+34=?")["input_ids"]]
    with torch.no_grad():
        assert torch.equal(exported(ids).logits, ours(ids).logits)
    before_the_end = learnt.work_dir / "checkpoints" / "b0-8" / "actor"
    assert before_the_end.is_dir()
    assert not (before_the_end / "huggingface").exists(), "once, at the end"


def log_probabilities(at, prompt="12+34=?"):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with torch.no_grad():
        ids = torch.tensor([AutoTokenizer.from_pretrained(at)(prompt)["input_ids"]])
        return torch.log_softmax(AutoModelForCausalLM.from_pretrained(at, dtype=torch.float32)(ids).logits, -1)


def test_a_checkpoint_of_any_step_is_exported(learnt, folder):
    done = rljob("export", learnt.work_dir, "--step", "8")
    at = learnt.work_dir / "export" / "b0-8"
    assert (done.returncode, done.stdout) == (0, f"{at}: the model as of b0-8\n"), done.stderr
    last = learnt.work_dir / "checkpoints" / f"b0-{STEPS}" / "actor" / "huggingface"
    assert not torch.equal(log_probabilities(at), log_probabilities(folder / "base")), "it has learnt"
    assert not torch.equal(log_probabilities(at), log_probabilities(last)), "and went on to"
    assert export(learnt.work_dir, step=None, into=folder / "newest") == (PolicyVersion(0, STEPS), folder / "newest")
    assert {path.name for path in (folder / "newest").iterdir()} == {path.name for path in last.iterdir()}
    for path in last.iterdir():
        assert (folder / "newest" / path.name).read_bytes() == path.read_bytes(), path.name
    with pytest.raises(UserError, match="b0-8 is there already"):
        export(learnt.work_dir, step=8, into=None)
    with pytest.raises(UserError, match="has no checkpoint of step 7: got those of steps 4, 8, 10"):
        export(learnt.work_dir, step=7, into=None)


@pytest.mark.slow("loads torch and transformers in four workers, and in five of them again, on two cores")
@pytest.mark.timeout(400)
def test_a_job_whose_rollout_and_ranks_are_killed_ends_with_the_same_model(folder):
    """Tokens follow from weights, seed and key; gradients are added up in the order of keys."""
    job = reasoning.job(folder, steps=16, ranks=2, loss={"correction": "none"})
    debug = [{"name": names.ENV_LOG_LEVEL, "value": "DEBUG"}]  # each version of the weights with its checksum
    job["spec"]["pools"][0]["template"] = {"spec": {"containers": [{"name": "agent", "env": debug}]}}
    file = folder / "killed.yaml"
    file.write_text(yaml.safe_dump(job))
    ends = []
    for name, kills in (("left-alone", {}), ("killed", {2: "rollout/0", 7: "actor/1", 13: "actor/0"})):
        with Run(folder, file=file, small=False, name=name) as run:
            for step, worker in kills.items():
                run.until_step(step)
                run.kill(worker)
            assert run.end(timeout_s=150) == 0, run.said
            [saved] = (run.work_dir / "checkpoints").glob("*-16/actor/huggingface/model.safetensors")
            steps = {line["step"]: line for line in run.lines("lineage")}  # the last of a step counts
            ends.append((saved.read_bytes(), [(steps[n]["units"], steps[n]["digest"]) for n in range(1, 17)]))
            assert saved.parents[2].name == ("b2-16" if kills else "b0-16"), "a branch for each time that ranks died"
            seen = run.checksums()
            branches = {version.partition("-")[0] for version, _ in seen}
            assert branches == ({"b0", "b1", "b2"} if kills else {"b0"})
            assert [key for key, by_checksum in seen.items() if len(by_checksum) > 1] == []
    assert ends[0] == ends[1]


@pytest.mark.long("a whole job of what two ranks of the learner show by themselves")
@pytest.mark.timeout(200)
def test_two_ranks_learn_what_one_does(folder, learnt):
    with Run(folder, file=reasoning.manifest(folder, steps=STEPS, ranks=2), small=False, name="two") as run:
        assert run.end(timeout_s=120) == 0, run.said
        two = run.lines("metrics")
        export(run.work_dir, step=None, into=folder / "of-two")
        saved = run.work_dir / "checkpoints" / f"b0-{STEPS}" / "actor" / "huggingface"
    assert torch.equal(log_probabilities(folder / "of-two"), log_probabilities(saved)), "of the shards of both"
    one = learnt.lines("metrics")
    for name in ("reward_mean", "grad_norm", "entropy", "groups_count", "tokens_count"):
        assert [line[name] for line in two[:5]] == pytest.approx([line[name] for line in one[:5]], rel=1e-4), name


@pytest.mark.long("four whole jobs with torch and transformers; what a checkpoint holds is shown without a job")
@pytest.mark.timeout(400)
def test_a_job_that_is_stopped_and_goes_on_ends_as_one_that_is_not_also_on_other_ranks(folder):
    """On as many ranks bit for bit; on two, five steps behind the checkpoint, to 0.00001."""
    job = reasoning.manifest(folder, steps=12, loss={"correction": "none"})
    with Run(folder, file=job, small=False, name="whole") as run:
        assert run.end(timeout_s=120) == 0, run.said
        whole = run.work_dir / "checkpoints" / "b0-12" / "actor" / "huggingface"
        digests = {line["step"]: line["digest"] for line in run.lines("lineage")}
        numbers = {line["step"]: line for line in run.lines("metrics")}
    for ranks in (1, 2):
        name = f"stopped-{ranks}"
        with Run(folder, file=job, small=False, name=name) as run:
            run.until_step(5)
            run.process.send_signal(signal.SIGTERM)
            assert run.end(timeout_s=100) == 130, run.said
            stopped = run.answer["steps"]
            assert 5 <= stopped < 8, "so that five steps of the job are behind it"
        again = job if ranks == 1 else reasoning.manifest(folder, steps=12, ranks=2, loss={"correction": "none"})
        with Run(folder, file=again, small=False, name=name) as run:
            assert run.end(timeout_s=120) == 0, run.said
            [saved] = (run.work_dir / "checkpoints").glob("*-12/actor/huggingface")
            assert {line["step"]: line["digest"] for line in run.lines("lineage")} == digests
            if ranks == 1:
                assert (saved / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
            found = {line["step"]: line for line in run.lines("metrics")}
        for step in range(stopped + 1, stopped + 6):
            for metric in ("policy_loss", "grad_norm", "reward_mean", "entropy"):
                wanted = pytest.approx(numbers[step][metric], rel=1e-5, abs=1e-7)
                assert found[step][metric] == wanted, (ranks, step, metric)


@pytest.mark.long("a whole job of what trainer and judge show by themselves: a step without groups")
def test_a_step_of_which_nothing_is_left_counts_and_changes_nothing(folder):
    """A reward function that always raises, and whose groups are dropped."""
    job = yaml.safe_load(reasoning.manifest(folder, steps=2).read_text())
    job["spec"]["roles"][1]["config"] |= {"function": "tests.fakes.reasoning:raises", "onError": "drop"}
    del job["spec"]["data"]["eval"]
    path = folder / "nothing.yaml"
    path.write_text(yaml.safe_dump(job))
    with Run(folder, file=path, small=False, name="nothing") as run:
        assert run.end(timeout_s=100) == 0, run.said
        lines = run.lines("metrics")
        [exported] = (run.work_dir / "checkpoints").glob("b0-2/actor/huggingface/model.safetensors")
    assert [line["groups_count"] for line in lines] == [0, 0]
    assert lines[1]["previous"]["reward_raised_count"] == 16
    assert load_file(exported).keys() == load_file(folder / "base" / "model.safetensors").keys()
    assert all(
        torch.equal(load_file(exported)[n], t) for n, t in load_file(folder / "base" / "model.safetensors").items()
    )


@pytest.mark.slow("loads torch and transformers in three workers, and in one of them twice")
@pytest.mark.timeout(200)
def test_steps_that_overlap_learn_within_the_bound_and_say_how_old_their_tokens_are(folder):
    slow = {"kind": "tests.fakes.reasoning:unhurried"}
    job = reasoning.manifest(folder, steps=16, order="arrival", loss=slow)
    with Run(folder, "spec.flow.maxStaleness=2", file=job, small=False, name="stale") as run:
        run.until_step(5)
        run.kill("rollout/0")
        assert run.end(timeout_s=150) == 0, run.said
        assert run.answer["condition"] == "Complete", run.said
        lines = run.lines("metrics")
    assert [line["groups_count"] for line in lines] == [16] * 16
    oldest = [line["staleness_max"] for line in lines]
    assert max(oldest[:3]) == 2, f"a slow learner's first steps are all made by the base model: {oldest}"
    assert max(oldest) <= 2, oldest
    rewards = [line["reward_mean"] for line in lines]
    assert np.mean(rewards[-2:]) > np.mean(rewards[:2]) + 0.2, rewards


@pytest.mark.slow("loads torch and transformers in three workers, one after the other on two cores")
@pytest.mark.timeout(200)
def test_an_engine_that_rounds_more_than_the_bound_allows_degrades_the_job_and_its_steps_go_on(folder):
    job = reasoning.manifest(folder, steps=500, engineKlBound=1e-9, loss={"kind": "tests.fakes.reasoning:reinforce"})
    sets = ("spec.roles[rollout].config.dtype=bfloat16", "spec.roles[actor].config.tensorboard=tb")
    with Run(folder, *sets, file=job, small=False, name="apart") as run:
        told = run.work_dir / "objects" / "rljob-default-sevens.yaml"

        def degraded():
            found = yaml.safe_load(told.read_text()) if told.exists() else None
            every = (found or {}).get("status", {}).get("conditions", [])
            return [each for each in every if each["type"] == "Degraded" and each["reason"] == "LogprobMismatch"]

        [said] = run.until(degraded, what="that engine and actor disagree", timeout_s=150)
        done = len(run.lines("metrics"))
        run.until_step(done + 2)
        assert max(line["engine_kl"] for line in run.lines("metrics")) > 1e-9
        assert [path.name for path in (run.work_dir / "tb").iterdir()] == ["events.out.tfevents.0.actor"]
    assert said["status"] == "True"
    assert "engine and actor disagree on tokens of one policy: engine_kl is " in said["message"]


@pytest.mark.long("imports and starts vLLM twice, 14 s each; test_reasoning_vllm.py has it in turns")
@pytest.mark.timeout(500)
def test_vllm_generates_and_a_dead_engines_groups_are_made_again(tmp_path):
    folder = reasoning.make_folder(tmp_path, hidden=128)  # vLLM has no heads of 8 numbers
    with Run(folder, file=reasoning.manifest(folder, steps=12, kind="vllm"), small=False, name="vllm") as run:
        run.until_step(4, timeout_s=200)
        run.kill("rollout/0")
        assert run.end(timeout_s=250) == 0, run.said
        assert run.answer["condition"] == "Complete", run.said
        lines = run.lines("metrics")
        [log] = (run.work_dir / "logs").glob("*/rollout-0.log")
        assert '"attempt": 2' in log.read_text()
    rewards = [line["reward_mean"] for line in lines]
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert [line["groups_count"] for line in lines] == [16] * 12, "no group is lost"
    assert np.mean(rewards[-2:]) > np.mean(rewards[:2]) + 0.2, rewards
    assert max(line["engine_difference_max"] for line in lines) < 1e-4, "the new engine has the new weights, too"
