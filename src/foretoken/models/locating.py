"""Where a model is loaded from: checks of a path or hub id that import neither torch nor transformers."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

from foretoken.errors import ModelError

CONFIG = "config.json"
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_WEIGHTS = ("model*.safetensors", "model*.safetensors.index.json", "pytorch_model*.bin*")
_FOREIGN = {
    "openvino_*model.xml": "an OpenVINO export",
    "*.onnx": "an ONNX export",
    "onnx/*.onnx": "an ONNX export",
    "tf_model.h5": "TensorFlow weights",
    "flax_model.msgpack": "Flax weights",
    "consolidated*.pth": "weights in the layout of their original repository",
    "*.gguf": "a GGUF file",
}
"""Files of formats that transformers' loading does not read, by pattern."""


def locate(model: str | Path) -> str:
    """The folder or hub id to load a model from.

    The hub is not asked.

    Raises:
        ModelError: there is no such folder, or it holds no checkpoint that can be loaded.
    """
    text = str(model)
    if not text.strip():
        raise ModelError(f"the model's name is {text!r}: give a path, a hub id or a transformers model")
    try:
        path = Path(model).expanduser()
        is_folder, exists = path.is_dir(), path.exists()
    except (OSError, RuntimeError, ValueError) as error:  # too long; no such user's home; a null character
        shown = text if len(text) <= 100 else f"{text[:100]}…"
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ModelError(f"there is no folder {shown!r} ({reason}): check the path") from error
    if is_folder:
        _check_folder(text, path)
        return str(path)
    if exists:
        raise ModelError(f"{text} is a file: give the folder that holds config.json and the weights")
    looks_like_path = isinstance(model, Path) or text.startswith((".", "/", "~")) or not _HUB_ID.fullmatch(text)
    if looks_like_path:
        raise ModelError(f"there is no folder {text!r}: check the path, or give a hub id (organisation/model)")
    return text


def hub_resolves() -> bool:
    """Whether the hub's host name resolves; True where a proxy does that."""
    if getproxies():
        return True
    from huggingface_hub import constants  # no attribute of the package until it was imported

    try:
        socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname, None)
    except OSError:
        return False
    return True


def _check_folder(name: str, path: Path) -> None:
    if not has_weights(path):
        if (path / "adapter_config.json").is_file():
            raise ModelError(
                f"{name} holds an adapter and no model: load its base model, or merge the adapter into it (in peft: "
                "merge_and_unload, then save_pretrained) and give the folder of the result"
            )
        for pattern, kind in _FOREIGN.items():
            if any(path.glob(pattern)):
                raise ModelError(
                    f"{name} holds {kind} and no safetensors weights, which foretoken loads: give the folder of the "
                    "checkpoint that it was made from"
                )
    if not (path / CONFIG).is_file():
        raise ModelError(f"{name} has no config.json: give the folder that `save_pretrained` wrote")


def has_weights(folder: Path) -> bool:
    """Whether a folder has weights that transformers loads, an adapter's aside."""
    return any(any(folder.glob(pattern)) for pattern in _WEIGHTS)


def read_json(path: Path) -> dict[str, object] | None:
    """The object in a JSON file; None where there is none, or the file can't be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
