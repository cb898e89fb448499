"""Speculation as a folder for transformers: ``model.generate(…, custom_generate="PATH", trust_remote_code=True)``.

Such a folder, on disk or on the Hub, holds ``custom_generate/generate.py`` with a function ``generate``, which gets all
arguments of ``generate`` itself. Ours imports this module, so that the folder need not change when Foretoken does.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from foretoken.engine.engine import Engine
from foretoken.errors import ParameterError
from foretoken.integrations.kept_engines import kept_engines
from foretoken.integrations.refusals import refuse_engine_options
from foretoken.integrations.transformers import generate_with
from foretoken.policy.request import AUTO
from foretoken.verify import AnyVerifier

_FILES = {
    "custom_generate/generate.py": '''"""Speculative decoding by Foretoken: the same distribution, sooner."""

from foretoken.integrations.generate_folder import generate

__all__ = ["generate"]
''',
    "custom_generate/requirements.txt": "foretoken\n",
}

_README = """---
library_name: transformers
tags:
- custom_generate
---

# Speculative decoding by Foretoken

`model.generate(**inputs, custom_generate="this folder or repository", trust_remote_code=True)` writes what the model
alone would write, by the same distribution, in fewer passes. Further arguments: `drafter`, `verifier`,
`num_speculative_tokens`, `seed`, `engine_options`.
"""


def write_folder(path: str | Path) -> Path:
    """Write a folder for ``custom_generate=``; may be a model's own folder, which then generates so by itself.

    Args:
        path: the folder; made if it is not there.

    Returns:
        The folder.

    Raises:
        ParameterError: it can't be written to, or has another ``custom_generate/generate.py``.
    """
    folder = Path(path)
    try:
        (folder / "custom_generate").mkdir(parents=True, exist_ok=True)
        for name, text in _FILES.items():
            file = folder / name
            if file.exists() and file.read_text(encoding="utf-8") != text:
                raise ParameterError(f"{file} is there already, with another content: name another folder")
            file.write_text(text, encoding="utf-8")
        if not (folder / "README.md").exists():
            (folder / "README.md").write_text(_README, encoding="utf-8")
    except OSError as error:
        raise ParameterError(f"{folder} can't be written ({error.strerror}): name another folder") from error
    return folder


def generate(
    inputs: Any = None,
    *,
    model: Any,
    drafter: Any = None,
    verifier: str | AnyVerifier = "auto",
    num_speculative_tokens: int | Literal["auto"] = "auto",
    seed: int | None = None,
    engine_options: Mapping[str, Any] | None = None,
    assistant_model: Any = None,
    streamer: Any = None,
    stop_strings: Any = None,
    tokenizer: Any = None,
    **arguments: Any,
) -> Any:
    """What transformers calls for a folder of `write_folder`. The model keeps its engines, one for each set of options.

    Args:
        inputs: as for ``generate``.
        model: the model.
        drafter: as for `Engine`; default: `assistant_model`, or else ``auto``.
        verifier, num_speculative_tokens: as for `Engine`.
        seed: as for `foretoken.custom_generate`.
        engine_options: further options of `Engine`.
        assistant_model: a draft model, as for ``generate``.
        streamer, stop_strings, tokenizer: as for ``generate``.
        arguments: all others of ``generate``.

    Raises:
        ParameterError: see `foretoken.custom_generate`; also both a drafter and an assistant model.
    """
    if drafter is not None and assistant_model is not None:
        raise ParameterError("drafter and assistant_model: give one of them, both are what drafts")
    drafter = drafter if drafter is not None else AUTO if assistant_model is None else assistant_model
    options = dict(engine_options or {})
    refuse_engine_options(options)
    # Engines keep what they were made with, so that an id stays that of the same object.
    settings = tuple(
        one if isinstance(one, str | int | float | bool | None) else id(one)
        for one in (drafter, verifier, num_speculative_tokens, *(x for item in sorted(options.items()) for x in item))
    )
    speculate = generate_with(
        kept_engines(model).owner(settings),
        lambda one: Engine(one, drafter, verifier, num_speculative_tokens, **options),
        seed=seed,
        streamer=streamer,
        stop_strings=stop_strings,
        tokenizer=tokenizer,
    )
    given = {name: value for name, value in arguments.items() if value is not None}
    # The class's own: a model from a folder with custom_generate has this function in its place.
    return type(model).generate(model, inputs, custom_generate=speculate, **given)
