"""The reference engine and its role, without a job: units that are given up or were begun before, weights that come."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from rlinf_worker.channels.protocol import PolicyVersion
from tests.fakes.context import Stage
from tests.fakes.engine_role import PARTS, EngineRole, length_of
from tests.fakes.reference_engine import Tokens, token, weights_of

V1, V2 = PolicyVersion(0, 1), PolicyVersion(0, 2)


@pytest.fixture
async def site():
    stage = Stage()
    stage.weights.show(V1, {"w": weights_of(V1)})
    ctx, role = stage.context("engine", length=20), EngineRole()
    running = asyncio.ensure_future(role.run(ctx))
    made = SimpleNamespace(
        stage=stage, role=role, prompts=stage.channel("prompts"), samples=stage.channel("samples"), ctx=ctx
    )
    try:
        yield made
    finally:
        ctx.stopping.set()
        async with asyncio.timeout(10):
            await running


async def until(holds: Any, what: str) -> None:
    try:
        async with asyncio.timeout(20):
            while not holds():
                await asyncio.sleep(0.005)
    except TimeoutError as error:
        raise AssertionError(f"not within 20 s: {what}") from error


def so_far(site: Any, key: str) -> int:
    engine = site.role.engine
    return len(engine.so_far(f"0/{key}").ids) if engine is not None and f"0/{key}" in engine._requests else 0


async def test_a_cancelled_prompt_is_aborted_alone_and_the_others_go_on(site):
    dead, other = (site.prompts.give(key, {"n": n}, version=V1) for n, key in ((1, "dead"), (2, "other")))
    await until(lambda: so_far(site, "dead") > 3 and so_far(site, "other") > 3, "tokens of both")
    dead.cancel()
    await until(lambda: site.prompts.dropped == [(dead, "cancelled")], "the word on it")
    assert so_far(site, "dead") == 0
    before = so_far(site, "other")
    await until(lambda: so_far(site, "other") > before, "the other goes on")
    assert other not in site.prompts.acked


async def test_what_there_is_of_an_answer_is_kept_and_continued_with_the_weights_of_then(site):
    site.prompts.give("a", {"n": 1}, version=V1)
    await until(lambda: len(site.prompts.kept.get("a", {"ids": []})["ids"]) > 3, "a partial answer")
    partial = site.prompts.kept["a"]
    assert Tokens(ids=partial["ids"], versions=partial["versions"]).are_right(1)
    begun = [token((0, 0), 2, n) for n in range(20 * length_of(2) - 1)]
    old = site.prompts.give("b", {"n": 2}, version=V1)
    old.partial = {"ids": [*begun], "versions": [(0, 0)] * len(begun)}
    await until(lambda: site.samples.all, "an answer")
    [sample] = site.samples.all
    assert (sample.key, sample.payload["ids"][:-1]) == ("b", begun)
    assert sample.payload["versions"][-1] == (0, 1)
    assert Tokens(ids=sample.payload["ids"], versions=sample.payload["versions"]).are_right(2, parts=PARTS)
    assert sample.version == PolicyVersion(0, 0), "of the oldest of its tokens"


async def test_weights_that_come_while_it_works_are_in_the_next_token(site):
    site.prompts.give("a", {"n": 1}, version=V1)
    await until(lambda: so_far(site, "a") > 3, "tokens")
    site.stage.weights.show(V2, {"w": weights_of(V2)})
    await until(lambda: site.role.engine.so_far("0/a").versions[-1] == (0, 2), "a token of the new version")
    made = site.role.engine.so_far("0/a")
    assert made.versions[0] == (0, 1)
    assert made.are_right(1)
