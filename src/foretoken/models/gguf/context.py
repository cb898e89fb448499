"""A llama.cpp context: the KV cache of some sequences, and passes over batches of tokens."""

from __future__ import annotations

import ctypes
import weakref
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import Any

import numpy as np
import numpy.typing as npt

from foretoken.errors import ModelError, OutOfMemory
from foretoken.models.gguf.handle import Handle
from foretoken.models.gguf.layouts import Batch
from foretoken.models.gguf.options import TYPES

PAD = 256
"""llama.cpp rounds the number of cells up to a multiple of this."""
_NO_FLASH = 0
_NO_SLOT = 1  # what llama_decode returns where the cells are used up


@dataclass(frozen=True)
class ContextOptions:
    """How contexts are made.

    Attributes:
        threads: that compute.
        cache_type: of keys and values, as ggml numbers types.
        sequences: most sequences of a context.
        cells: tokens that a new context has room for at least; it grows by half where that is not enough.
        tokens: most tokens of a pass; more are split.
        outputs: most tokens of a pass whose logits are computed. Bounds the memory of logits.
    """

    threads: int
    cache_type: int
    sequences: int
    cells: int = 1024
    tokens: int = 512
    outputs: int = 128


@dataclass(slots=True)
class Tokens:
    """The tokens of a pass.

    Attributes:
        ids: the tokens.
        positions: their places in their sequences.
        sequences: of each token, the sequences that it belongs to.
        outputs: whether its logits are wanted.
    """

    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    sequences: list[list[int]] = field(default_factory=list)
    outputs: list[bool] = field(default_factory=list)

    def add(self, token: int, position: int, sequence: int, output: bool) -> int:
        """Append a token; its index."""
        self.ids.append(token)
        self.positions.append(position)
        self.sequences.append([sequence])
        self.outputs.append(output)
        return len(self.ids) - 1


class _Buffers:
    """The arrays of a ``llama_batch``, used again for each pass.

    Args:
        size: most tokens of a pass.
    """

    def __init__(self, size: int) -> None:
        integers, flags, pointers = ctypes.c_int32 * size, ctypes.c_bool * size, ctypes.c_void_p * size
        self._ids: Any = integers()
        self._positions: Any = integers()
        self._counts: Any = integers()
        self._members: Any = integers()
        self._starts: Any = pointers()
        self._outputs: Any = flags()
        arrays: tuple[Any, ...] = (self._positions, self._counts, self._starts, self._outputs)
        self._batch = Batch(0, ctypes.addressof(self._ids), None, *map(ctypes.addressof, arrays))
        self._single = 0
        """Of so many first tokens, the arrays of sequences are as they are for a token of one sequence."""

    def filled(self, tokens: Tokens) -> Batch:
        """The tokens of a pass as llama.cpp takes them, until the next call."""
        count = len(tokens.ids)
        self._batch.n_tokens = count
        self._ids[:count] = tokens.ids
        self._positions[:count] = tokens.positions
        self._outputs[:count] = tokens.outputs
        members = list(chain.from_iterable(tokens.sequences))
        if len(members) == count:
            self._members[:count] = members
            if self._single < count:
                self._point([1] * count)
                self._single = count
        else:
            self._single = 0
            if len(members) > len(self._members):
                self._members = (ctypes.c_int32 * len(members))()
            self._members[: len(members)] = members
            self._point([len(one) for one in tokens.sequences])
        return self._batch

    def _point(self, counts: list[int]) -> None:
        """Have the tokens' sequences begin one after another, as many of each as told."""
        first, size = ctypes.addressof(self._members), ctypes.sizeof(ctypes.c_int32)
        starts = accumulate(counts[:-1], initial=0)
        self._counts[: len(counts)] = counts
        self._starts[: len(counts)] = [first + size * start for start in starts]


