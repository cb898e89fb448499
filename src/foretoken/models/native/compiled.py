"""What lies between two layers' attentions, compiled ahead of time for the CPU and kept on disk.

A pass over a few tokens of a small model is some forty operations a layer of a few microseconds each, most of them
norms, rotations and gates. Here these become one call: torch exports `finish` and the next layer's `begin` as one
function, its compiler makes machine code of it, and the products with weights, which are as fast as they get, are
called back. All layers share that code, so it is small, is made in seconds, and serves any number of layers.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import threading
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foretoken.cache_folder import cache_folder
from foretoken.errors import install_extra
from foretoken.models.native import decoder, linear
from foretoken.models.native.decoder import Layer, begin, finish
from foretoken.models.native.linear import Linear
from foretoken.models.native.spec import Spec
from foretoken.models.processor import features

MOST_ROWS = 64
"""With more tokens a pass is arithmetic, and calls are cheap beside it."""

_LINEAR = ("output", "gate_up", "down", "qkv")

_library = torch.library.Library("foretoken", "DEF")
_library.define("multiply(Tensor x, int which, int features) -> Tensor")
_now = threading.local()  # its `layers` are those that `multiply` stands for in this thread's call


def _multiply(x: Tensor, which: int, features: int) -> Tensor:
    layer: Linear = _now.layers[which]
    return layer(x)


_library.impl("multiply", _multiply, "CPU")
_library.impl("multiply", lambda x, which, features: x.new_empty((*x.shape[:-1], features)), "Meta")


class Code:
    """A function that was compiled.

    Args:
        path: of the package that holds it.
    """

    def __init__(self, path: Path) -> None:
        self._run: Callable[[list[Tensor]], list[Tensor]] = torch._inductor.aoti_load_package(str(path)).loader.run
        # The code itself admits one thread at a time, and would have the second one wait with Python's own lock in its
        # hand, which the first one needs for its products.
        self._lock = threading.Lock()

    def __call__(self, given: list[Tensor], layers: tuple[Linear, ...]) -> list[Tensor]:
        """Run it.

        Args:
            given: what it is a function of.
            layers: what is called back, in the order of `_LINEAR`.
        """
        with self._lock:
            _now.layers = layers
            try:
                return self._run(given)
            finally:
                _now.layers = ()  # what is left here would keep a model's weights in memory


class Compiled:
    """A `Between` of compiled code.

    Args:
        one: the code for a single token.
        several: the code for 2 to `MOST_ROWS` of them.
    """

    def __init__(self, one: Code, several: Code) -> None:
        self._one, self._several = one, several

    def takes(self, rows: int) -> bool:
        """See `Between`."""
        return rows <= MOST_ROWS

    def __call__(
        self, x: Tensor, attended: Tensor, cosines: Tensor, sines: Tensor, layer: Layer, following: Layer
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """See `Between`."""
        given = [x, attended, cosines, sines, layer.mlp_norm, following.attention_norm]
        if following.query_norm is not None and following.key_norm is not None:
            given += [following.query_norm, following.key_norm]
        run = self._one if len(x) == 1 else self._several
        stream, query, key, value = run(given, (layer.output, layer.gate_up, layer.down, following.qkv))
        return stream, query, key, value


def compiled(spec: Spec, dtype: torch.dtype) -> Compiled | None:
    """Compiled code for a model, made if this machine has none; None where none can be kept or made.

    Args:
        spec: of the model.
        dtype: of the hidden states between layers.
    """
    shape = (
        spec.hidden_size,
        spec.intermediate_size,
        spec.heads,
        spec.groups,
        spec.head_dim,
        spec.rotary_dim,
        spec.norm_epsilon,
        spec.head_norms,
        str(dtype),
    )
    sources = [Path(str(module.__file__)).read_bytes() for module in (decoder, linear)]
    described = json.dumps([shape, torch.__version__, features()]).encode()
    name = hashlib.sha256(b"".join([described, Path(__file__).read_bytes(), *sources])).hexdigest()[:24]
    paths = [cache_folder("compiled") / f"{name}-{rows}.pt2" for rows in ("one", "several")]
    found = _loaded(paths)
    if found is not None or not _can_keep(paths[0].parent):
        return found
    warnings.warn(
        "torch compiles the model's layers for this processor: it takes half a minute, once for each shape of layers; "
        "eager=True (--eager) does without",
        stacklevel=2,
    )
    try:
        for path, rows in zip(paths, (1, 4), strict=True):
            _make(spec, dtype, rows, path)
        return Compiled(*map(_load, paths))
    except Exception as error:  # torch's exporter, its compiler and the system's raise errors of many kinds
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        warnings.warn(
            f"torch can't compile the model's layers here ({reason}), and runs them operation by operation: install "
            f"a C++ compiler, or OpenVINO, which is faster ({install_extra('cpu')}); or use eager=True (--eager)",
            stacklevel=2,
        )
        return None


def _can_keep(folder: Path) -> bool:
    """Whether compiled code can be kept on disk: otherwise every process would compile it anew."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


