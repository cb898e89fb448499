import pytest

from foretoken.audit import make_worlds
from peers.fakes import make_fake


@pytest.fixture(scope="session")
def worlds(tmp_path_factory):
    """The usual three: a cousin, a twin with filters, a stranger."""
    return make_worlds(tmp_path_factory.mktemp("worlds"))


@pytest.fixture(scope="session")
def world(worlds):
    """A cousin at temperature 1."""
    return worlds[0]


@pytest.fixture(scope="session")
def fake(tmp_path_factory):
    """The fake engine's program."""
    return make_fake(tmp_path_factory.mktemp("fake"))
