"""llama.cpp's C library: finding one that is installed, and calling it."""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import importlib.util
import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import c_bool, c_char_p, c_int32, c_size_t, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

from foretoken.errors import ModelError, install_extra
from foretoken.models.gguf import layouts
from foretoken.models.threads import library_loaded

INSTALL = install_extra("gguf")

VARIABLE = "FORETOKEN_LLAMA_CPP"
"""The environment variable that names a shared library of llama.cpp, or a folder with one, to take instead."""

_NAMES = ("libllama.so", "libllama.dylib", "llama.dll")
_PACKAGES = {"llama-cpp-python": "llama_cpp", "xllamacpp": "xllamacpp"}
"""Packages that bring the library, and what is imported of them."""
_VOCAB = {
    "llama_vocab_n_tokens": (c_int32, (c_void_p,)),
    "llama_vocab_type": (c_int32, (c_void_p,)),
    "llama_vocab_get_text": (c_char_p, (c_void_p, c_int32)),
    "llama_vocab_get_attr": (c_int32, (c_void_p, c_int32)),
    "llama_vocab_is_eog": (c_bool, (c_void_p, c_int32)),
    "llama_vocab_is_control": (c_bool, (c_void_p, c_int32)),
    **{f"llama_vocab_{name}": (c_int32, (c_void_p,)) for name in ("bos", "eos", "eot", "sep", "nl", "pad", "mask")},
    "llama_vocab_get_add_bos": (c_bool, (c_void_p,)),
    "llama_vocab_get_add_eos": (c_bool, (c_void_p,)),
    "llama_tokenize": (c_int32, (c_void_p, c_char_p, c_int32, c_void_p, c_int32, c_bool, c_bool)),
    "llama_detokenize": (c_int32, (c_void_p, c_void_p, c_int32, c_void_p, c_int32, c_bool, c_bool)),
    "llama_token_to_piece": (c_int32, (c_void_p, c_int32, c_void_p, c_int32, c_int32, c_bool)),
}
_MODEL = {
    "llama_model_free": (None, (c_void_p,)),
    "llama_model_get_vocab": (c_void_p, (c_void_p,)),
    "llama_model_meta_val_str": (c_int32, (c_void_p, c_char_p, c_void_p, c_size_t)),
    "llama_model_chat_template": (c_char_p, (c_void_p, c_char_p)),
    "llama_model_desc": (c_int32, (c_void_p, c_void_p, c_size_t)),
    "llama_model_size": (c_uint64, (c_void_p,)),
    "llama_model_n_params": (c_uint64, (c_void_p,)),
    "llama_model_ftype": (c_int32, (c_void_p,)),
    "llama_ftype_name": (c_char_p, (c_int32,)),
    **{
        f"llama_model_{name}": (c_int32, (c_void_p,))
        for name in ("n_ctx_train", "n_layer", "n_embd", "n_head", "n_head_kv", "n_swa", "rope_type")
    },
    **{
        f"llama_model_{name}": (c_bool, (c_void_p,))
        for name in ("has_encoder", "has_decoder", "is_recurrent", "is_hybrid", "is_diffusion")
    },
}
_CONTEXT = {
    "llama_free": (None, (c_void_p,)),
    **{f"llama_{name}": (c_uint32, (c_void_p,)) for name in ("n_ctx", "n_batch", "n_ubatch", "n_seq_max")},
    "llama_n_threads": (c_int32, (c_void_p,)),
    "llama_n_threads_batch": (c_int32, (c_void_p,)),
    "llama_decode": (c_int32, (c_void_p, layouts.Batch)),
    "llama_get_logits": (c_void_p, (c_void_p,)),
    "llama_synchronize": (None, (c_void_p,)),
    "llama_get_memory": (c_void_p, (c_void_p,)),
    "llama_memory_clear": (None, (c_void_p, c_bool)),
    "llama_memory_seq_rm": (c_bool, (c_void_p, c_int32, c_int32, c_int32)),
    "llama_memory_seq_cp": (None, (c_void_p, c_int32, c_int32, c_int32, c_int32)),
    "llama_memory_seq_pos_max": (c_int32, (c_void_p, c_int32)),
    "llama_memory_seq_pos_min": (c_int32, (c_void_p, c_int32)),
    "llama_state_seq_get_size": (c_size_t, (c_void_p, c_int32)),
    "llama_state_seq_get_data": (c_size_t, (c_void_p, c_void_p, c_size_t, c_int32)),
    "llama_state_seq_set_data": (c_size_t, (c_void_p, c_void_p, c_size_t, c_int32)),
}
_WHOLE = {
    "llama_backend_init": (None, ()),
    "llama_supports_gpu_offload": (c_bool, ()),
    "llama_log_set": (None, (c_void_p, c_void_p)),
    "llama_print_system_info": (c_char_p, ()),
}
_LOG = ctypes.CFUNCTYPE(None, c_int32, c_char_p, c_void_p)
_LISTENERS: list[Any] = []
"""Callbacks that libraries have pointers to, for as long as the process lives."""
_WARNING = 3
"""ggml's log levels: 1 debug, 2 information, 3 warning, 4 error, 5 the last message goes on."""