class Context:
    """A context with room for a number of tokens.

    Args:
        handle: the loaded model, which lives as long as the context.
        cells: tokens of all sequences together that it has room for, at least.
        options: how it is made.
        vocab_size: logits of a token.

    Attributes:
        cells: tokens that it has room for.
        tokens: most tokens of a pass.

    Raises:
        OutOfMemory: there is no memory for it.
        ModelError: llama.cpp can't make one, or makes another one than was asked for.
    """

    def __init__(self, handle: Handle, cells: int, options: ContextOptions, vocab_size: int) -> None:
        library = self._library = handle.library
        self._vocab_size = vocab_size
        params = library.context_params()
        params.n_ctx = -(-cells // PAD) * PAD
        params.n_batch = params.n_ubatch = min(options.tokens, params.n_ctx)
        params.n_seq_max = options.sequences
        params.n_outputs_max = max(options.outputs, params.n_seq_max)
        params.n_outputs_max_per_seq = 0
        params.n_threads = params.n_threads_batch = options.threads
        params.type_k = params.type_v = options.cache_type
        params.kv_unified = True
        if options.cache_type == TYPES["f32"]:
            params.flash_attn_type = _NO_FLASH  # which would round keys and values to float16
        params.no_perf = True
        with library.listening() as said:
            pointer = library.llama_init_from_model(handle.pointer, params)
        if not pointer:
            reason = "; ".join(list(said)[-3:]) or "it gives no reason"
            if "alloc" in reason:
                raise OutOfMemory(f"no memory for a KV cache of {params.n_ctx:,} tokens ({reason})")
            raise ModelError(f"llama.cpp makes no context of {params.n_ctx:,} tokens: {reason}")
        self._pointer = pointer
        self._finalizer = weakref.finalize(self, _free, handle, pointer)
        self.cells, self.tokens = params.n_ctx, params.n_batch
        for name in ("n_ctx", "n_batch", "n_ubatch", "n_seq_max", "n_threads", "n_threads_batch"):
            made = getattr(library, f"llama_{name}")(pointer)
            if made != getattr(params, name):
                raise ModelError(
                    f"{library.home} made a context with {name} = {made:,} where {getattr(params, name):,} was asked "
                    "for: its structures are laid out in a way that is not known here; install another version of it"
                )
        self._memory = library.llama_get_memory(pointer)
        self._buffers = _Buffers(self.tokens)
        self._rows: dict[int, Any] = {}  # by their number, the ctypes of a pass's logits: making one takes long

    @property
    def alive(self) -> bool:
        """Whether it has not been freed; at the end of the process that may happen before its cache goes."""
        return self._finalizer.alive

    def close(self) -> None:
        """Free its memory."""
        self._finalizer()

    def clear(self) -> None:
        """Drop all sequences."""
        self._library.llama_memory_clear(self._memory, False)

    def cut(self, sequence: int, length: int = 0) -> None:
        """Keep only the first tokens of a sequence; the whole sequence goes with 0."""
        if not self._library.llama_memory_seq_rm(self._memory, sequence, length or -1, -1):
            raise ModelError(f"llama.cpp can't cut sequence {sequence} of this model's to {length:,} tokens")

    def share(self, source: int, target: int, length: int = -1) -> None:
        """Make the first tokens of a sequence (-1: all) part of another, empty one too. Nothing is copied."""
        self._library.llama_memory_seq_cp(self._memory, source, target, -1 if length < 0 else 0, length)

    def save(self, sequence: int) -> Any:
        """The state of a sequence."""
        size = self._library.llama_state_seq_get_size(self._pointer, sequence)
        data = (ctypes.c_ubyte * size)()
        if self._library.llama_state_seq_get_data(self._pointer, data, size, sequence) == 0:
            raise ModelError("llama.cpp could not save the state of a sequence")
        return data

    def restore(self, sequence: int, data: Any) -> bool:
        """Give an empty sequence a state; False where llama.cpp does not take it."""
        return bool(self._library.llama_state_seq_set_data(self._pointer, data, len(data), sequence))

    def decode(self, batch: Tokens) -> npt.NDArray[np.float32]:
        """Run a pass.

        Returns:
            ``[outputs, V]``, logits of the tokens that wanted some, in their order: the library's own memory, which
            the next pass overwrites.

        Raises:
            ModelError: llama.cpp fails.
            OutOfMemory: there is no room for so many tokens.
        """
        count = len(batch.ids)
        status = self._library.llama_decode(self._pointer, self._buffers.filled(batch))
        if status == _NO_SLOT:
            raise OutOfMemory(f"the KV cache of {self.cells:,} tokens has no room for {count:,} more")
        if status != 0:
            reason = "; ".join(list(self._library.said)[-3:]) or f"status {status}"
            raise ModelError(f"llama.cpp failed to compute a pass over {count:,} tokens: {reason}")
        wanted = sum(batch.outputs)
        if wanted == 0:
            return np.empty((0, self._vocab_size), dtype=np.float32)
        found = self._library.llama_get_logits(self._pointer)
        if wanted not in self._rows:
            self._rows[wanted] = (ctypes.c_float * self._vocab_size) * wanted
        return np.asarray(self._rows[wanted].from_address(found))


def _free(handle: Handle, pointer: Any) -> None:
    handle.library.llama_free(pointer)
