"""The model pair that comes with the package."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any, Literal

from foretoken.errors import ModelError
from foretoken.models.base import LanguageModel

Part = Literal["target", "drafter"]


def tiny_pair_path() -> Path:
    """The folder with the shipped models, in ``target`` and ``drafter``.

    Raises:
        ModelError: this installation has no models.
    """
    folder = Path(str(resources.files("foretoken"))) / "assets" / "tiny_pair"
    for name in ("target", "drafter"):
        if not (folder / name / "config.json").is_file():
            raise ModelError(
                f"the shipped {name} is missing from {folder / name}: reinstall foretoken, train the pair with "
                "recipes/tiny_pair, or name models of your own"
            )
    return folder


def tiny_pair(dtype: Any = "float32", **load_options: Any) -> tuple[LanguageModel, LanguageModel]:
    """The shipped target and drafter, loaded: ``Engine(*foretoken.tiny_pair())``.

    Args:
        dtype: of the weights in memory, as `foretoken.load` takes it. They were stored in bfloat16, which processors
            that multiply it run up to twice as fast. Greedy outputs with speculation and without are equal token by
            token in either type where the target rounds alike (`LanguageModel.rounds_alike`). Elsewhere float32 makes
            ties that rounding would decide rarer.
        load_options: further options of `foretoken.load`.

    Raises:
        ModelError: this installation has no models.
    """
    return load_part("target", dtype, **load_options), load_part("drafter", dtype, **load_options)


def is_shipped(model: Any) -> bool:
    """Whether a model is the shipped target, as `load_part` loads it."""
    return isinstance(model, LanguageModel) and model.name == _name("target")


def _name(part: Part) -> str:
    return f"tiny_pair/{part}"


def head_path() -> Path:
    """The folder of the EAGLE-3 head that was trained for the shipped target: the drafter ``"eagle3"`` there."""
    return tiny_pair_path() / "eagle3"


def load_part(part: Part, dtype: Any = "float32", **load_options: Any) -> LanguageModel:
    """One of the two; see `tiny_pair`."""
    from foretoken.models import load

    return load(tiny_pair_path() / part, **{"dtype": dtype, "name": _name(part), **load_options})
