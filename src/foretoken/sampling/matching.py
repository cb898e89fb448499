"""Grammars compiled for a tokenizer by llguidance, and the tokens that they allow after each node of a draft."""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as AbstractSequence
from threading import Lock
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from foretoken.errors import GrammarError, install_extra, shown
from foretoken.sampling.grammar import Grammar

_KEPT = 64  # compiled grammars that are kept for further requests
_SPELT = 1024  # bytes of a forced text that are tokenized at once: llguidance asks for each token, and uses the first
_NAMED = re.compile(r'"(?:\\.|[^"\\\n])*"?|/(?:\\.|[^/\\])+/?|(?://|#)[^\n]*|<[^<>\s]+>')
"""In a Lark grammar: strings, expressions and comments; and the names of tokens, outside of these. One that is not
closed is found, too: to look for its end from each quote in it would take the square of its length."""


@runtime_checkable
class ByteTokenizer(Protocol):
    """A tokenizer that says which bytes its tokens are; those of tokenizer.json files need not."""

    def token_bytes(self) -> AbstractSequence[bytes]:
        """The bytes of each token, by id; empty for special tokens, which no text has."""

    def encode_bytes(self, text: bytes) -> list[int]:
        """The tokens of some text, without special tokens around them."""


class GrammarCompiler:
    """Compiles grammars for a target's tokens. May be used from several threads.

    Args:
        tokenizer: the target's: a fast one of transformers, or a `ByteTokenizer`; None where it has none.
        vocab_size: of the target.
        eos_token_ids: the tokens that end an output: where the grammar may end, one of them is allowed.
        name: the target's, for messages.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Iterable[int], name: str) -> None:
        self._tokenizer, self._name = tokenizer, name
        self._vocab_size = vocab_size
        self._ends = [token for token in eos_token_ids if 0 <= token < vocab_size]
        self._lock = Lock()
        self._tokens: Any = None  # llguidance's form of the tokenizer, made with the first grammar
        self._named: dict[str, str] = {}  # names that Lark grammars may have for tokens that are text, and that text
        self._compiled: OrderedDict[Grammar, Any] = OrderedDict()

    def matcher(self, grammar: Grammar) -> GrammarMatcher:
        """A matcher at the beginning of the output; compiles the grammar unless that was done before.

        Raises:
            GrammarError: llguidance is not installed, the target has no tokenizer that it can use, or the grammar is
                wrong or beyond its limits.
        """
        with self._lock:
            compiled = self._compiled.get(grammar)
            if compiled is not None:
                self._compiled.move_to_end(grammar)
        if compiled is None:
            compiled = self._compile(grammar)
            with self._lock:
                self._compiled[grammar] = compiled
                while len(self._compiled) > _KEPT:
                    self._compiled.popitem(last=False)
        return GrammarMatcher(compiled, grammar, frozenset(self._ends))

    def token_bytes(self, token: int) -> bytes | None:
        """The bytes that a token stands for; None where they can't be known."""
        try:
            return bytes(self._llguidance_tokenizer().decode_bytes([token]))
        except GrammarError:
            return None

    def _compile(self, grammar: Grammar) -> Any:
        llguidance = _llguidance()
        tokens = self._llguidance_tokenizer()
        limits = llguidance.LLParserLimits(
            max_items_in_row=grammar.limits.row_items,
            initial_lexer_fuel=grammar.limits.compile_fuel,
            step_lexer_fuel=grammar.limits.step_fuel,
            step_max_items=grammar.limits.step_items,
            max_lexer_states=grammar.limits.lexer_states,
            max_grammar_size=grammar.limits.grammar_size,
            verbose_errors=False,
        )
        try:
            compiled = llguidance.LLMatcher(tokens, _rules(grammar, self._named), log_level=0, limits=limits)
            compiled.compute_bitmask()  # some errors come with the first mask
        except ValueError as error:
            raise GrammarError(_refusal(grammar, str(error))) from None
        if compiled.is_error():
            raise GrammarError(_refusal(grammar, compiled.get_error()))
        return compiled

    def _llguidance_tokenizer(self) -> Any:
        with self._lock:
            if self._tokens is None:
                self._tokens = self._make_tokenizer()
            return self._tokens

    def _make_tokenizer(self) -> Any:
        llguidance = _llguidance()
        if self._tokenizer is None:
            raise GrammarError(
                f"{self._name} was loaded without a tokenizer, so that no grammar can be followed: load it with one"
            )
        if isinstance(self._tokenizer, ByteTokenizer):
            texts = [bytes(text) for text in self._tokenizer.token_bytes()]
            texts += [b""] * (self._vocab_size - len(texts))
            return _from_table(texts, [not text for text in texts], self._ends, self._tokenizer.encode_bytes)
        backend = _backend(self._tokenizer)
        if backend is None:
            raise GrammarError(
                f"the tokenizer of {self._name} is a {type(self._tokenizer).__name__}, whose tokens have no known "
                "bytes: load the model with a fast tokenizer (one with a tokenizer.json)"
            )
        size = max(backend.get_vocab_size(), self._vocab_size)
        try:
            known = llguidance.LLTokenizer(backend.to_str(), size, self._ends or None, slices=[])  # it makes no masks
        except ValueError as error:
            raise GrammarError(
                f"the bytes of the tokens of {self._name} are not known ({error}): grammars need a tokenizer of bytes, "
                "or one that falls back to them"
            ) from None
        # llguidance takes <tool_call> and its like for special tokens; to most tokenizers they are text.
        special = [known.is_special_token(token) for token in range(size)]
        for token, added in backend.get_added_tokens_decoder().items():
            if token < size and special[token] and not added.special and token not in self._ends:
                special[token] = False
                self._named |= dict.fromkeys((added.content, f"<[{token}]>"), json.dumps(added.content))
        texts = [known.decode_bytes([token]) for token in range(size)]
        return _from_table(texts, special, self._ends, known.tokenize_bytes)


