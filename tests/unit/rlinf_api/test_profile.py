"""A profile: its JSON, its key, and the sentence by which one that cannot be true is refused."""

import json
from typing import Any

import pytest

from rlinf_api.errors import InvalidManifest
from rlinf_api.job import RLJobSpec
from rlinf_api.plan import JobRef
from rlinf_api.profile import (
    MAX_BYTES,
    Batch,
    ChannelProfile,
    EndProfile,
    MemoryProfile,
    Move,
    Number,
    Profile,
    Releases,
    RoleProfile,
    key_of,
)
from tests.builders import ppo_job

KEY = "sha256:" + "a1" * 32


def profile(**changes: Any) -> Profile:
    role = RoleProfile(
        name="rollout",
        pool="gpu",
        workers=2,
        seconds={"compute": Number(value=0.5, spread=0.01, count=6), "wait_data": Number(value=0.25, count=6)},
        batches=[Batch(size=8, units=8, seconds=Number(value=0.1, count=30), tokens=4096)],
        moves=[Move(what="load", seconds=Number(value=1.5, count=2), bytes=8e9)],
        ends=[
            EndProfile(channel="tickets", side="consumer", units=40, bytes=400, wait_seconds=Number(value=0.2)),
            EndProfile(channel="", side="", wait_seconds=Number(value=0.05)),
        ],
        releases=[Releases(channel="samples", count=240, seconds=[0.1, 0.2, 0.9])],
        memory=MemoryProfile(resident=5, peak=6, offloaded=1, process=3, process_peak=3),
    )
    edge = ChannelProfile(
        name="samples",
        mode="Queue",
        producer="rollout",
        consumer="actor",
        units=Number(value=80),
        bytes=Number(value=9),
    )
    said: dict[str, Any] = {
        "key": KEY, "job": JobRef(name="math", uid="1b4e"), "revision": 2, "first_step": 4, "last_step": 7, "steps": 3,
        "step_seconds": Number(value=1.2, spread=0.02, count=3), "roles": [role], "channels": [edge],
    }  # fmt: skip
    return Profile(**{**said, **changes})


def test_a_profile_comes_back_from_its_json_as_it_was():
    assert Profile.from_json(profile().to_json()) == profile()


def test_a_role_whose_workers_do_not_say_what_they_wait_for_may_wait_all_the_same():
    role = profile().roles[0].model_dump() | {"ends": []}
    assert RoleProfile.model_validate(role).seconds["wait_data"].value == 0.25


def test_the_json_of_a_profile_is_this():
    value = json.loads(profile().to_json())
    assert {name: value[name] for name in ("key", "job", "revision", "firstStep", "lastStep", "steps")} == {
        "key": KEY, "job": {"name": "math", "uid": "1b4e"}, "revision": 2, "firstStep": 4, "lastStep": 7, "steps": 3,
    }  # fmt: skip
    role = value["roles"][0]
    assert role["seconds"]["compute"] == {"value": 0.5, "spread": 0.01, "count": 6}
    assert role["batches"] == [{"size": 8.0, "seconds": {"value": 0.1, "count": 30}, "units": 8.0, "tokens": 4096.0}]
    assert role["ends"][0] == {
        "channel": "tickets", "side": "consumer", "units": 40.0, "bytes": 400.0, "waitSeconds": {"value": 0.2},
    }  # fmt: skip
    assert role["memory"] == {"resident": 5, "peak": 6, "offloaded": 1, "process": 3, "processPeak": 3}
    assert json.loads(profile(step_seconds=Number(value=1 / 3)).to_json())["stepSeconds"] == {"value": 0.333333}


