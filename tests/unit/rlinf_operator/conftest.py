"""What many tests of the operator's clients ask: an API server on loopback."""

import pytest

from tests.fakes.api_server import FakeApiServer


@pytest.fixture
async def server():
    async with FakeApiServer() as made:
        yield made