class GrammarMatcher:
    """The position of an output in its grammar.

    Attributes:
        grammar: the one that was compiled.
        finished: nothing can follow any more, not even an end token.
    """

    def __init__(self, compiled: Any, grammar: Grammar, ends: frozenset[int]) -> None:
        self.grammar = grammar
        self._ends = ends
        self.finished = False
        self._compiled = compiled
        self._matcher = compiled.deep_copy()
        self._consumed: list[int] = []
        self._bytes = len(self._matcher.compute_bitmask())
        self._limit = ""  # which one the last call of `allowed` exceeded

    def advance(self, token: int) -> bool:
        """Move on by an emitted token; returns False, and does nothing, where the grammar does not allow it."""
        known = token >> 3 < self._bytes
        if self.finished or not known or self._matcher.try_consume_tokens([token]) != 1:
            return False
        self._consumed.append(token)
        self.finished = self._matcher.is_stopped()
        return True

    def allowed(self, tokens: list[int], parents: list[int]) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Which tokens are allowed after each node of a draft tree below the output; the matcher stays where it is.

        Args:
            tokens: the draft's N tokens.
            parents: the node number of each one's parent; parents come before their children.

        Returns:
            ``[N+1, ceil(V'/8)]``, a bit for each of the tokenizer's V' tokens, the lowest first. All are set below
            tokens that are not allowed, and where the output is complete: no output gets there. None is set where the
            grammar's limits were exceeded.
        """
        self._limit = ""
        masks = np.full((len(tokens) + 1, self._bytes), 0xFF, dtype=np.uint8)
        if self.finished:
            return masks
        children: list[list[int]] = [[] for _ in masks]
        for node, parent in enumerate(parents, start=1):
            children[parent].append(node)
        pending, depth = [(0, 0)], 0  # depth: draft tokens that the matcher has consumed
        while pending:
            node, level = pending.pop()
            if node:
                token, above = tokens[node - 1], masks[parents[node - 1]]
                self._back(depth - (level - 1))
                depth = level - 1
                if token >> 3 >= self._bytes or not above[token >> 3] >> (token & 7) & 1:
                    continue
                self._matcher.consume_token(token)
                depth = level
                if self._matcher.is_stopped() and not self._matcher.is_error():
                    continue
            masks[node] = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
            if self._matcher.is_error():
                masks[node] = 0
                self._limit = _first_line(self._matcher.get_error())
                self._restore(_path(node, tokens, parents)[:-1])
                depth = max(level - 1, 0)
                continue
            pending += [(child, level + 1) for child in reversed(children[node])]
        self._back(depth)
        return masks

    def _back(self, count: int) -> None:
        if count:
            self._matcher.rollback(count)

    def _restore(self, drafted: list[int]) -> None:
        """Replace the matcher, which can't recover from an error, by a new one after the output and these tokens."""
        self._matcher = self._compiled.deep_copy()
        self._matcher.consume_tokens([*self._consumed, *drafted])

    def forced(self, most: int) -> list[int]:
        """The next tokens, up to `most`, as long as the grammar allows a single one; end tokens are not included."""
        found: list[int] = []
        if most > 0 and not self.finished:
            for token in self._matcher.compute_ff_tokens()[:most]:
                if token in self._ends or self._matcher.is_stopped() or self._only() != token:
                    break
                found.append(token)
                self._matcher.consume_token(token)
            self._back(len(found))
        return found

    def _only(self) -> int | None:
        """The token that is allowed if it is the only one."""
        bits = int.from_bytes(self._matcher.compute_bitmask(), "little")
        return bits.bit_length() - 1 if bits.bit_count() == 1 else None

    def stuck_error(self, length: int) -> GrammarError:
        """Why no token was left after an output of `length` tokens or a few more."""
        where = f"after {length:,} tokens of output the {self.grammar.label} {shown(self.grammar.source, 80)}"
        if self._limit:
            return GrammarError(f"{where} exceeds a limit ({self._limit}): simplify it, or raise its GrammarLimits")
        return GrammarError(
            f"{where} allows no token that the model and the request's logit_bias and min_new_tokens leave: give those "
            "less to forbid, or loosen it"
        )


def mask_logits(
    logits: Tensor, matchers: AbstractSequence[GrammarMatcher | None], tokens: Tensor, parents: Tensor, counts: Tensor
) -> Tensor:
    """Logits with -inf for the tokens that grammars don't allow.

    Args:
        logits: ``[B, N+1, V]`` at the root and the N draft tokens of each row; not written to.
        matchers: of each row; None where it has no grammar.
        tokens: ``[B, N]`` int64, the draft's.
        parents: ``[B, N]`` int64, node number of each one's parent.
        counts: ``[B]`` int64, draft tokens of each row.
    """
    rows = [row for row, matcher in enumerate(matchers) if matcher is not None]
    drafted, links, sizes = tokens[rows].tolist(), parents[rows].tolist(), counts[rows].tolist()
    masked = logits.clone()
    for row, chain, above, count in zip(rows, drafted, links, sizes, strict=True):
        matcher = matchers[row]
        assert matcher is not None
        forbidden = _bits(~matcher.allowed(chain[:count], above[:count]), logits.device)
        width = min(forbidden.shape[-1], logits.shape[-1])
        part = masked[row, : count + 1]
        part[:, :width].masked_fill_(forbidden[:, :width], -torch.inf)
        part[:, width:] = -torch.inf
    return masked


def _bits(packed: np.ndarray[Any, np.dtype[np.uint8]], device: torch.device) -> Tensor:
    """``[N, 8 W]`` bool: the bits of ``[N, W]`` uint8, the lowest first."""
    if device.type == "cpu":  # several times as fast as torch's operators
        return torch.from_numpy(np.unpackbits(packed, axis=-1, bitorder="little")).view(torch.bool)
    powers = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8, device=device)
    return torch.from_numpy(packed).to(device)[..., None].bitwise_and(powers).bool().flatten(-2)


def _path(node: int, tokens: list[int], parents: list[int]) -> list[int]:
    """The draft tokens from below the root to a node."""
    path = []
    while node:
        path.append(tokens[node - 1])
        node = parents[node - 1]
    return path[::-1]


class _TokenTable:
    """A table of tokens with the names that llguidance reads."""

    bos_token_id = None

    def __init__(
        self, tokens: list[bytes], special: list[int], end: int, encode: Callable[[bytes], AbstractSequence[int]]
    ) -> None:
        self.tokens, self.special_token_ids, self.eos_token_id = tokens, special, end
        self._encode = encode
        self._special = frozenset(special)
        self._ids = {token: number for number, token in enumerate(tokens) if token and number not in self._special}
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: bytes | str) -> list[int]:
        data = (text if isinstance(text, bytes) else text.encode())[: max(_SPELT, 8 * self._longest)]
        found = list(self._encode(data))
        # SentencePiece puts a space before a text: what is in the middle of an output has none.
        if b"".join(self.tokens[token] for token in found) != data:
            return self._by_length(data)
        if self._special.isdisjoint(found):
            return found
        # A special token is no text, even where its name is written out.
        spelt = ([token] if token not in self._special else self._by_length(self.tokens[token]) for token in found)
        return [token for part in spelt for token in part]

    def _by_length(self, data: bytes) -> list[int]:
        """The longest token at each place, as far as there is one."""
        found: list[int] = []
        start = 0
        while start < len(data):
            ends = range(min(start + self._longest, len(data)), start, -1)
            end = next((end for end in ends if data[start:end] in self._ids), None)
            if end is None:
                break
            found.append(self._ids[data[start:end]])
            start = end
        return found


