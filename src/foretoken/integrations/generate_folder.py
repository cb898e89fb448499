"""Speculation as a folder for transformers: ``model.generate(…, custom_generate="PATH", trust_remote_code=True)``.

Such a folder, on disk or on the Hub, holds ``custom_generate/generate.py`` with a function ``generate``, which gets all
arguments of ``generate`` itself. Ours imports this module, so that the folder need not change when Foretoken does.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
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
    generation_config: Any = None,
    *further: Any,
    model: Any,
    custom_generate: Any = None,
    **arguments: Any,
) -> Any:
    """What transformers calls for a folder of `write_folder`. The model keeps engines, one for each set of options.

    Args:
        inputs, generation_config, further: the first arguments of ``generate``, in its order.
        model: the model.
        custom_generate: another function or folder, which is called instead.
        arguments: all others of ``generate``, as for it, ``assistant_model``, ``streamer``, ``stop_strings`` and
            ``tokenizer`` among them; and ``drafter``, ``verifier`` and ``num_speculative_tokens`` as for `Engine`,
            ``seed`` as for `foretoken.custom_generate`, and ``engine_options``, further options of `Engine`.

    Raises:
        ParameterError: see `foretoken.custom_generate`; also both a drafter and an assistant model.
    """
    # The class's own: a model from a folder with custom_generate has this function in its place.
    own = partial(type(model).generate, model, inputs, generation_config, *further)
    if custom_generate is not None:
        return own(custom_generate=custom_generate, **arguments)
    return own(**_speculating(model, generation_config, **arguments))


def _speculating(
    model: Any,
    generation_config: Any,
    *,
    drafter: Any = None,
    verifier: str | AnyVerifier = "auto",
    num_speculative_tokens: int | Literal["auto"] = "auto",
    seed: int | None = None,
    engine_options: Mapping[str, Any] | None = None,
    assistant_model: Any = None,
    streamer: Any = None,
    tokenizer: Any = None,
    **arguments: Any,
) -> dict[str, Any]:
    """The arguments of transformers' ``generate`` with which it speculates; None stays, since it disables options."""
    if drafter is not None and assistant_model is not None:
        raise ParameterError("drafter and assistant_model: give one of them, both are what drafts")
    drafter = drafter if drafter is not None else AUTO if assistant_model is None else assistant_model
    options = dict(engine_options or {})
    refuse_engine_options(options)
    configs = [config for config in (generation_config, model.generation_config) if config is not None]
    configured = next((config.stop_strings for config in configs if config.stop_strings is not None), None)
    stop_strings = arguments.pop("stop_strings", configured)
    if configured is not None:
        arguments["stop_strings"] = None  # served here: transformers drops the tokenizer that they need
    arguments["custom_generate"] = generate_with(
        kept_engines(model).owner((drafter, verifier, num_speculative_tokens, options)),
        lambda one: Engine(one, drafter, verifier, num_speculative_tokens, **options),
        seed=seed,
        streamer=streamer,
        stop_strings=stop_strings,
        tokenizer=tokenizer,
    )
    return arguments
