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


@pytest.fixture(autouse=True)
def batches_by_number(monkeypatch):
    """Batches grow by number alone, not by how busy the machine is."""
    monkeypatch.setattr("foretoken.audit.run.SECONDS_PER_BATCH", 60.0)
    monkeypatch.setattr("foretoken.audit.indirect.SECONDS_PER_BATCH", 60.0)
    monkeypatch.setattr("foretoken.audit.session.PIECE_SECONDS", 1e6)


@pytest.fixture
def without_picture(monkeypatch):
    """A FAIL is told at once: what is drawn after it only shows more clearly where the deviation sits."""
    monkeypatch.setattr("foretoken.audit.run.PICTURE_SAMPLES", 0)
