"""Two replicas in this process and a front before them, loaded once."""

import pytest
from local_fleet import World


@pytest.fixture(scope="session")
def loaded() -> World:
    return World()


@pytest.fixture
def world(loaded) -> World:
    """With nothing cached and a front of its own."""
    loaded.reset()
    return loaded
