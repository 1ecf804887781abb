"""The PPO update: a gang gives what one rank gives, and a checkpoint goes on as if nothing had been."""

import json
import os
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from rlinf_api.errors import UserError
from rlinf_worker.algorithms.policy_spec import Actions, PolicySpec
from rlinf_worker.roles.actor import portable, role
from rlinf_worker.roles.actor.batch import Samples
from rlinf_worker.roles.actor.learner import Learner
from rlinf_worker.roles.actor.role import FsdpRole
from rlinf_worker.roles.protocol import TrainerStep
from rlinf_worker.sums import Amount
from tests.fakes.gang_rank import SPEC, WITHIN_S, config, restore, samples_of, whole

COUNTS = [[24, 16], [12, 0]]
"""Samples per step and rank: uneven, and a rank that got nothing."""

pytestmark = pytest.mark.timeout(150)  # two more processes import torch: 7 s, on a busy machine ten times that


def save(learner: Learner, folder: Path) -> None:
    model, optimizer = learner.state()
    portable.write(folder, model=model, optimizer=optimizer, spec=SPEC, extra={"episodes": [1.0]})


def run_gang(folder: Path, counts: list[list[int]]) -> list[Any]:
    """Two ranks as processes; what each published after every step."""
    (folder / "counts.json").write_text(json.dumps(counts))
    root = Path(__file__).parents[5]
    command = [sys.executable, "-m", "tests.fakes.gang_rank", str(folder)]
    ranks = [
        subprocess.Popen([*command, str(rank), "2"], cwd=root, env={**os.environ, "PYTHONPATH": str(root)})
        for rank in range(2)
    ]
    deadline = time.monotonic() + WITHIN_S
    try:
        assert [rank.wait(timeout=max(0.0, deadline - time.monotonic())) for rank in ranks] == [0, 0]
    except subprocess.TimeoutExpired as error:
        stood = "\n".join(f"{path.name}: {path.read_text()}" for path in sorted(folder.glob("stack-*")))
        raise AssertionError(f"the ranks have not ended within {WITHIN_S:g} s\n{stood}") from error
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return [np.load(folder / f"out-{rank}.npz") for rank in range(2)]


@pytest.fixture(scope="module")
def gang(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any], Learner, list[dict[str, Any]]]:
    """(folder, what the ranks published, one rank's learner after the same steps, what it published)."""
    folder = tmp_path_factory.mktemp("gang")
    alone, published = Learner(SPEC, config()), []
    other = Learner(SPEC, config())
    other.update(samples_of(9, seed=8, learner=other), step=1)
    save(other, folder / "other")
    outs = run_gang(folder, COUNTS)
    for step, counts in enumerate(COUNTS, start=1):
        parts = [samples_of(n, seed=100 * step + rank, learner=alone) for rank, n in enumerate(counts) if n]
        alone.update(joined(parts), step=step)
        published.append(whole(alone))
    return folder, outs, alone, published


def joined(parts: list[Samples]) -> Samples:
    names = Samples.__dataclass_fields__
    return Samples(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})


def test_a_gang_publishes_what_one_rank_does_on_the_same_samples(gang):
    _, outs, _, published = gang
    for step, alone in enumerate(published, start=1):
        for name, tensor in alone.items():
            np.testing.assert_allclose(outs[0][f"{step}/{name}"], tensor, rtol=0, atol=1e-5, err_msg=f"{step} {name}")
            np.testing.assert_array_equal(outs[0][f"{step}/{name}"], outs[1][f"{step}/{name}"])
        assert any(not np.array_equal(outs[0][f"{step}/{n}"], outs[0][f"{step - 1}/{n}"]) for n in alone)


def test_one_rank_goes_on_where_a_gang_of_two_left(gang):
    folder, _, alone, _ = gang
    resumed = Learner(SPEC, config())
    restore(resumed, folder / "saved", rank=0)
    for learner in (alone, resumed):
        learner.update(samples_of(20, seed=77, learner=learner), step=3)
    for name, tensor in whole(alone).items():
        np.testing.assert_allclose(whole(resumed)[name], tensor, rtol=0, atol=2e-5, err_msg=name)


def test_a_gang_of_two_goes_on_where_one_rank_left(gang):
    _, outs, _, _ = gang
    other = Learner(SPEC, config())
    other.update(samples_of(9, seed=8, learner=other), step=1)
    for out in outs:
        for name, tensor in whole(other).items():
            np.testing.assert_array_equal(out[f"restored/{name}"], tensor)


