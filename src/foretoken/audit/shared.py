"""Evidence that goes on through all parts of an audit: known faults, and outputs among one another."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from foretoken.audit.evidence import Evidence
from foretoken.audit.faults import FAULTS, Directed, Nodes, log_ratios
from foretoken.audit.independence import Independence
from foretoken.audit.statistics import Floats, Ints
from foretoken.audit.subjects import SampleRequest
from foretoken.audit.worlds import World


class Shared:
    """The pieces of evidence, and how outputs get to them.

    Args:
        seed: of the audit.
        k: draft tokens of a round.
        drafter: the drafter's distribution is known, which known faults are written down with.
    """

    INDEPENDENCE = 5
    """Pieces of evidence on independence."""

    def __init__(self, seed: int, k: int, *, drafter: bool) -> None:
        self.independence = Independence(seed)
        self.directed = [Directed(name) for name in FAULTS] if drafter else []
        self.k = max(k, 1)

    @property
    def parts(self) -> list[Evidence]:
        """The pieces of evidence."""
        return [*self.directed, *self.independence.parts()]

    @staticmethod
    def planned(drafter: bool) -> int:
        """How many they are."""
        return Shared.INDEPENDENCE + len(FAULTS) * drafter

    def add_outputs(self, nodes: Nodes, outputs: Sequence[Ints]) -> list[Floats]:
        """Take up outputs, token by token; gives back the transforms of each, ``[2, T]``, for `add_calls`.

        Args:
            nodes: the contexts of all tokens, output after output.
            outputs: none of them empty.
        """
        lengths = np.array([len(tokens) for tokens in outputs])
        starts = np.cumsum(lengths) - lengths
        tokens = np.concatenate(outputs)
        for length in np.unique(lengths):
            rows = np.flatnonzero(lengths == length)
            at = starts[rows][:, None] + np.arange(length)
            for one in self.directed:
                one.add(log_ratios(one.fault, nodes, tokens[at], at, self.k), np.ones(len(rows), dtype=np.int64))
        return np.split(self.independence.transform(nodes.p, tokens), starts[1:], axis=1)

    def add_calls(self, values: Sequence[Floats], calls: Sequence[SampleRequest]) -> None:
        """Take up the transforms of the outputs of the last calls, all of them and in order."""
        begin = 0
        for call in calls:
            mine = values[begin : begin + call.count]
            begin += call.count
            shortest = min(one.shape[1] for one in mine)
            self.independence.add(call.seed, call.seeds(), np.stack([one[:, :shortest] for one in mine], axis=1))


class WorldOutputs:
    """The short outputs of a small world: all their contexts and ratios are worked out once.

    Args:
        shared: where they go.
        world: the world.
    """

    def __init__(self, shared: Shared, world: World) -> None:
        self._shared, self._size, self._depth = shared, world.vocab_size, world.depth
        self._last: SampleRequest | None = None
        counts = [self._size**d for d in range(world.depth)]
        self._offsets = np.cumsum([0, *counts[:-1]])
        sequences = np.arange(self._size**world.depth)
        # The context of each token of each sequence: what precedes it.
        self._at = np.stack(
            [offset + sequences // self._size ** (world.depth - d) for d, offset in enumerate(self._offsets)], axis=1
        )
        tokens = np.stack(
            [sequences // self._size ** (world.depth - 1 - d) % self._size for d in range(world.depth)], axis=1
        )
        self._p: list[Floats] = []
        self.ratios: list[list[Floats]] = []
        for (levels, masses), (drafter, drafter_masses) in zip(world.enumerated, world.drafter_enumerated, strict=True):
            before = np.concatenate([levels[0], *(np.repeat(level, self._size, axis=0) for level in levels[:-1])])
            nodes = Nodes(
                np.concatenate(levels),
                np.concatenate(drafter),
                before,
                np.concatenate(masses),
                np.concatenate(drafter_masses),
            )
            self._p.append(nodes.p)
            self.ratios.append([log_ratios(one.fault, nodes, tokens, self._at, shared.k) for one in shared.directed])

    def add(self, prompt: int, tokens: Ints, calls: Sequence[SampleRequest]) -> None:
        """Take up outputs ``[n, depth]`` after that prompt, as they were called for."""
        codes = np.zeros(len(tokens), dtype=np.int64)
        for column in tokens.T:
            codes = codes * self._size + column
        counts = np.bincount(codes, minlength=self._size**self._depth)
        for one, ratios in zip(self._shared.directed, self.ratios[prompt], strict=True):
            one.add(ratios, counts)
        probs = self._p[prompt][self._at[codes]]
        flat = self._shared.independence.transform(probs.reshape(-1, self._size), tokens.reshape(-1))
        values = flat.reshape(2, len(tokens), self._depth)
        begin = 0
        for call in calls:
            part = values[:, begin : begin + call.count]
            self._shared.independence.add(call.seed, call.seeds(), part, neighbour=self._follows(call))
            begin += call.count
            self._last = call

    def _follows(self, call: SampleRequest) -> bool:
        return self._last is not None and call.exact_seed and self._last.exact_seed and self._last.seed + 1 == call.seed
