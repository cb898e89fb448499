"""A llama.cpp context: the KV cache of some sequences, and passes over batches of tokens."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

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
        most_cells: that a context may have; None for any number.
    """

    threads: int
    cache_type: int
    sequences: int
    cells: int = 1024
    tokens: int = 512
    outputs: int = 128
    most_cells: int | None = None

    def within(self, cells: int) -> int:
        """So many cells, or as many as a context may have."""
        return cells if self.most_cells is None else min(cells, self.most_cells)


class TokenBatch:
    """The tokens of a pass, in the arrays of a ``llama_batch``, which are used again for each pass.

    Args:
        size: most tokens of a pass.

    Attributes:
        count: tokens that it has.
        outputs: how many of them want logits.
    """

    def __init__(self, size: int) -> None:
        integers, flags, pointers = ctypes.c_int32 * size, ctypes.c_bool * size, ctypes.c_void_p * size
        self._ids: Any = integers()
        self._positions: Any = integers()
        self._sequences: Any = integers()
        self._counts: Any = integers(*[1] * size)
        self._starts: Any = pointers()
        self._flags: Any = flags()
        for entry in range(size):
            self._point_at_own(entry)
        arrays: tuple[Any, ...] = (self._positions, self._counts, self._starts, self._flags)
        self._batch = Batch(0, ctypes.addressof(self._ids), None, *map(ctypes.addressof, arrays))
        self._shared: dict[int, list[int]] = {}
        """Tokens of several sequences, and these."""
        self.count = self.outputs = 0

    def _point_at_own(self, entry: int) -> None:
        """Have a token be one of a single sequence."""
        self._counts[entry] = 1
        self._starts[entry] = ctypes.addressof(self._sequences) + ctypes.sizeof(ctypes.c_int32) * entry

    def add(self, token: int, position: int, sequence: int, output: bool) -> int:
        """Append a token; its index."""
        entry = self.count
        self._ids[entry], self._positions[entry], self._sequences[entry] = token, position, sequence
        self._flags[entry] = output
        self.count += 1
        self.outputs += output
        return entry

    def follow(self, token: int) -> None:
        """Have a batch of one token be of the one that comes after it."""
        self._ids[0] = token
        self._positions[0] += 1

    def extend(self, ids: Sequence[int], position: int, sequence: int, outputs: int) -> None:
        """Append tokens of one sequence from a position on; the logits of the last `outputs` of them are wanted."""
        first_output = len(ids) - outputs
        for at, token in enumerate(ids):
            self.add(token, position + at, sequence, at >= first_output)

    def share(self, entry: int, sequence: int) -> None:
        """Make a token part of another sequence, too."""
        self._shared.setdefault(entry, [self._sequences[entry]]).append(sequence)

    def position(self, entry: int) -> int:
        """A token's place in its sequences."""
        return int(self._positions[entry])

    def filled(self) -> Batch:
        """The tokens as llama.cpp takes them, until the next call."""
        self._batch.n_tokens = self.count
        self._members: list[Any] = []  # llama.cpp has their addresses
        for entry, sequences in self._shared.items():
            members = (ctypes.c_int32 * len(sequences))(*sequences)
            self._members.append(members)
            self._counts[entry], self._starts[entry] = len(sequences), ctypes.addressof(members)
        return self._batch

    def clear(self) -> None:
        """Drop all tokens."""
        for entry in self._shared:
            self._point_at_own(entry)
        if self._shared:
            self._shared = {}
        self.count = self.outputs = 0


class Context:
    """A context with room for a number of tokens.

    Args:
        handle: the loaded model, which lives as long as the context.
        cells: tokens of all sequences together that it has room for, at least.
        sequences: that it has.
        options: how it is made.
        vocab_size: logits of a token.

    Attributes:
        cells: tokens that it has room for.
        sequences: that it has.
        tokens: most tokens of a pass.
        batch: the tokens of the next pass.

    Raises:
        OutOfMemory: there is no memory for it.
        ModelError: llama.cpp can't make one, or makes another one than was asked for.
    """

    def __init__(self, handle: Handle, cells: int, sequences: int, options: ContextOptions, vocab_size: int) -> None:
        library = self._library = handle.library
        self._vocab_size = vocab_size
        params = library.context_params()
        params.n_ctx = -(-cells // PAD) * PAD
        params.n_batch = params.n_ubatch = min(options.tokens, params.n_ctx)
        params.n_seq_max = sequences
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
        self.cells, self.sequences, self.tokens = params.n_ctx, sequences, params.n_batch
        for name in ("n_ctx", "n_batch", "n_ubatch", "n_seq_max", "n_threads", "n_threads_batch"):
            made = getattr(library, f"llama_{name}")(pointer)
            if made != getattr(params, name):
                raise ModelError(
                    f"{library.home} made a context with {name} = {made:,} where {getattr(params, name):,} was asked "
                    "for: its structures are laid out in a way that is not known here; install another version of it"
                )
        self._memory = library.llama_get_memory(pointer)
        self.batch = TokenBatch(self.tokens)
        self._logits: tuple[int, int, Tensor] | None = None  # where the last pass's are, how many, and they themselves

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

    def first(self, sequence: int) -> int:
        """The first position that all layers know of a sequence; -1 if some know none."""
        return int(self._library.llama_memory_seq_pos_min(self._memory, sequence))

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

    def decode(self) -> Tensor:
        """Run a pass over the batch.

        Returns:
            ``[1, outputs, V]`` float32, logits of the tokens that wanted some, in their order: the library's own
            memory, which the next pass overwrites.

        Raises:
            ModelError: llama.cpp fails.
            OutOfMemory: there is no room for so many tokens.
        """
        count, wanted = self.batch.count, self.batch.outputs
        status = self._library.llama_decode(self._pointer, self.batch.filled())
        if status == _NO_SLOT:
            raise OutOfMemory(f"the KV cache of {self.cells:,} tokens has no room for {count:,} more")
        if status != 0:
            reason = "; ".join(list(self._library.said)[-3:]) or f"status {status}"
            raise ModelError(f"llama.cpp failed to compute a pass over {count:,} tokens: {reason}")
        if wanted == 0:
            return torch.empty((1, 0, self._vocab_size))
        place = self._library.llama_get_logits(self._pointer)
        if self._logits is None or self._logits[:2] != (place, wanted):  # making a tensor of it takes 10 us
            memory = (ctypes.c_float * (wanted * self._vocab_size)).from_address(place)
            logits = torch.frombuffer(memory, dtype=torch.float32).view(1, wanted, self._vocab_size)
            self._logits = place, wanted, logits
        return self._logits[2]


def _free(handle: Handle, pointer: Any) -> None:
    handle.library.llama_free(pointer)