@pytest.mark.parametrize(
    ("where", "value", "sentence"),
    [
        (("stepSeconds", "value"), -1.0, "profile.stepSeconds.value: got -1.0, wanted at least 0.0; change it"),
        (("stepSeconds", "value"), float("nan"), "profile.stepSeconds.value: got nan: Input should be a finite number"),
        (("stepSeconds", "spread"), float("inf"), "profile.stepSeconds.spread: got inf: Input should be a finite"),
        (("stepSeconds", "how"), "guessed", "profile.stepSeconds.how: got 'guessed', wanted 'measured', 'fitted' or"),
        (("roles", 0, "workers"), 0, "profile.roles[rollout].workers: got 0, wanted at least 1"),
        (("roles", 0, "seconds", "compute", "value"), None, "value: got nothing (null), wanted a number"),
        (("roles", 0, "releases", 0, "seconds"), [0.2, 0.1], "profile.roles[rollout].releases[0]: seconds do not rise"),
        (("roles", 0, "releases", 0, "count"), 2, "releases[0]: 3 times are of 2 units"),
        (
            ("roles", 0, "memory", "peak"),
            4,
            "roles[rollout].memory: peak is 4 bytes, below the 5 that are always there",
        ),
        (("roles", 0, "memory", "processPeak"), 2, "processPeak is 2 bytes, below the 3 that are always there"),
        (("roles", 0, "ends", 0, "waitSeconds", "value"), 0.1, "waits by channel come to 0.15 s, wait_data is 0.25 s"),
        (("steps",), 5, "profile: 5 steps are said to lie between 4 and 7"),
        (("key",), "77ab", "profile.key: got '77ab', wanted text that matches ^sha256:[0-9a-f]{64}$"),
        (("color",), "red", "profile.color: is not a field"),
        (("roles",), [], "profile.roles: got [], wanted at least 1 entries"),
    ],
)
def test_what_cannot_be_true_is_refused_by_its_field(where, value, sentence):
    said = json.loads(profile().to_json())
    at = said
    for part in where[:-1]:
        at = at[part]
    at[where[-1]] = value
    with pytest.raises(InvalidManifest) as caught:
        Profile.from_json(json.dumps(said))
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "a profile is not JSON"),
        ("[1]", "a profile is no object: got a list"),
        (" " * (MAX_BYTES + 1), f"a profile is too large: got {MAX_BYTES + 1} bytes, wanted at most {MAX_BYTES}"),
    ],
)
def test_what_is_no_profile_at_all_is_refused_in_a_sentence(text, sentence):
    with pytest.raises(InvalidManifest) as caught:
        Profile.from_json(text)
    assert sentence in str(caught.value)


def test_a_profile_of_as_many_bytes_as_there_may_be_is_taken():
    assert Profile.from_json(profile().to_json().ljust(MAX_BYTES)) == profile()


def test_the_largest_profile_that_a_plan_can_lead_to_is_within_the_bound():
    times = [n / 7 for n in range(128)]
    batch = Batch(size=1 / 3, seconds=Number(value=1 / 3, spread=1 / 7, count=10**6), units=1 / 3, tokens=1 / 3)
    role = (
        profile()
        .roles[0]
        .model_copy(
            update={"batches": [batch] * 32, "releases": [Releases(channel="c" * 63, count=10**6, seconds=times)]}
        )
    )
    assert len(profile(roles=[role] * 64).to_json()) < MAX_BYTES


def test_the_key_is_of_job_and_hardware_and_of_nothing_else():
    plain = ppo_job().build()["spec"]
    known = key_of(RLJobSpec.model_validate(plain))
    assert known == key_of(RLJobSpec.model_validate(plain))

    def changed(path: tuple[Any, ...], value: Any) -> bool:
        other = json.loads(json.dumps(plain))
        at = other
        for part in path[:-1]:
            at = at[part]
        at[path[-1]] = value
        return key_of(RLJobSpec.model_validate(other)) != known

    assert not changed(("seed",), 99)
    assert not changed(("flow", "steps"), 999)
    assert not changed(("roles", 0, "workers"), 2)
    assert not changed(("pools", 0, "pods"), 2)
    assert not changed(("checkpoint",), {"everySteps": 7})
    assert changed(("flow", "config"), {"env": "Other-v0"})
    assert changed(("roles", 0, "config"), {"x": 1})
    assert changed(("roles", 0, "slotsPerWorker"), 2)
    assert changed(("pools", 0, "slots"), {"perPod": 4, "memory": "7Gi"})
    assert changed(("pools", 0, "template"), {"spec": {"nodeSelector": {"gpu": "h100"}}})