@dataclass(frozen=True)
class Home:
    """Where a library was found.

    Attributes:
        package: the Python package that brings it; None where `VARIABLE` names it.
        version: of the package.
        file: the shared object.
    """

    package: str | None
    version: str
    file: str

    def __str__(self) -> str:
        return f"{self.package or self.file} {self.version}".strip()


class Library:
    """llama.cpp, with the layouts of its structures checked.

    Args:
        home: where it is.

    Attributes:
        home: where it is.
        version: llama.cpp's own, such as ``"0.6.0"``; empty where it does not say.
        said: the last lines of its log that are warnings or errors.

    Raises:
        ModelError: functions are missing, or structures are laid out in a way that is not known.
    """

    def __init__(self, home: Home) -> None:
        self.home = home
        self._calls = ctypes.CDLL(home.file)
        library_loaded()
        self._lock = Lock()
        self.said: deque[str] = deque(maxlen=50)
        for name, (result, arguments) in {**_VOCAB, **_MODEL, **_CONTEXT, **_WHOLE}.items():
            self._declare(name, result, arguments)
        self.version = self._version()
        self._model_params = self._layout("model", layouts.MODEL_LAYOUTS, layouts.model_mismatch)
        self._context_params = self._layout("context", layouts.CONTEXT_LAYOUTS, layouts.context_mismatch)
        self._declare("llama_model_load_from_file", c_void_p, (c_char_p, self._model_params))
        self._declare("llama_model_load_from_splits", c_void_p, (c_void_p, c_size_t, self._model_params))
        self._declare("llama_init_from_model", c_void_p, (c_void_p, self._context_params))
        listener = _LOG(self._listen)
        _LISTENERS.append(listener)
        self.llama_log_set(ctypes.cast(listener, c_void_p), None)
        self._load_back_ends()
        self.llama_backend_init()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if not name.startswith(("llama_", "ggml_")):
            raise AttributeError(name)
        function: Callable[..., Any] = getattr(self._calls, name)
        setattr(self, name, function)  # from now on found without this method, which counts in passes of a millisecond
        return function

    def _declare(self, name: str, result: Any, arguments: tuple[Any, ...]) -> None:
        try:
            function = getattr(self._calls, name)
        except AttributeError:
            raise ModelError(
                f"{self.home} has a llama.cpp without {name}, which GGUF files need: install another version of it "
                f"({INSTALL})"
            ) from None
        function.restype, function.argtypes = result, arguments

    def _load_back_ends(self) -> None:
        """Load those that are files of their own beside the library, as in llama.cpp's own releases."""
        known = {"ggml_backend_reg_count": (c_size_t, ()), "ggml_backend_load_all_from_path": (None, (c_char_p,))}
        for name, (result, arguments) in known.items():
            self._declare(name, result, arguments)
        if self.ggml_backend_reg_count() == 0:
            self.ggml_backend_load_all_from_path(str(Path(self.home.file).parent).encode())
        if self.ggml_backend_reg_count() == 0:
            raise ModelError(f"{self.home} has no back ends, not beside it either: build it with those of ggml")

    def _version(self) -> str:
        if not hasattr(self._calls, "llama_version"):
            return ""
        self._calls.llama_version.restype = c_char_p
        return (self._calls.llama_version() or b"").decode()

    def _layout(self, kind: str, known: dict[str, type[Any]], mismatch: Callable[[Any], str | None]) -> type[Any]:
        """The layout that the library's default parameters fit."""
        function = getattr(self._calls, f"llama_{kind}_default_params", None)
        if function is None:
            raise ModelError(f"{self.home} has no llama_{kind}_default_params: {INSTALL}")
        reasons = []
        for version, layout in reversed(known.items()):
            function.restype, function.argtypes = layout, ()
            reason = mismatch(function())
            if reason is None:
                return layout
            reasons.append(f"{version}: {reason}")
        raise ModelError(
            f"{self.home} (llama.cpp {self.version or 'of unknown version'}) lays its {kind} parameters out in a way "
            f"that is not known here ({'; '.join(reasons)}): {INSTALL} for a version that is"
        )

    def model_params(self) -> Any:
        """Default parameters of a model, to be changed and passed on."""
        return self._calls.llama_model_default_params()

    def context_params(self) -> Any:
        """Default parameters of a context, to be changed and passed on."""
        return self._calls.llama_context_default_params()

    def _listen(self, level: int, text: bytes, _: Any) -> None:
        if level >= _WARNING:
            self.said.append(text.decode("utf-8", "replace").strip())

    @contextmanager
    def listening(self) -> Iterator[deque[str]]:
        """Collects what the library warns of meanwhile."""
        with self._lock:
            self.said.clear()
            yield self.said


