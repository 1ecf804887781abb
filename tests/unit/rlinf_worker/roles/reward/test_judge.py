"""Reward functions in a process of their own: what they answer, and what becomes of each way to answer nothing."""

import asyncio
import json

import numpy as np
import pytest

from rlinf_api import names
from rlinf_api.errors import UserError
from rlinf_api.names import WorkerId
from rlinf_worker.channels.protocol import Item, LineageKey, PolicyVersion
from rlinf_worker.roles.reward import shown
from rlinf_worker.roles.reward.judge import Judge, NoRewards
from rlinf_worker.roles.reward.role import RuleRole
from rlinf_worker.roles.reward.schema import RuleConfig
from rlinf_worker.roles.reward.shown import Shown
from tests.fakes.context import Stage

OURS = "tests.fakes.reasoning"
ROW = {"answer": 12, "number": 3}


def judge_of(*, timeout_s=20.0, **config):
    return Judge(RuleConfig.model_validate(config).model_dump(mode="json", by_alias=True), timeout_s=timeout_s)


async def answered(texts, row=None, **config):
    judge = judge_of(**config)
    try:
        return await judge.rewards(texts, row or ROW)
    finally:
        await judge.close()


async def test_exact_compares_the_text_with_the_answer():
    assert await answered([" 12\n", "12.", "112", ""]) == {"reward": [1, 0, 0, 0]}
    assert await answered(["b"], {"right": "b"}, answerColumn="right") == {"reward": [1]}


async def test_regex_takes_the_last_match_and_its_group():
    texts = ["so #### 7, or #### 12", "#### 12 and #### 7", "12", "#### 12"]
    assert await answered(texts, function="regex", pattern=r"####\s*(\d+)") == {"reward": [1, 0, 0, 1]}
    assert await answered(["1 and 12", "none"], function="regex", pattern=r"\d+") == {"reward": [1, 0]}


@pytest.mark.timeout(120)
async def test_math_takes_what_means_the_same_as_right():
    texts = ["so it is \\boxed{\\frac{1}{2}}", "the answer is 0.5", "$x = \\frac{2}{4}$", "\\boxed{2}", "", "half of 3"]
    assert await answered(texts, {"answer": "\\frac{1}{2}"}, function="math") == {"reward": [1, 1, 1, 0, 0, 0]}
    assert await answered(["7", "3 + 4 = 7", "8"], {"answer": "7"}, function="math") == {"reward": [1, 1, 0]}


@pytest.mark.timeout(120)
async def test_an_expression_that_takes_too_long_is_not_right_and_others_are_judged():
    """The library's alarm, in the main thread of the child."""
    judge = judge_of(function="math", timeoutSeconds=12, timeout_s=60.0)
    try:
        texts = ["$9^{9^{9^{9}}}$", "$\\boxed{4}$"]
        assert await judge.rewards(texts, {"answer": "4"}) == {"reward": [0, 1]}
        with pytest.raises(NoRewards, match="column 'answer' has no expression: ''"):
            await judge.rewards(["4"], {"answer": ""})
    finally:
        await judge.close()


async def test_a_function_of_ones_own_answers_numbers_or_named_parts():
    assert await answered(["77", "7a", ""], function=f"{OURS}:sevens") == {"reward": [1.0, 0.5, 0.0]}
    assert await answered(["77", ""], function=f"{OURS}:parts") == {"length": [2, 0], "number": [3, 3]}
    assert await answered(["a", "b"], function=f"{OURS}:prints") == {"reward": [0.25, 0.25]}, "printing is no answer"


@pytest.mark.parametrize(
    ("function", "name", "says"),
    [
        ("raises", "raised", "raised KeyError: 'no such answer' \\(.*reasoning.py, line"),
        ("dies", "died", "exited with 3"),
        ("is_short", "wrong-length", "answered 1 numbers of 'reward' for 2 texts"),
        ("is_no_number", "not-finite", "answered 'reward' \\[nan, nan\\]"),
    ],
)
async def test_what_is_no_reward_is_refused_by_name_and_the_next_group_is_asked_again(function, name, says):
    judge = judge_of(function=f"{OURS}:{function}")
    try:
        for _ in range(2):
            with pytest.raises(NoRewards, match=says) as raised:
                await judge.rewards(["a", "b"], ROW)
            assert raised.value.name == name
    finally:
        await judge.close()


