"""Sampler: applies the sampling parameters of a batch's rows to logits."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence as AbstractSequence

import torch
from torch import Tensor

from foretoken.draft import Draft, int_tensor
from foretoken.limits import current_limits
from foretoken.randomness import gumbel, gumbel_at, seed_tensor
from foretoken.sampling.params import SamplingParams
from foretoken.sampling.penalties import Penalties, node_depths
from foretoken.sampling.truncation import Filters, Kept, is_one, over_temperature, truncate
from foretoken.sampling.vocabulary import argmax, best_of, zeros_for_none
from foretoken.sequence import Sequence


def _noise_rows(size: int) -> int:
    """Rows of `size` noise values that are generated at a time."""
    return max(8, current_limits().noise_numbers // size)


class _Group:
    """Rows whose parameters take the same code path through the filters, so that it never depends on other rows."""

    def __init__(self, rows: list[int], params: AbstractSequence[SamplingParams], device: torch.device) -> None:
        chosen = [params[row] for row in rows]
        self.rows = None if len(rows) == len(params) else torch.tensor(rows, device=device)

        def pack(values: list[float], dtype: torch.dtype) -> float | Tensor:
            if len(set(values)) == 1:
                return values[0]
            return torch.tensor(values, dtype=dtype, device=device)[:, None]

        first = chosen[0]
        # Within these limits neither the temperature nor its inverse rounds to 0 or overflows in float32.
        inverse = pack([1.0 / min(max(p.temperature, 1e-30), 1e30) for p in chosen], torch.float32)
        self.filters = Filters(
            inverse_temperature=inverse,
            top_k=first.top_k or 0,
            top_p=pack([p.top_p for p in chosen], torch.float64) if first.top_p < 1.0 else None,
            log_min_p=pack([math.log(p.min_p) for p in chosen], torch.float32) if first.min_p > 0.0 else None,
        )

    @staticmethod
    def key(params: SamplingParams) -> tuple[object, ...]:
        """Rows with equal keys form a group."""
        return params.top_k, params.top_p < 1.0, params.min_p > 0.0, params.temperature == 1.0


class Sampler:
    """Logits to distributions and tokens, for a batch whose rows have parameters of their own.

    A row's results do not depend on the other rows. Rebuild it, or `select`, when rows change.

    Logits are ``[B, M, V]`` of any float dtype and any V (a drafter's vocabulary may be padded differently from the
    target's); they are not written to. `nodes` ``[B, M]`` int64 says which M nodes of each row's draft tree they belong
    to; None means all nodes in order. Results are undefined for rows that `check_finite` reports.

    Args:
        params: sampling parameters of the B rows.
        seeds: seeds of the rows, each in 0 … 2**64 - 1.
        vocab_size: the target's vocabulary size.
        eos_token_ids: the tokens that end an output.
        device: the device of the logits.

    Attributes:
        seeds: ``[B]`` int64.
        all_greedy: every row has temperature 0.
        alters: some row's logits have a bias, penalties or a minimum length applied.
        penalties: these, of all rows.
    """

    def __init__(
        self,
        params: AbstractSequence[SamplingParams],
        seeds: AbstractSequence[int],
        *,
        vocab_size: int,
        eos_token_ids: AbstractSequence[int] = (),
        device: torch.device | str = "cpu",
    ) -> None:
        self.params = tuple(params)
        self.vocab_size = vocab_size
        self.eos_token_ids = tuple(eos_token_ids)
        self.device = torch.device(device)
        self.seeds = seed_tensor(list(seeds), self.device)
        self._seeds = tuple(seeds)
        self.penalties = Penalties(self.params, self.eos_token_ids, self.device)
        self.alters = self.penalties.any
        self._altered = self.penalties.rows
        greedy = [row for row, p in enumerate(self.params) if p.greedy]
        self.all_greedy = len(greedy) == len(self.params)
        self._greedy = torch.tensor(greedy, dtype=torch.int64, device=self.device) if greedy else None
        groups: dict[tuple[object, ...], list[int]] = defaultdict(list)
        for row, p in enumerate(self.params):
            if not p.greedy:
                groups[_Group.key(p)].append(row)
        self._groups = [_Group(rows, self.params, self.device) for rows in groups.values()]
        alone = self._groups[0].filters if len(self._groups) == 1 and not greedy else None
        # Filters that all rows have in common, if they remove no tokens: then nodes need not be grouped.
        self._alike = alone if alone is not None and not (alone.removes or alone.varies) else None
        self._parts: dict[int, list[tuple[slice, Sampler]]] = {}
        self._inverse: Tensor | None = None

    def __init_subclass__(cls) -> None:
        """Refuse a subclass without `select`: large batches are verified in parts, which would be plain samplers."""
        if "select" not in vars(cls):
            raise TypeError(f"{cls.__name__} must define select(rows), which returns a {cls.__name__} of those rows")

    def select(self, rows: AbstractSequence[int] | Tensor) -> Sampler:
        """A sampler of some of the rows, in this order. Subclasses must define it and return their own class."""
        params, seeds = self._of_rows(rows)
        return Sampler(
            params,
            seeds,
            vocab_size=self.vocab_size,
            eos_token_ids=self.eos_token_ids,
            device=self.device,
        )

    def _of_rows(self, rows: AbstractSequence[int] | Tensor) -> tuple[list[SamplingParams], list[int]]:
        """Parameters and seeds of some of the rows."""
        numbers = rows.tolist() if isinstance(rows, Tensor) else list(rows)
        return [self.params[row] for row in numbers], [self._seeds[row] for row in numbers]

    def parts(self, size: int) -> list[tuple[slice, Sampler]]:
        """The sampler in parts of up to `size` rows, with the rows of each; cached."""
        count = len(self.params)
        if size >= count:
            return [(slice(0, count), self)]
        if size not in self._parts:
            slices = [slice(start, min(start + size, count)) for start in range(0, count, size)]
            self._parts[size] = [(rows, self.select(range(rows.start, rows.stop))) for rows in slices]
        return self._parts[size]

    @property
    def scales_alone(self) -> bool:
        """Whether the same temperature is all that applies to every row: unusable logits then give NaN everywhere.

        Always False for subclasses, which may do more.
        """
        return type(self) is Sampler and self._alike is not None and not self.alters

    def positions(self, sequences: AbstractSequence[Sequence]) -> Tensor:
        """``[B]`` int64: the position of each row's next token, the first after the root."""
        return int_tensor([len(s.tokens) for s in sequences], self.device)

    def inverse_temperatures(self) -> Tensor:
        """``[B]`` float32: a where a row's distribution is ``softmax(a · logits)``; 0 where other parameters apply too.

        A row's value depends on its own parameters alone. Don't write to it: it is made once.
        """
        if self._inverse is not None:
            return self._inverse
        inverse = torch.zeros(len(self.params), dtype=torch.float32, device=self.device)
        for group in self._groups:
            value = group.filters.inverse_temperature
            if not group.filters.removes:
                rows = slice(None) if group.rows is None else group.rows
                inverse[rows] = value.squeeze(-1) if isinstance(value, Tensor) else value
        inverse[sorted(self._altered)] = 0.0
        self._inverse = inverse
        return inverse

    def scores(
        self, logits: Tensor, sequences: AbstractSequence[Sequence], draft: Draft, nodes: Tensor | None = None
    ) -> Tensor:
        """``[B, M, V]`` float32: logits with bias, penalties and minimum lengths applied, before temperature.

        May be `logits` itself where nothing applies: don't write to it.
        """
        if not self.alters:
            return logits if logits.dtype is torch.float32 else logits.to(torch.float32)
        scores = logits.to(torch.float32, copy=True)
        self.penalties.apply(scores, sequences, draft, nodes)
        return scores

    def probabilities(
        self, logits: Tensor, sequences: AbstractSequence[Sequence], draft: Draft, nodes: Tensor | None = None
    ) -> Tensor:
        """``[B, M, V]`` float32: the distribution of the next token at each node; each sums to 1.

        Greedy rows have all mass at their best token, the lowest id of equal ones. Where the parameters of another row
        ban every token that has a score, the result is zeros: that can happen for a drafter whose vocabulary is a part
        of the target's.
        """
        probs = self._softmax(self.scores(logits, sequences, draft, nodes))
        return zeros_for_none(probs) if self.alters else probs

    def _softmax(self, scores: Tensor) -> Tensor:
        """``[B, M, V]``: the distributions for scores, filters applied; NaN where all scores are -inf."""
        if self._alike is not None:
            return over_temperature(scores, self._alike.inverse_temperature).softmax(-1)
        parts = [kept for group in self._groups for kept in self._truncate(scores, group)]
        if len(parts) == 1 and parts[0].rows is None and parts[0].ids is None:
            return parts[0].scores.softmax(-1).view(scores.shape)
        probs = torch.zeros(scores.shape, dtype=torch.float32, device=scores.device)
        flat = probs.view(-1, scores.shape[-1])
        for kept in parts:
            part = kept.scores.softmax(-1)
            if kept.ids is None:
                flat[slice(None) if kept.rows is None else kept.rows] = part
            elif kept.rows is None:
                flat.scatter_(1, kept.ids, part)
            else:
                flat[kept.rows[:, None], kept.ids] = part
        if self._greedy is not None:
            best = argmax(scores if self.all_greedy else scores[self._greedy])
            probs[self._greedy] = probs[self._greedy].scatter_(-1, best[..., None], 1.0)
        return probs

    def scaled(self, logits: Tensor) -> Tensor:
        """``[B, M, V]`` float32: the scores whose softmax `probabilities` returns, where `scales_alone`.

        May be `logits` itself: don't write to it.
        """
        assert self._alike is not None
        scores = logits if logits.dtype is torch.float32 else logits.to(torch.float32)
        return over_temperature(scores, self._alike.inverse_temperature)

    @property
    def leaves_scores(self) -> bool:
        """Whether `scaled` returns float32 logits unchanged."""
        return self.scales_alone and self._alike is not None and is_one(self._alike.inverse_temperature)

    def picks(
        self,
        logits: Tensor,
        sequences: AbstractSequence[Sequence],
        draft: Draft,
        nodes: Tensor | None = None,
        noise: bool = True,
    ) -> Tensor:
        """``[B, M]`` int64: the token sampled at each node, a function of the row's seed and the token's position.

        Greedy rows get their best token, others the argmax of log-probability plus Gumbel noise, which is a draw from
        the row's distribution. Without `noise` all rows get their best token.
        """
        if self.all_greedy or not noise:
            return argmax(self.scores(logits, sequences, draft, nodes) if self.alters else logits)
        scores = self.scores(logits, sequences, draft, nodes)
        picks = torch.empty(scores.shape[:2], dtype=torch.int64, device=scores.device)
        if self._greedy is not None:
            picks[self._greedy] = argmax(scores[self._greedy])
        flat = picks.view(-1)
        positions = (self.positions(sequences)[:, None] + node_depths(draft, nodes)).view(-1)
        seeds = self.seeds.repeat_interleave(scores.shape[1])
        for group in self._groups:
            for kept in self._truncate(scores, group):
                rows = slice(None) if kept.rows is None else kept.rows
                flat[rows] = _noisy_argmax(kept, seeds[rows], positions[rows])
        return picks

    def best(
        self,
        logits: Tensor,
        sequences: AbstractSequence[Sequence],
        draft: Draft,
        nodes: Tensor | None = None,
        count: int = 1,
        noise: AbstractSequence[bool] = (),
    ) -> tuple[Tensor, Tensor]:
        """The `count` best tokens of each node, best first and by id among equal ones, with their log-softmax scores.

        The scores are those of `picks`, which returns the first of these tokens: before temperature in greedy rows,
        elsewhere log-probabilities, in rows with `noise` plus Gumbel noise.

        Args:
            logits: ``[B, M, V]``.
            sequences: the rows' sequences.
            draft: the draft trees under their roots.
            nodes: ``[B, M]`` int64, the nodes of the logits; None means all in order.
            count: number of tokens for each node, at most V.
            noise: for each row, whether noise is added; empty for no row.

        Returns:
            tokens: ``[B, M, count]`` int64.
            shares: ``[B, M, count]`` float32, log-softmax of the scores; -inf where a distribution has fewer tokens.
        """
        scores = self.scores(logits, sequences, draft, nodes)
        tokens = torch.zeros((*scores.shape[:2], count), dtype=torch.int64, device=scores.device)
        shares = torch.full(tokens.shape, -torch.inf, device=scores.device)
        if self._greedy is not None:
            values, tokens[self._greedy] = best_of(scores[self._greedy], count)
            shares[self._greedy] = values - scores[self._greedy].logsumexp(-1, keepdim=True)
        flat_tokens, flat_shares = tokens.view(-1, count), shares.view(-1, count)
        noisy = torch.tensor(noise or [False] * len(self.params), device=scores.device)
        noisy = noisy.repeat_interleave(scores.shape[1])
        positions = (self.positions(sequences)[:, None] + node_depths(draft, nodes)).view(-1)
        seeds = self.seeds.repeat_interleave(scores.shape[1])
        for group in self._groups:
            for kept in self._truncate(scores, group):
                rows = torch.arange(len(noisy), device=scores.device) if kept.rows is None else kept.rows
                values = kept.scores
                if any(noise):
                    values = values.clone()
                    size = values.shape[-1]
                    for part in noisy[rows].nonzero().squeeze(-1).split(_noise_rows(size)):
                        key = seeds[rows[part]], positions[rows[part]]
                        values[part] += gumbel(*key, size) if kept.ids is None else gumbel_at(*key, kept.ids[part])
                top, ids = best_of(values, min(count, values.shape[-1]), kept.ids)
                width = top.shape[-1]
                flat_tokens[rows, :width] = ids
                flat_shares[rows, :width] = top - values.logsumexp(-1, keepdim=True)
        return tokens, shares

    def _truncate(self, scores: Tensor, group: _Group) -> list[Kept]:
        """The group's nodes after its filters; rows are numbered as in ``scores.view(B * M, V)``."""
        nodes, width = scores.shape[1:]
        filters = group.filters.repeat(nodes)
        if group.rows is None:
            return truncate(scores.reshape(-1, width), filters)
        parts = truncate(scores[group.rows].view(-1, width), filters)
        numbers = (group.rows[:, None] * nodes + torch.arange(nodes, device=scores.device)).view(-1)
        return [Kept(numbers if k.rows is None else numbers[k.rows], k.scores, k.ids) for k in parts]


def _noisy_argmax(kept: Kept, seeds: Tensor, positions: Tensor) -> Tensor:
    """``[R]`` int64: argmax of scores plus noise for seeds and positions ``[R]``."""
    if kept.ids is not None:
        best = gumbel_at(seeds, positions, kept.ids).add_(kept.scores).argmax(-1, keepdim=True)
        return kept.ids.gather(-1, best).squeeze(-1)
    size = kept.scores.shape[-1]
    parts = zip(*(x.split(_noise_rows(size)) for x in (kept.scores, seeds, positions)), strict=True)
    return torch.cat([argmax(gumbel(seed, position, size).add_(scores)) for scores, seed, position in parts])