def _loaded(paths: list[Path]) -> Compiled | None:
    """Code that was kept; None where there is none, or what there is can't be read."""
    if not all(path.is_file() for path in paths):
        return None
    try:
        return Compiled(*map(_load, paths))
    except Exception:  # a broken file: torch raises errors of many kinds
        return None


@cache
def _load(path: Path) -> Code:
    """Code from a file, once in a process."""
    return Code(path)


def _make(spec: Spec, dtype: torch.dtype, rows: int, path: Path) -> None:
    """Compile for one token, or for several, and keep the code."""
    given = [
        torch.zeros(rows, spec.hidden_size, dtype=dtype),
        torch.zeros(rows, spec.heads * spec.head_dim, dtype=dtype),
        *torch.zeros(2, rows, 1, spec.rotary_dim, dtype=dtype),
        *torch.zeros(2, spec.hidden_size, dtype=dtype),
    ]
    dynamic: list[Any] = [{0: torch.export.Dim("T", min=2, max=MOST_ROWS)} if rows > 1 else None] * 4 + [None] * 2
    if spec.head_norms:
        given += [*torch.zeros(2, spec.head_dim, dtype=dtype)]
        dynamic += [None] * 2
    with torch.no_grad(), warnings.catch_warnings(), tempfile.TemporaryDirectory(dir=path.parent) as folder:
        warnings.simplefilter("ignore")
        program = torch.export.export(_Function(spec), (given,), dynamic_shapes=(dynamic,))
        made = torch._inductor.aoti_compile_and_package(
            program,
            package_path=str(Path(folder) / "code.pt2"),
            # So few numbers are sooner added by one thread than given to two.
            inductor_configs={"cpp.threads": 1},
        )
        os.replace(made, path)


class _Function(torch.nn.Module):
    """What is compiled: weights of linear layers aside, all that it works on is given to it.

    Args:
        spec: of the model.
    """

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec = spec

    def forward(self, given: list[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What `Compiled` calls."""
        x, attended, cosines, sines, mlp_norm, attention_norm, *head_norms = given
        query_norm, key_norm = head_norms or (None, None)
        spec = self.spec
        sizes = {
            "output": spec.hidden_size,
            "gate_up": 2 * spec.intermediate_size,
            "down": spec.hidden_size,
            "qkv": (spec.heads + 2 * spec.groups) * spec.head_dim,
        }
        layers = {name: _called_back(number, sizes[name]) for number, name in enumerate(_LINEAR)}
        # One layer stands for both: what `finish` reads is the first one's, what `begin` reads the second one's.
        layer = Layer(
            attention_norm=attention_norm,
            query_norm=query_norm,
            key_norm=key_norm,
            mlp_norm=mlp_norm,
            window=None,
            **layers,
        )
        x = finish(x, attended, layer, spec)
        return x, *begin(x, cosines, sines, layer, spec)


def _called_back(number: int, size: int) -> Linear:
    """The linear layer of that number in `_LINEAR`."""

    def call(x: Tensor) -> Tensor:
        result: Tensor = torch.ops.foretoken.multiply(x, number, size)
        return result

    return call