async def test_behind_one_that_died_the_next_group_has_its_rewards():
    judge = judge_of(function=f"{OURS}:dies_once_in_three")
    with pytest.raises(NoRewards, match="exited with 3"):
        await judge.rewards(["7"], {"number": 3})
    assert await judge.rewards(["7"], {"number": 4}) == {"reward": [1.0]}
    await judge.close()


async def test_one_that_hangs_is_killed_at_its_deadline_and_another_is_started():
    judge = judge_of(function=f"{OURS}:hangs", timeout_s=0.2)
    await judge.start()
    first = judge._child
    with pytest.raises(NoRewards, match=r"did not answer within 0\.2 s") as raised:
        await judge.rewards(["a"], ROW)
    assert raised.value.name == "hung"
    assert first is not None
    assert first.returncode == -9
    await judge.start()
    assert judge._child is not first
    await judge.close()


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("nowhere.at_all:f", "reward function 'nowhere.at_all:f' cannot be imported: got ModuleNotFoundError"),
        (f"{OURS}:none", f"reward function '{OURS}:none' is not there: got {OURS} has no function 'none'"),
    ],
)
async def test_a_function_that_cannot_be_loaded_is_told_as_the_role_starts(function, says):
    judge = judge_of(function=function)
    with pytest.raises(UserError, match=says):
        await judge.start()
    assert judge._child is None


async def test_a_row_without_the_answer_is_named():
    with pytest.raises(NoRewards, match="the row has no column 'answer', only prompt"):
        await answered(["a"], {"prompt": "x"})


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"function": "maths"}, "function 'maths' is not known; write exact, regex, math or module:function"),
        ({"function": "regex"}, "pattern goes with function regex"),
        ({"pattern": "a"}, "pattern goes with function regex"),
        ({"function": "regex", "pattern": "("}, "pattern is no regular expression"),
        (
            {"weights": {"reward": 2, "right": 1}},
            "weights names 'right', and exact has one part, 'reward'; leave the others out, or write module:function",
        ),
    ],
)
def test_a_wrong_config_is_a_sentence(config, says):
    with pytest.raises(ValueError, match=says):
        RuleConfig.model_validate(config)


# --- the role ---------------------------------------------------------------------------------------------------------
def group(number):
    return {
        "prompt": np.array([4, 5], np.int32), "tokens": np.array([1, 2, 3], np.int32),
        "logprobs": np.zeros(3, np.float32), "versions": np.zeros((3, 2), np.int32),
        "lengths": np.array([2, 1], np.int32), "finished": np.array([True, False]), "texts": ["77", "ab7c"],
        "row": {"number": number, "answer": "77"},
    }  # fmt: skip


async def run(numbers, **config):
    stage = Stage()
    samples, rewarded = stage.channel("samples"), stage.channel("rewarded")
    for number in numbers:
        samples.give(f"train:0/{number}/0", group(number))
    samples.end()
    reported = []
    context = stage.context("reward", **config)
    context.report = lambda *, step, metrics, key="": reported.append((metrics, key))  # type: ignore[method-assign]
    await asyncio.wait_for(RuleRole().run(context), 60)
    return {item.key: item.payload for item in rewarded.all}, samples, reported


async def test_a_group_goes_on_with_its_rewards_and_without_its_texts():
    found, samples, _ = await run([1], function=f"{OURS}:parts", weights={"length": 0.5})
    [payload] = found.values()
    assert set(payload) == {*group(1), "reward", "parts"} - {"texts", "row"}
    assert payload["parts"] == {"length": [2, 4], "number": [1, 1]}
    assert payload["reward"].tolist() == [0.5 * 2 + 1, 0.5 * 4 + 1]
    assert payload["reward"].dtype == np.float32
    assert [item.key for item in samples.acked] == list(found)


async def test_a_group_without_rewards_gets_zeros_and_is_counted():
    found, samples, reported = await run([3, 4], function=f"{OURS}:raises_once_in_three")
    assert [payload["reward"].tolist() for payload in found.values()] == [[0, 0], [1, 0.25]]
    assert reported == [({"reward_raised_count": 1.0}, "train:0/3/0")]
    assert len(samples.acked) == 2


