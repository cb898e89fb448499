"""A tiny target and drafter in folders, as users have theirs, and a way to call the command line in this process."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from functools import cache
from typing import Any

import pytest
import typer.testing
from typer.main import get_command
from typer.testing import CliRunner, Result

import tiny
from byte_tokenizer import byte_tokenizer
from foretoken.cli.app import app
from foretoken.engine import calibration
from foretoken.models import LanguageModel, load
from foretoken.models.hf import HFModel

END = 258


@dataclass(frozen=True)
class Models:
    target: str
    drafter: str
    untemplated: str
    """The target with a tokenizer that has no chat template."""
    native: str
    """A model that OpenVINO runs: slow to compile, so the others are none."""
    foreign: str
    """A model with another vocabulary."""


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("models")
    fields = {"eos_token_id": END, "n_positions": 512}
    target = tiny.tiny_gpt2(vocab_size=259, seed=1, **fields)
    for name, model, chat in (
        ("target", target, True),
        ("drafter", tiny.tiny_gpt2(vocab_size=259, seed=1, n_layer=1, **fields), True),
        ("untemplated", target, False),
        ("native", tiny.tiny_llama(vocab_size=259, seed=1, max_position_embeddings=4096), True),
    ):
        model.save_pretrained(folder / name)
        byte_tokenizer(chat).save_pretrained(folder / name)
    tiny.tiny_llama(vocab_size=260).save_pretrained(folder / "foreign")
    foreign = byte_tokenizer()
    foreign.add_tokens(["foreign"])
    foreign.save_pretrained(folder / "foreign")
    return Models(*(str(folder / name) for name in ("target", "drafter", "untemplated", "native", "foreign")))


@pytest.fixture(scope="session", autouse=True)
def commands_made_once() -> Iterator[None]:
    """Typer's runner makes all commands anew for every call, which takes longer than most of the calls."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.testing, "_get_command", cache(get_command))
        yield


@pytest.fixture(scope="session")
def load_copies(models: Models) -> Callable[..., LanguageModel]:
    """`foretoken.load`, which reads each of the models above once: every call gets a copy of its own."""
    read: dict[str, LanguageModel] = {}

    def copied(model: Any, **options: Any) -> LanguageModel:
        key = f"{model} {sorted(options.items())}"
        if key in read:
            return copy.deepcopy(read[key])
        loaded = load(model, **options)
        if model in astuple(models) and isinstance(loaded, HFModel):  # what is compiled can't be copied
            read[key] = copy.deepcopy(loaded)
        return loaded

    return copied


Call = Callable[..., Result]


@pytest.fixture
def call(models: Models, load_copies: Callable[..., LanguageModel], monkeypatch: pytest.MonkeyPatch) -> Call:
    """Call a command with the tiny pair: ``call("generate", "hello", "--json")``."""
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # the command line puts in its own
    monkeypatch.setattr(calibration, "SECONDS", 0.0)  # one sweep: every call calibrates anew
    monkeypatch.setattr(calibration, "_REPEATS", 1)
    for place in ("foretoken.models.load", "foretoken.drafters.factory.load"):
        monkeypatch.setattr(place, load_copies)
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)

    def run(command: str, *arguments: object, stdin: str | bytes | None = None, **environment: str) -> Result:
        given = [command, *map(str, arguments)]
        if command in ("generate", "chat"):
            for option, value in (("--target", models.target), ("--drafter", models.drafter)):
                if option not in given:
                    given += [option, value]
        return CliRunner().invoke(app, given, input=stdin, env=environment)

    return run