def test_a_restored_learner_goes_on_bit_for_bit(tmp_path):
    first, second = Learner(SPEC, config(minibatches=4)), Learner(SPEC, config(minibatches=4))
    first.update(samples_of(30, seed=1, learner=first), step=1)
    save(first, tmp_path / "c")
    restore(second, tmp_path / "c", rank=0)
    for learner in (first, second):
        learner.update(samples_of(30, seed=2, learner=learner), step=2)
    for name, tensor in first.model.state_dict().items():
        assert torch.equal(second.model.state_dict()[name], tensor), name


def test_an_update_is_the_same_whenever_it_is_made():
    numbers = []
    for _ in range(2):
        learner = Learner(SPEC, config(minibatches=3))
        numbers.append(learner.update(samples_of(31, seed=4, learner=learner), step=1))
    assert numbers[0] == numbers[1]
    assert {"policy_loss", "value_loss", "entropy", "approx_kl", "return_mean"} <= numbers[0].keys()


def test_an_update_raises_the_probability_of_what_was_better_than_expected():
    learner = Learner(SPEC, config(normaliseAdvantage=False, epochs=5))
    obs = np.tile(np.array([[0.5, -0.2, 0.1]], np.float32), (16, 1))
    good = replace(
        samples_of(16, seed=1, learner=learner),
        obs=obs,
        action=np.full(16, 2),
        advantage=np.ones(16, np.float32),
        value=learner.values(obs),
    )
    before = torch.softmax(learner.model.policy(torch.from_numpy(obs[:1])), -1)[0, 2].item()
    learner.update(good, step=1)
    assert torch.softmax(learner.model.policy(torch.from_numpy(obs[:1])), -1)[0, 2].item() > before


async def test_a_schedule_goes_to_the_last_step_as_it_is_by_now(monkeypatch):
    """An edit of the running job moves it: behind the old one the factor would be negative."""
    actor, flow = FsdpRole(), SimpleNamespace(steps=20)
    factors: list[float] = []

    def update(samples: Any, *, step: int) -> dict[str, float]:
        factors.append(made.config.remaining(step))
        return {}

    made = SimpleNamespace(config=config(schedule="linear"), values=None, update=update)
    actor._learner, actor._ctx = cast(Any, made), cast(Any, SimpleNamespace(flow=flow))
    actor._span, actor._env_steps = lambda *_, **__: nullcontext(Amount()), 1
    monkeypatch.setattr(role, "collect", lambda *_, **__: None)
    for number, steps in ((11, 20), (11, 40)):
        flow.steps = steps
        await actor.train(TrainerStep(number=number, branch=0, units=()))
    assert factors == [0.5, 0.75]


def test_a_linear_schedule_ends_near_nothing_and_final_epochs_are_reached():
    made = config(schedule="linear", epochs=10, finalEpochs=4)
    assert [round(made.remaining(step), 3) for step in (1, 6, 10)] == [1.0, 0.5, 0.1]
    assert [made.epochs_of(step) for step in (1, 10)] == [10, 4]


def test_a_checkpoint_of_another_network_or_a_broken_one_is_said_so(tmp_path):
    learner = Learner(SPEC, config())
    save(learner, tmp_path / "c")
    other = PolicySpec(obs_shape=(3,), actions=Actions("continuous", 4), hidden_sizes=(8,))
    _, live = learner.state()
    with pytest.raises(UserError, match="is of another network"):
        portable.read(tmp_path / "c", spec=other, optimizer=live)
    (tmp_path / "c" / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(UserError, match=r"cannot be read.*remove that checkpoint's folder"):
        portable.read(tmp_path / "c", spec=SPEC, optimizer=live)


def test_continuous_actions_learn_too():
    spec = PolicySpec(obs_shape=(3,), actions=Actions("continuous", 2), hidden_sizes=(8,))
    learner = Learner(spec, config())
    discrete = samples_of(12, seed=1, learner=Learner(SPEC, config()))
    before = whole(learner)
    learner.update(replace(discrete, action=np.zeros((12, 2), np.float32)), step=1)
    assert any(not np.array_equal(before[name], tensor) for name, tensor in whole(learner).items())