async def test_or_is_dropped():
    found, samples, _ = await run([3, 4], function=f"{OURS}:raises_once_in_three", onError="drop")
    assert list(found) == ["train:0/4/0"]
    assert [(item.key, why) for item, why in samples.dropped] == [("train:0/3/0", "the reward function failed")]


async def test_a_weight_of_a_part_that_is_not_answered_ends_the_job_whatever_onerror_says():
    says = (
        r"weights of spec.roles\[reward\].config names 'lenght': got .*:parts answered 'length', 'number' of unit "
        "train:0/1/0, wanted each part that has a weight, each time; correct the name, or answer 0 where it is none"
    )
    with pytest.raises(UserError, match=says):
        await run([1], function=f"{OURS}:parts", weights={"lenght": 0.5, "number": 2}, onError="drop")


async def test_a_group_that_nobody_needs_is_not_judged():
    stage = Stage()
    samples = stage.channel("samples")
    gone = samples.give("train:0/1/0", group(1))
    gone.cancel()
    samples.end()
    await asyncio.wait_for(RuleRole().run(stage.context("reward", function=f"{OURS}:hangs")), 60)
    assert samples.dropped == [(gone, "cancelled")]
    assert stage.channel("rewarded").all == []


async def test_or_ends_the_job():
    with pytest.raises(UserError, match="unit train:0/3/0 has no rewards: got the reward function raised ValueError"):
        await run([3, 4], function=f"{OURS}:raises_once_in_three", onError="fail")


# --- samples.jsonl ----------------------------------------------------------------------------------------------------
def shown_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_a_few_groups_of_a_step_are_written_for_people_each_with_its_best_and_its_worst(tmp_path, monkeypatch):
    monkeypatch.setenv(names.ENV_OUTPUT_DIR, str(tmp_path))
    await run(range(20), function=f"{OURS}:parts", weights={"length": 0.5})
    lines = shown_lines(tmp_path / "samples.jsonl")
    assert [line["key"] for line in lines] == [f"train:0/{n}/0" for n in range(shown.GROUPS) for _ in range(2)]
    assert lines[2] == {
        "step": 1, "key": "train:0/1/0", "sample": 1, "row": {"number": 1, "answer": "77"}, "response": "ab7c",
        "reward": 3.0, "parts": {"length": 4.0, "number": 1.0}, "tokens": 1, "finished": False,
        "versions": [[0, 0], [0, 0]],
    }  # fmt: skip
    assert (lines[3]["sample"], lines[3]["reward"]) == (0, 2.0)


def given(step, *, text="77", branch=0):
    payload = {**group(1), "texts": [text, text]}
    return Item(
        channel="samples", key=LineageKey("train:0/1/0"), payload=payload, step=step, branch=branch,
        source=WorkerId("rollout/0"), version=PolicyVersion(0, 0),
    )  # fmt: skip


def test_the_file_of_samples_is_bounded_and_so_is_a_line(tmp_path, monkeypatch):
    monkeypatch.setattr(shown, "MOST_BYTES", 20_000)
    log, reward = Shown(str(tmp_path), rank=0), np.array([1.0, 0.0], np.float32)
    for step in range(200):
        log.show(given(step, text="x" * 9000), {"reward": [1.0, 0.0]}, reward)
    log.close()
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert sizes.keys() == {"samples.jsonl", "samples.jsonl.1"}
    assert max(sizes.values()) <= 20_000
    last = shown_lines(tmp_path / "samples.jsonl")[-1]
    assert (last["step"], len(last["response"])) == (199, shown.CHARACTERS)
    assert len(log._groups) <= shown.STEPS


def test_only_the_first_worker_writes_samples_and_none_where_there_is_no_work_dir(tmp_path):
    for log in (Shown(str(tmp_path), rank=1), Shown("", rank=0)):
        log.show(given(1), {"reward": [1.0, 0.0]}, np.array([1.0, 0.0], np.float32))
        log.close()
    assert list(tmp_path.iterdir()) == []