def _from_table(
    texts: list[bytes], special: list[bool], ends: list[int], encode: Callable[[bytes], AbstractSequence[int]]
) -> Any:
    """llguidance's tokenizer for tokens of these bytes; without end tokens it gets one beyond them, never emitted."""
    llguidance = _llguidance()
    if not ends:
        ends, texts, special = [len(texts)], [*texts, b""], [*special, True]
    numbers = [token for token, is_special in enumerate(special) if is_special or token in ends]
    table = _TokenTable(texts, numbers, ends[0], encode)
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(table), eos_token=ends)


def _rules(grammar: Grammar, named: Mapping[str, str]) -> str:
    """The grammar in llguidance's own form.

    Args:
        grammar: as it was given.
        named: names of tokens that a Lark grammar may have, and strings of it that stand for them.

    Raises:
        ValueError: the schema is wrong.
    """
    matcher = _llguidance().LLMatcher
    if grammar.kind == "regex":
        rules: str = matcher.grammar_from_regex(grammar.source)
    elif grammar.kind == "lark":
        rules = matcher.grammar_from_lark(_NAMED.sub(lambda found: named.get(found[0], found[0]), grammar.source))
    elif grammar.kind == "choice":
        options = " | ".join(json.dumps(option, ensure_ascii=False) for option in json.loads(grammar.source))
        rules = matcher.grammar_from_lark(f"start: {options}")
    else:
        rules = matcher.grammar_from_json_schema(grammar.source, defaults={"whitespace_flexible": grammar.whitespace})
    return rules


def _refusal(grammar: Grammar, reason: str) -> str:
    """The message for a grammar that can't be followed."""
    what = f"the {grammar.label} {shown(grammar.source, 80)} can't be followed"
    return f"{what} ({_first_line(reason)}): correct or simplify it, or raise its GrammarLimits"


def _first_line(reason: str) -> str:
    """The error line of a message of llguidance's, which may also quote the grammar."""
    lines = [line.strip() for line in reason.splitlines() if line.strip()] or ["no reason given"]
    return next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0])[:300]


def _backend(tokenizer: Any) -> Any | None:
    """A copy of the Rust tokenizer of a fast tokenizer of transformers, which adds no padding; None for others."""
    from copy import copy

    from transformers import PreTrainedTokenizerFast

    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return None
    backend = copy(tokenizer.backend_tokenizer)
    backend.no_padding()
    backend.no_truncation()
    return backend


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError:
        raise GrammarError(f"grammars need llguidance, which is not installed: {install_extra('grammar')}") from None
    return llguidance
