"""Workers in one process that pass weights on."""

import asyncio

import pytest

from tests.fakes.weights_net import WeightsNet


@pytest.fixture
async def net():
    made = WeightsNet()
    async with asyncio.timeout(25):
        yield made
        errors = [error for node in made.nodes.values() for error in node.errors]
        await made.close()
    assert errors == []
