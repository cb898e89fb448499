"""Lookahead decoding: Jacobi iteration over several later tokens at once, and a pool of the n-grams that it yields."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as AbstractSequence

from torch import Tensor

from foretoken.draft import Draft
from foretoken.drafters.base import Batch, Drafter
from foretoken.drafters.per_sequence import PerSequence
from foretoken.sampling.params import check_integer
from foretoken.sequence import Sequence
from foretoken.verify.base import Verdict

_PRIME = 7919


class Lookahead(Drafter):
    """Jacobi iteration beside verification, in the same pass of the target (Fu et al. 2024, arXiv 2402.02057).

    A window of ``window`` columns and ``ngram - 1`` levels stands behind the root: the token of level l in column j is
    a candidate for position l + j after the root, renewed l times. Each pass scores the tokens of the top level; the
    target's most probable tokens after them are the next top level, and with each column's tokens an n-gram for a pool.
    Candidates for verification are n-grams of the pool that begin with the root, and the latest of them continued by
    others.

    All of it is one draft tree of chosen tokens. Level 0 is a chain under the root, the token of level l and column j a
    child of that of level l - 1 in the same column (in column 0 of level 0, the root). So a node's ancestors are just
    what the paper's attention mask lets it see, its own column below it and level 0 up to there, and its depth is its
    position. Nodes of both parts with the same path are one node, and a token of the window that is right is
    accepted like any other.

    The window has as many columns as there is room for: of the tokens that may be drafted, the candidates get half. A
    wide window pays where passes over many tokens cost little more than over one. The pool also has the
    n-grams of the sequence itself, and those of every other node of a draft with the target's most probable token after
    it.

    Where only chains are taken, there is room for one row: an n-gram of the pool, continued by others, or, where none
    begins with the root, plain Jacobi iteration: the target's most probable tokens after those of the last draft.

    Args:
        ngram: tokens of the pool's n-grams, N.
        window: most columns, W.
        guesses: n-grams that are kept for each first token, G (the paper's name), the oldest dropped first.
    """

    name = "lookahead"
    trees = True
    own_threads = True

    def __init__(self, ngram: int = 4, window: int = 15, guesses: int = 8) -> None:
        self.ngram = check_integer("ngram", ngram, 2, 32, cure="use 4; with 2 the window is plain Jacobi iteration")
        self.window = check_integer("window", window, 1, cure="use 15, or fewer for smaller drafts")
        self.guesses = check_integer("guesses", guesses, 1, cure="use 8")
        self._states = PerSequence(lambda: _LookaheadState(ngram, guesses))

    def propose(self, batch: Batch, limits: AbstractSequence[int]) -> Draft:
        """Candidates from the pool and the window, in one tree, or a chain."""
        rows, parents = [], []
        for row, (sequence, limit) in enumerate(zip(batch.sequences, limits, strict=True)):
            state = self._states[sequence]
            state.update(sequence)
            tree = _TokenTree(limit, batch.vocab_size)
            if batch.takes_chosen_trees(row):
                self._branch(state, tree)
            else:
                self._go_straight(state, tree)
            state.proposal = tree.tokens, tree.parents
            rows.append(tree.tokens)
            parents.append(tree.parents)
        return Draft.from_lists(rows, batch.device, parents)

    def observe(self, batch: Batch, draft: Draft, verdict: Verdict, logits: Tensor) -> None:
        """Enter the n-grams that the target completes, and move the window on."""
        likely = logits.argmax(-1).tolist()
        drafted, above, sizes = draft.listed
        for row, sequence in enumerate(batch.sequences):
            state = self._states.get(sequence)
            if state is None:
                continue
            paths = [sequence.tokens[1 - self.ngram :]]
            for node in range(sizes[row]):
                paths.append([*paths[above[row][node]], drafted[row][node]][1 - self.ngram :])
            for path, token in zip(paths, likely[row], strict=False):
                if len(path) == self.ngram - 1:
                    state.pool.add([*path, token])
            # The verified draft may be another drafter's.
            if state.proposal == (drafted[row][: sizes[row]], above[row][: sizes[row]]):
                state.window.extend(likely[row])
            state.proposal = None

    def _branch(self, state: _LookaheadState, tree: _TokenTree) -> None:
        """Half of the room for candidates, the rest for the window, and what that leaves for candidates again."""
        window, limit = state.window, tree.limit
        candidates = [*state.pool.after(state.root), self._chain(state, limit)]
        tree.limit = limit // 2
        tree.add_all(candidates)
        tree.limit = limit
        levels = self.ngram - 1
        window.fill(min(self.window, (limit - len(tree.tokens) + 1) // levels), levels, state)
        window.enter(tree)
        tree.add_all(candidates)

    def _go_straight(self, state: _LookaheadState, tree: _TokenTree) -> None:
        """An n-gram, and n-grams that begin with its last token; else the Jacobi row."""
        chain = self._chain(state, tree.limit)
        if not chain:
            state.window.fill(min(self.window, tree.limit + 1), 1, state)
            chain = state.window.levels[0][1:]
        tree.add(chain)
        # Whatever the chain is, the target's most probable tokens after it are the next level.
        state.window.levels = [[state.root, *tree.tokens]]
        state.window.enter(tree)

    def _chain(self, state: _LookaheadState, limit: int) -> list[int]:
        """The latest n-gram that begins with the root, the latest that begins with its last token, and so on."""
        chain = [state.root]
        while len(chain) <= limit and (known := state.pool.after(chain[-1])):
            chain.extend(known[0])
        return chain[1:]


class _NgramPool:
    """n-grams by their first token.

    Args:
        guesses: most of one first token.
    """

    def __init__(self, guesses: int) -> None:
        self._guesses = guesses
        self._rests: dict[int, dict[tuple[int, ...], None]] = {}  # the latest last

    def add(self, ngram: list[int]) -> None:
        """Enter an n-gram, or renew it."""
        rests = self._rests.setdefault(ngram[0], {})
        rest = tuple(ngram[1:])
        rests.pop(rest, None)
        rests[rest] = None
        if len(rests) > self._guesses:
            del rests[next(iter(rests))]

    def after(self, token: int) -> list[tuple[int, ...]]:
        """The continuations of n-grams that begin with a token, the latest first."""
        return list(reversed(self._rests.get(token, {})))


class _TokenTree:
    """A draft tree that grows path by path.

    Args:
        limit: most nodes.
        vocab_size: tokens from there on are not drafted, nor what would stand below them.
    """

    def __init__(self, limit: int, vocab_size: int) -> None:
        self.limit = limit
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self._vocab_size = vocab_size
        self._children: dict[tuple[int, int], int] = {}

    def child(self, parent: int, token: int) -> int | None:
        """The node of a token below another node, new if there is none; None where there is no room for one."""
        node = self._children.get((parent, token))
        if node is None and len(self.tokens) < self.limit and token < self._vocab_size:
            self.tokens.append(token)
            self.parents.append(parent)
            node = self._children[parent, token] = len(self.tokens)
        return node

    def add(self, path: AbstractSequence[int], parent: int = 0) -> None:
        """Nodes for the tokens of a path, as far as there is room."""
        for token in path:
            node = self.child(parent, token)
            if node is None:
                return
            parent = node

    def add_all(self, paths: AbstractSequence[AbstractSequence[int]]) -> None:
        """Several paths from the root."""
        for path in paths:
            self.add(path)


class _JacobiWindow:
    """The Jacobi window of one sequence.

    Attributes:
        levels: the token of level l and column j, a candidate for position l + j after the root. Column 0 of level 0
            is the root. Levels may be of different lengths until they are filled up.
    """

    def __init__(self) -> None:
        self.levels: list[list[int]] = []
        self._full = 1  # levels of a full window
        self._top: list[int] = []  # nodes of the top level in the draft

    def fill(self, columns: int, levels: int, state: _LookaheadState) -> None:
        """Bring the levels that there are to `columns` columns, `levels` levels at most; the first begins a window."""
        self._full = levels
        del self.levels[:-levels]
        if not self.levels:
            self.levels.append([])
        fillers = state.fillers()
        for level, row in enumerate(self.levels):
            if level == 0:
                row[:1] = [state.root]
            del row[columns:]
            while len(row) < columns:
                before = self.levels[level - 1][len(row)] if level else row[-1]
                known = state.pool.after(before)
                row.append(known[0][0] if known else next(fillers))

    def enter(self, tree: _TokenTree) -> None:
        """Enter the window into a draft."""
        nodes: list[int] = []
        for level, row in enumerate(self.levels):
            above = nodes
            nodes = [0] if level == 0 and row else []
            for column in range(len(nodes), len(row)):
                if level and column >= len(above):
                    break
                node = tree.child(above[column] if level else nodes[-1], row[column])
                if node is None:
                    break
                nodes.append(node)
        self._top = nodes

    def extend(self, likely: list[int]) -> None:
        """Add the target's most probable tokens after the top level's nodes as the new top level."""
        self.levels.append([likely[node] for node in self._top])

    def move(self, steps: int) -> None:
        """Follow the root, which has advanced by `steps` tokens."""
        if len(self.levels) > self._full:  # without its lowest level the window stands one position further on
            del self.levels[0]
            steps -= 1
        self.levels = [row[steps:] for row in self.levels]


class _LookaheadState:
    """One request's n-grams, its window, and its last proposal."""

    def __init__(self, ngram: int, guesses: int) -> None:
        self.pool = _NgramPool(guesses)
        self.window = _JacobiWindow()
        self.proposal: tuple[list[int], list[int]] | None = None
        self.root = -1
        self._ngram = ngram
        self._tokens: list[int] = []

    def update(self, sequence: Sequence) -> None:
        """Enter the new tokens of the sequence."""
        known = len(self._tokens)
        new = sequence.context if not known else sequence.tokens[known - len(sequence.source or ()) :]
        for token in new:
            self._tokens.append(token)
            if len(self._tokens) >= self._ngram:
                self.pool.add(self._tokens[-self._ngram :])
        self.root = self._tokens[-1]
        self.window.move(len(new) if known else 0)

    def fillers(self) -> Iterator[int]:
        """Tokens from all over the sequence, to fill the window; the same ones each time for the same sequence."""
        index = size = len(self._tokens)
        while True:
            index = (index * _PRIME + 1) % size
            yield self._tokens[index]
