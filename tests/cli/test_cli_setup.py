"""How options have models loaded; above all the types of the shipped pair's weights."""

from __future__ import annotations

import pytest

from foretoken.cli.options import LoadOptions, ModelOptions
from foretoken.cli.setup import drafter_options, load_options, settled
from foretoken.engine.profile import Profile
from foretoken.models import processor
from foretoken.models.native import loader
from foretoken.models.tiny_pair import head_path


@pytest.fixture
def bfloat16(monkeypatch):
    """A processor that multiplies bfloat16, without tiles, and OpenVINO installed."""
    monkeypatch.setattr(processor, "multiplies_tiles", lambda: False)
    monkeypatch.setattr(loader, "multiplies_bfloat16", lambda: True)
    monkeypatch.setattr(loader.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(loader, "version", lambda name: f"{loader.OPENVINO}.1")


@pytest.mark.usefixtures("bfloat16")
@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        ({}, "bfloat16"),
        ({"runner": "auto"}, "bfloat16"),
        ({"runner": "native"}, "bfloat16"),
        ({"quantize_drafter": "int8"}, "bfloat16"),
        ({"dtype": "float32"}, "float32"),
        ({"dtype": "auto"}, "auto"),
        # None of these rounds alike in bfloat16.
        ({"eager": True}, None),
        ({"quantize": "int8"}, None),
        ({"runner": "hf"}, None),
        ({"drafter": "lookup,draft-model"}, "bfloat16"),
        ({"drafter": "eagle3"}, None),
        ({"drafter": "lookup, eagle3"}, None),
        ({"drafter": "medusa:some/folder"}, None),
        ({"drafter": str(head_path())}, None),
        # Who names a target gets the type that it is stored in.
        ({"target": "some/model"}, None),
        ({"target": "some/model", "dtype": "float16"}, "float16"),
    ],
    ids=str,
)
def test_the_shipped_pair_is_bfloat16_where_it_rounds_alike(given, dtype):
    options = ModelOptions(**{"device": "cpu", **given})
    assert load_options(options).get("dtype") == dtype
    assert drafter_options(options).get("dtype") == dtype


@pytest.mark.usefixtures("bfloat16")
@pytest.mark.parametrize(
    ("module", "name", "value"),
    [
        (loader, "multiplies_bfloat16", lambda: False),
        (loader, "version", lambda name: "2020.1"),
        (processor, "multiplies_tiles", lambda: True),
    ],
)
def test_it_is_float32_where_bfloat16_is_not_known_to_round_alike(module, name, value, monkeypatch):
    monkeypatch.setattr(module, name, value)
    assert "dtype" not in load_options(LoadOptions(device="cpu"))  # then `load_part` takes float32


@pytest.mark.usefixtures("bfloat16")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_profile_names_the_type(dtype, tmp_path):
    """What `foretoken tune` has measured in one type is run in it."""
    given = {} if dtype == "bfloat16" else {"dtype": dtype}
    load = load_options(LoadOptions(device="cpu", **given))
    file = tmp_path / "profile.json"
    Profile(
        target=None,
        fingerprint={},
        drafter="lookup",
        verifier="auto",
        num_speculative_tokens="auto",
        tree=None,
        acceptance=None,
        load=load,
        load_drafter=load,
        machine={},
    ).save(file)
    assert load_options(settled(ModelOptions(profile=file))) == {"device": "cpu", "dtype": dtype}
    assert load_options(settled(ModelOptions(profile=file, dtype="auto"))) == {"device": "cpu", "dtype": "auto"}
