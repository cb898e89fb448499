"""Loading tokenizers."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from foretoken.errors import ModelError, shown
from foretoken.models.locating import CONFIG, hub_resolves, read_json
from foretoken.models.quick_tokenizer import quick_tokenizer

_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "vocab.txt",
)
_GENERIC = ("PreTrainedTokenizerFast", "TokenizersBackend")
_GENERIC_FAMILIES = ("llama", "qwen2", "qwen3")
"""Model types for which `AutoTokenizer` makes of those names the one class that they both are in transformers 5."""


def check_tokenizer(tokenizer: Any) -> None:
    """Check that a tokenizer option is None, a tokenizer, or a path or hub id to load one from.

    Raises:
        ModelError: it is not.
    """
    if not (tokenizer is None or isinstance(tokenizer, str | Path) or callable(getattr(tokenizer, "get_vocab", None))):
        raise ModelError(
            f"tokenizer is {shown(tokenizer)}: give a transformers tokenizer, or the folder or hub id to load one from"
        )


def joins_bytes(tokenizer: Any) -> bool:
    """Whether tokens are decoded to their bytes, joined, whatever stands beside them, as byte-level BPE's are.

    Of other tokenizers the first token of a string may lose its space, or tokens that are bytes become characters only
    beside others.
    """
    own = getattr(tokenizer, "__dict__", {})
    if "decode" in own or "_decode" in own:
        return False
    if "joins_bytes" in own:  # not another one's, which it passes on
        return bool(own["joins_bytes"])
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    methods = (getattr(type(tokenizer), name, None) for name in ("decode", "_decode"))  # a class may have its own
    return type(decoder).__name__ == "ByteLevel" and all(
        getattr(method, "__module__", "").startswith("transformers.tokenization_utils") for method in methods
    )


def load_tokenizer(source: str | Path, **hub: Any) -> Any:
    """The tokenizer of a folder or hub id.

    Args:
        source: the folder or hub id.
        hub: options of `from_pretrained`.

    Raises:
        ModelError: there is none.
    """
    try:
        path = Path(source).expanduser()
        if not path.is_dir() and "local_files_only" not in hub and not hub_resolves():
            hub["local_files_only"] = True
        return _from_pretrained(path if path.is_dir() else str(source), hub)
    except Exception as error:
        raise ModelError(
            f"no tokenizer can be loaded from {shown(str(source))} ({first_line(error)}): give the folder or hub "
            "id of one"
        ) from error


def tokenizer_for(tokenizer: Any | None, source: str, hub: dict[str, Any]) -> Any | None:
    """A model's tokenizer: the one that was given or named, or the one next to the model.

    Args:
        tokenizer: a tokenizer, or where to load one from; None for the one next to the model.
        source: the model's folder or hub id.
        hub: options of `from_pretrained`.

    Returns:
        None where there is none next to the model; a warning says why, if its files can't be read.
    """
    if tokenizer is not None:
        return load_tokenizer(tokenizer, **hub) if isinstance(tokenizer, str | Path) else tokenizer
    folder = Path(source)
    if folder.is_dir() and not any((folder / file).exists() for file in _FILES):
        return None
    try:
        return _from_pretrained(folder if folder.is_dir() else source, hub)
    except Exception as error:
        # Token ids still work; but say what happened, since strings won't.
        warnings.warn(
            f"no tokenizer could be loaded from {source} ({first_line(error)}): prompts must be token ids, or "
            "name a tokenizer",
            stacklevel=4,
        )
        return None


def _from_pretrained(source: Path | str, hub: dict[str, Any]) -> Any:
    """`AutoTokenizer.from_pretrained`, without its imports where a folder's files name the class that it would find."""
    generic = isinstance(source, Path) and _is_generic(source)

    load_whole = partial(_load_whole, str(source), generic, hub)  # no closure: tokenizers go to other processes
    quick = quick_tokenizer(source, load_whole) if generic and isinstance(source, Path) else None
    return load_whole() if quick is None else quick


def _load_whole(source: str, generic: bool, hub: dict[str, Any]) -> Any:
    with quiet_transformers():
        import transformers

        kind = transformers.PreTrainedTokenizerFast if generic else transformers.AutoTokenizer
        return kind.from_pretrained(source, **hub)


def _is_generic(folder: Path) -> bool:
    config, tokenizer = (read_json(folder / name) or {} for name in (CONFIG, "tokenizer_config.json"))
    return (
        (folder / "tokenizer.json").is_file()
        and tokenizer.get("tokenizer_class") in _GENERIC
        and config.get("model_type") in _GENERIC_FAMILIES
        and not ("auto_map" in config or "auto_map" in tokenizer)
    )


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' progress bars and advice."""
    import transformers

    logging = transformers.utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def first_line(error: Exception) -> str:
    """The beginning of an error's message."""
    lines = (str(error).strip() or type(error).__name__).splitlines()
    first = lines[0] if len(lines) == 1 or not lines[0].endswith(":") else f"{lines[0]} {lines[1].strip()}"
    return first[:300]
