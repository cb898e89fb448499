import pytest

from foretoken.audit import make_worlds


@pytest.fixture(scope="session")
def worlds(tmp_path_factory):
    """The usual three: a cousin, a twin with filters, a stranger."""
    return make_worlds(tmp_path_factory.mktemp("worlds"))


@pytest.fixture(scope="session")
def world(worlds):
    """A cousin at temperature 1."""
    return worlds[0]