def find_homes() -> list[Home]:
    """Installed packages that bring the library, the preferred one first.

    `llama-cpp-python` is built on the machine that it is installed on, or for its GPU, so it comes first.
    """
    homes = []
    for package, module in _PACKAGES.items():
        spec = importlib.util.find_spec(module)
        if spec is None or not spec.submodule_search_locations:
            continue
        folder = Path(next(iter(spec.submodule_search_locations)))
        for pattern in ("lib/libllama.*", "lib/llama.dll", "xllamacpp*.so", "xllamacpp*.pyd"):
            file = next(iter(sorted(folder.glob(pattern))), None)
            if file is not None:
                homes.append(Home(package, importlib.metadata.version(package), str(file)))
                break
    return homes


def _named(path: Path) -> Home:
    """The library that `VARIABLE` names.

    Raises:
        ModelError: there is none.
    """
    files = [path / name for name in _NAMES] if path.is_dir() else [path]
    found = next((file for file in files if file.is_file()), None)
    if found is None:
        raise ModelError(f"{VARIABLE} is {str(path)!r}, which is neither a file nor a folder with {', '.join(_NAMES)}")
    return Home(None, "", str(found.resolve()))


@cache
def library() -> Library:
    """The library that `VARIABLE` names, else the installed one.

    Raises:
        ModelError: none is installed, or none that is known here.
    """
    named = os.environ.get(VARIABLE)
    if named:
        home = _named(Path(named).expanduser())
        try:
            return Library(home)
        except OSError as error:
            raise ModelError(f"{VARIABLE} names {home.file}, which can't be loaded: {error}") from error
    reasons = []
    for home in find_homes():
        try:
            if home.package is not None:  # its own loader knows which other libraries it needs
                importlib.import_module(_PACKAGES[home.package])
            return Library(home)
        except ModelError as error:
            reasons.append(str(error))
        except (ImportError, OSError) as error:
            reasons.append(
                f"{home} can't be loaded ({error}): if that names a library of the system, install it (libgomp.so.1 is "
                "in the package libgomp1 of Debian and Ubuntu)"
            )
    if reasons:
        raise ModelError("; ".join(reasons))
    raise ModelError(f"GGUF files run on llama.cpp, which is not installed: {INSTALL}")
