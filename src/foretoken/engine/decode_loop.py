"""One round after another: draft, score, verify, commit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as AbstractSequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Literal

import torch
from torch import Tensor

from foretoken.draft import Draft
from foretoken.drafters.base import Batch, Drafter, NoDrafter
from foretoken.engine.outputs import (
    PARTS,
    DraftedToken,
    Origin,
    TokenLogprob,
)
from foretoken.engine.prefix_cache import PrefixCache
from foretoken.engine.row import Row
from foretoken.engine.verification import decide_batch, join
from foretoken.errors import NumericalError, OutOfMemory, ParameterError, PromptError
from foretoken.limits import DEFAULT_LIMITS, MAX_SPECULATIVE_TOKENS, Limits, use_limits
from foretoken.models.base import Cache, LanguageModel, Scores
from foretoken.models.feed import feed
from foretoken.models.threads import one_thread
from foretoken.policy.controller import AUTO, DEFAULT_K, Controller
from foretoken.policy.costs import Acceptance
from foretoken.sampling import Sampler, all_finite
from foretoken.sequence import Sequence
from foretoken.verify import AnyVerifier, Verdict, is_coupled


@dataclass
class _Clock:
    """Wall-clock seconds by part of the round that is going on."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    _started: float = field(default_factory=perf_counter)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        start = perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += perf_counter() - start

    def stop(self) -> dict[str, float]:
        """Seconds by part; what no part claimed is ``other``."""
        self.seconds["other"] = perf_counter() - self._started - sum(self.seconds.values())
        return self.seconds


@dataclass(frozen=True)
class _Rule:
    """Rows of a round whose drafts are verified in the same way: their numbers among those that take part."""

    verifier: AnyVerifier
    places: list[int]
    sampler: Sampler


class Rounds:
    """The rows that are being decoded together, and the steps that they take.

    Rows join and leave between rounds; the target's cache follows. A drafter keeps up by itself. A long prompt is read
    in chunks, one a round: rows that are still reading take no part in what the others do meanwhile. A row that begins
    like another one, such as with the same system prompt, starts from a copy of what the other has read; so does the
    first row to join after the last one has left.

    Where the number of tokens is "auto", a request that names a seed is still drafted with a fixed number if its text
    depends on it, so that the seed gives one text: the controller goes by the clock.
    """

    def __init__(
        self,
        target: LanguageModel,
        drafter: Drafter,
        num_speculative_tokens: int | Literal["auto"],
        controller: Controller,
        trace: bool = False,
        make_sampler: Callable[[AbstractSequence[Sequence]], Sampler] | None = None,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        self.target = target
        self.limits = limits
        self.drafter = drafter
        self.k = num_speculative_tokens
        self.controller = controller
        self._branches = drafter.trees
        self._hidden_layers = tuple(drafter.hidden_layers)
        self.trace = trace
        self.crowded = False  # other requests wait for a place among the rows
        # A drafter that reads the target's hidden states needs those of every token: there is no copy of them.
        self._prefixes = PrefixCache(target, not self._hidden_layers, limits.shortest_shared_prefix)
        self._places: list[int] = []  # of the rows that take part in the round: their prompts are read
        self._active: list[Row] = []  # those rows
        self._sampler: Sampler | None = None  # of those rows; None when it has to be made anew, and so have the rules
        self._rules: list[_Rule] = []
        self._unread: list[int] = []  # of those rows: tokens that the drafter has to catch up with
        self._numbers: list[int | None] = []  # of those rows: what `_fixed` says
        self._make_sampler = make_sampler

    def join(self, rows: AbstractSequence[Row]) -> None:
        """Let requests take part from the next round on; one whose source the target can't read fails and does not."""
        if not rows:
            return
        self._prefixes.join(rows)
        for place, row in enumerate(self.rows):
            if row in rows and row.sequence.source is not None:
                try:
                    self._cache.encode(place, row.sequence.source)
                except PromptError as error:
                    row.fail(error)
        self._sampler = None
        self._leave()

    @property
    def rows(self) -> list[Row]:
        """The requests that are being decoded."""
        return self._prefixes.rows

    @property
    def _cache(self) -> Cache:
        return self._prefixes.cache

    def clear(self) -> None:
        """Drop all rows and the target's KV cache: after an error nobody knows what is in it."""
        self._prefixes.clear()
        self._active, self._places = [], []
        self._sampler = None

    def step(self) -> None:
        """One round for every row whose prompt is read; rows that finished with it, or were ended before, leave."""
        scores = len(self.rows) * (DEFAULT_K + 1) * self.target.vocab_size
        others = self.target.own_threads and self.drafter.own_threads
        few = scores <= self.limits.one_thread_logits
        with torch.inference_mode(), one_thread(others and few), use_limits(self.limits):
            self._step()

    def _step(self) -> None:
        self._leave()
        if not self.rows:
            return
        clock = _Clock()
        with clock.part("target"), self._memory_guard(self.target.name):
            clean = not self._prefill()
        batch = self._batch()
        limits = self._limits()
        with clock.part("drafter"), self._memory_guard(f"the drafter {self.drafter.name}"):
            draft = self._propose(batch, limits)
        with clock.part("target"), self._memory_guard(self.target.name):
            scores = self._score(draft)
            assert scores.logits is not None
            logits = scores.logits
        with clock.part("verification"):
            bad = self._mend(logits)
            verdict, target_probs = self._decide(batch, draft, logits)
            path, accepted, following = verdict.path.tolist(), verdict.counts.tolist(), verdict.tokens.tolist()
            healthy = self._check(bad, path, accepted)
        with clock.part("drafter"):
            self.drafter.observe(batch, draft, verdict, logits)
        with clock.part("target"):
            root = verdict.path.new_zeros((len(self._active), 1))
            kept = torch.cat([root, verdict.path], dim=1)
            self._cache.commit(self._spread(kept), self._spread(verdict.counts + 1))
        starts = [len(row.sequence.tokens) - 1 for row in self._active] if self._hidden_layers else []
        self._extend(draft, path, accepted, following, logits, target_probs, healthy)
        if self._hidden_layers:
            with clock.part("drafter"):
                self._tell(starts, accepted, kept, scores.hidden)
        self._read_again(healthy)
        seconds = clock.stop()
        for row in self._active:
            for name, value in seconds.items():
                row.stats.seconds[name] += value
        self._learn(draft.width, limits, accepted, seconds, clean)
        self._leave()

    def _limits(self) -> list[int]:
        """How many tokens each row may draft this round.

        A round emits one token more than it accepts: that bounds the length of a chain, and the depth of a tree, whose
        nodes are as many as they may be where a single one is of use.
        """
        room = [_room(row) for row in self._active]
        most = [
            MAX_SPECULATIVE_TOKENS if room and self._branches and row.verifier.trees else room
            for row, room in zip(self._active, room, strict=True)
        ]
        self._unread = [row.drafter_lag for row in self._active]
        numbers = list(self._numbers)
        if None in numbers:
            free = [place for place, number in enumerate(numbers) if number is None]
            unread = [self._unread[place] for place in free]
            requests = [self._acceptance(self._active[place]) for place in free]
            k = self.controller.choose(requests, [room[place] for place in free], unread, self.crowded)
            # Those that the drafter has the least to read of, where a few will do; the others have to do without.
            by_effort = sorted(zip(unread, free, strict=True))
            for rank, (_, place) in enumerate(by_effort):
                numbers[place] = k if self.controller.sample is None or rank < self.controller.sample else 0
        return [min(number or 0, limit) for number, limit in zip(numbers, most, strict=True)]

    def _acceptance(self, row: Row) -> Acceptance:
        if row.acceptance is None:
            row.acceptance = self.controller.new_record(memory=30)
        return row.acceptance

    def _fixed(self, row: Row) -> int | None:
        """The number of tokens that a row is drafted; None where the controller chooses it."""
        if isinstance(self.drafter, NoDrafter):
            return 0
        number = self.k if row.num_speculative_tokens is None else row.num_speculative_tokens
        if number != AUTO:
            return number
        return self.controller.first if self._depends_on_k(row) else None

    def _depends_on_k(self, row: Row) -> bool:
        """Whether a seed that the request names would give another text with another number."""
        params, verifier = row.sequence.params, row.verifier
        sampled = not (params.greedy and verifier.lossless) and not is_coupled(verifier)
        return sampled and params.seed is not None

    def _learn(
        self, width: int, limits: list[int], accepted: list[int], seconds: Mapping[str, float], clean: bool
    ) -> None:
        fixed = set(self._numbers)
        # Rows that draft different numbers of tokens tell what no number costs or gives to all.
        if fixed == {None} or (self.k == AUTO and len(fixed) == 1):
            requests = [self._acceptance(row) for row in self._active]
            self.controller.learn(limits, width, accepted, requests, seconds, clean, self._unread)
        for row, limit in zip(self._active, limits, strict=True):
            row.drafted_last = limit > 0
            if row.drafted_last:
                row.drafter_length = len(row.sequence.tokens)

    def _prefill(self) -> bool:
        """Bring the cache up to each row's root, which the round itself scores; whether there was anything to do.

        A chunk at a time while other rows wait to go on: who can take part in this round is settled here.
        """
        worked = False
        while True:
            self._prefixes.copy()
            lengths = self._cache.lengths.tolist()
            missing = [row.sequence.tokens[length:-1] for row, length in zip(self.rows, lengths, strict=True)]
            places = [place for place, tokens in enumerate(missing) if not tokens]
            if len(places) == len(self.rows) or (worked and places):
                break
            waiting = self._prefixes.waiting()
            chunks = [
                [] if waits else tokens[: self.limits.prefill_tokens]
                for tokens, waits in zip(missing, waiting, strict=True)
            ]
            self._read(chunks, missing)
            worked = True
        active = [self.rows[place] for place in places]
        if active != self._active:
            self._sampler = None
        self._places, self._active = places, active
        return worked

    def _read(self, chunks: list[list[int]], missing: list[list[int]]) -> None:
        """Read parts of prompts; the last ones in the pass that scores the round, of targets that can do so.

        Texts that others wait to copy are read at once, for a row may end with its first round.
        """
        if self.target.prefills_with_decode and not self._hidden_layers:
            along = [
                len(chunk) == len(tokens) and not awaited
                for chunk, tokens, awaited in zip(chunks, missing, self._prefixes.awaited(), strict=True)
            ]
            self._cache.defer_prefill([chunk if last else [] for chunk, last in zip(chunks, along, strict=True)])
            chunks = [[] if last else chunk for chunk, last in zip(chunks, along, strict=True)]
        if not self._hidden_layers:
            feed(self.target, self._cache, chunks)
            return
        sequences = [row.sequence for row in self.rows]
        feed(
            self.target,
            self._cache,
            chunks,
            hidden_layers=self._hidden_layers,
            heard=lambda starts, counts, hidden: self.drafter.observe_hidden(sequences, starts, counts, hidden),
        )

    def _tell(self, starts: list[int], accepted: list[int], kept: Tensor, hidden: AbstractSequence[Tensor]) -> None:
        """Give the drafter the hidden states of the root and of the nodes that were kept, as far as the text goes."""
        lengths = [len(row.sequence.tokens) for row in self._active]
        counts = [
            min(count + 1, length - start) for count, length, start in zip(accepted, lengths, starts, strict=True)
        ]
        nodes = kept.to(hidden[0].device)[..., None]
        states = [layer.gather(1, nodes.expand(-1, -1, layer.shape[-1])) for layer in hidden]
        self.drafter.observe_hidden([row.sequence for row in self._active], starts, counts, states)

    def _spread(self, values: Tensor) -> Tensor:
        """Values of the rows that take part as values of all rows, 0 for the others."""
        if len(self._places) == len(self.rows):
            return values
        spread = values.new_zeros((len(self.rows), *values.shape[1:]))
        spread[self._places] = values
        return spread

    def _batch(self) -> Batch:
        sequences = [row.sequence for row in self._active]
        if self._sampler is None:
            self._sampler = (self._make_sampler or self._own_sampler)(sequences)
            self._rules = self._rules_of(self._sampler)
            self._numbers = [self._fixed(row) for row in self._active]
        return Batch(
            sequences,
            self._sampler,
            seeds=self._sampler.seeds,
            positions=self._sampler.positions(sequences),
            vocab_size=self.target.vocab_size,
            shared_noise=tuple(is_coupled(row.verifier) for row in self._active),
            trees=tuple(row.verifier.trees and self.target.supports_trees for row in self._active),
            depths=tuple(_room(row) for row in self._active),
            cache=self._cache,
            places=tuple(self._places),
            drawn_only=tuple(row.verifier.drawn_only for row in self._active),
            reproducible=tuple(map(self._depends_on_k, self._active)),
        )

    def _rules_of(self, sampler: Sampler) -> list[_Rule]:
        """The verifiers of the rows that take part."""
        places: dict[int, list[int]] = {}
        for place, row in enumerate(self._active):
            places.setdefault(id(row.verifier), []).append(place)
        return [
            _Rule(self._active[group[0]].verifier, group, sampler.select(group) if len(places) > 1 else sampler)
            for group in places.values()
        ]

    def _own_sampler(self, sequences: AbstractSequence[Sequence]) -> Sampler:
        return Sampler(
            [sequence.params for sequence in sequences],
            [sequence.seed for sequence in sequences],
            vocab_size=self.target.vocab_size,
            eos_token_ids=self.target.eos_token_ids,
            device=self.target.device,
        )

    def _propose(self, batch: Batch, limits: list[int]) -> Draft:
        draft = self.drafter.propose(batch, limits) if any(limits) else Draft.empty(len(limits), batch.device)
        if draft.is_chain:
            return draft
        if not self.target.supports_trees and not draft.has_chains():
            raise ParameterError(
                f"{self.target.name} scores chains alone, and {self.drafter.name!r} drafts trees: use another drafter"
            )
        for rule in self._rules:
            if not rule.verifier.trees and not draft.part(rule.places).has_chains():
                raise ParameterError(
                    f"verifier {rule.verifier.name!r} takes chains, and {self.drafter.name!r} drafts trees: "
                    "use a verifier for trees: 'traversal', 'tree' or 'coupled'"
                )
        return draft

    def _score(self, draft: Draft) -> Scores:
        roots = torch.tensor([[row.sequence.tokens[-1]] for row in self._active], device=draft.tokens.device)
        tokens = torch.cat([roots, draft.tokens], dim=1)
        parents = torch.cat([torch.full_like(roots, -1), draft.parents], dim=1)
        counts = self._spread(draft.counts + 1)
        scores = self.target.forward(
            self._spread(tokens), self._spread(parents), counts, self._cache, hidden_layers=self._hidden_layers
        )
        if len(self._places) == len(self.rows):
            return scores
        assert scores.logits is not None
        return Scores(scores.logits[self._places], tuple(layer[self._places] for layer in scores.hidden))

    def _decide(self, batch: Batch, draft: Draft, logits: Tensor) -> tuple[Verdict, Tensor | None]:
        """What every row keeps of its draft, by its own verifier, and the target's law where it is to be shown."""
        parts: list[tuple[Verdict, Tensor | None]] = []
        for rule in self._rules:
            if len(self._rules) == 1:
                return decide_batch(rule.verifier, rule.sampler, batch.sequences, draft, logits, self.trace)
            sequences = [batch.sequences[place] for place in rule.places]
            part, scores = draft.part(rule.places), logits[rule.places]
            if not draft.is_chain and part.has_chains():
                part = part.chains()
            found, law = decide_batch(
                rule.verifier, rule.sampler, sequences, part, scores[:, : part.width + 1], self.trace
            )
            if law is not None:
                law = torch.nn.functional.pad(law, (0, 0, 0, draft.width - part.width))
            parts.append((found, law))
        order = torch.tensor([place for rule in self._rules for place in rule.places], device=logits.device).argsort()
        laws = [law for _, law in parts if law is not None]
        return join([verdict for verdict, _ in parts], order), torch.cat(laws)[order] if laws else None

    def _mend(self, logits: Tensor) -> list[list[bool]] | None:
        """Which nodes have scores that can't be sampled from, if any; they get some that let the round go on."""
        if all_finite(logits):
            return None
        bad = ~logits.amax(-1).isfinite()
        logits[bad] = 0
        rows: list[list[bool]] = bad.tolist()
        return rows

    def _check(self, bad: list[list[bool]] | None, path: list[list[int]], accepted: list[int]) -> list[bool]:
        """Which rows have usable scores wherever the target itself would have come; the others fail."""
        if bad is None:
            return [True] * len(self._active)
        healthy = [
            not any(nodes[node] for node in [0, *steps[:count]])
            for nodes, steps, count in zip(bad, path, accepted, strict=True)
        ]
        for row, is_healthy in zip(self._active, healthy, strict=True):
            if not is_healthy and not self._prefixes.is_fresh_copy(row):  # a copy gets another chance
                row.fail(
                    NumericalError(
                        f"{self.target.name} gave scores with NaN or infinity (or nothing but -inf) after "
                        f"{len(row.sequence.tokens):,} tokens: nothing can be sampled from them; load the model with "
                        "dtype='float32', or check its weights"
                    )
                )
        return healthy

    def _extend(
        self,
        draft: Draft,
        path: list[list[int]],
        accepted: list[int],
        following: list[int],
        logits: Tensor,
        target_probs: Tensor | None,
        healthy: list[bool],
    ) -> None:
        tokens, counts = draft.tokens.tolist(), draft.counts.tolist()
        depths = None if draft.is_chain else draft.depths().tolist()
        traces = self._traces(draft, path, accepted, target_probs) if self.trace and target_probs is not None else None
        for place, row in enumerate(self._active):
            if not healthy[place]:
                continue
            count, nodes = counts[place], path[place][: accepted[place]]
            row_depths = list(range(1, count + 1)) if depths is None else depths[place][1 : count + 1]
            emitted = [tokens[place][node - 1] for node in nodes] + [following[place]]
            last: Origin
            if count == 0:
                last = "target"
            else:
                end = nodes[-1] if nodes else 0
                is_leaf = end == count if depths is None else end not in draft.parents[place, :count].tolist()
                last = "bonus" if is_leaf else "residual"
            origins: list[Origin] = ["accepted"] * len(nodes)
            taken = row.extend(emitted, [*origins, last])
            row.stats.record(row_depths, min(len(nodes), taken), taken)
            if row.logprobs is not None:
                self._add_logprobs(row, logits[place], [0, *nodes], emitted[:taken])
            if traces is not None:
                row.drafted = traces[place]

    def _read_again(self, healthy: list[bool]) -> None:
        """Have copies that turn out to be unusable read: what followed in the other text may have spoilt them."""
        spoilt = [row for row, good in zip(self._active, healthy, strict=True) if not good and not row.finished]
        self._prefixes.confirm([row for row in self._active if row not in spoilt])
        if not spoilt:
            return
        for row in spoilt:
            old = row.sequence
            # Another identity, for what the drafter knows of the old one is ahead of its tokens.
            row.sequence = Sequence(old.tokens, old.prompt_length, old.params, old.seed, old.source)
        self._prefixes.recompute(spoilt)
        self._sampler = None

    def _add_logprobs(self, row: Row, logits: Tensor, nodes: list[int], tokens: list[int]) -> None:
        assert row.logprobs is not None
        laws = logits[nodes[: len(tokens)]].float().log_softmax(-1)
        top = laws.topk(min(row.sequence.params.logprobs or 0, laws.shape[-1]))
        for law, token, ids, values in zip(laws, tokens, top.indices.tolist(), top.values.tolist(), strict=True):
            row.logprobs.append(TokenLogprob(token, float(law[token]), dict(zip(ids, values, strict=True))))

    def _traces(
        self, draft: Draft, path: list[list[int]], accepted: list[int], target_probs: Tensor
    ) -> list[tuple[DraftedToken, ...]]:
        depths = draft.depths().tolist()
        tokenizer = self.target.tokenizer
        result = []
        for place, count in enumerate(draft.counts.tolist()):
            kept = set(path[place][: accepted[place]])
            trace = []
            for node in range(1, count + 1):
                token, parent = int(draft.tokens[place, node - 1]), int(draft.parents[place, node - 1])
                trace.append(
                    DraftedToken(
                        token,
                        tokenizer.decode([token]) if tokenizer is not None else "",
                        depths[place][node],
                        node in kept,
                        float(target_probs[place, parent, token]),
                        1.0 if draft.probs is None else float(draft.probs[place, parent, token]),
                    )
                )
            result.append(tuple(trace))
        return result

    def _leave(self) -> None:
        if self._prefixes.remove_finished():
            self._active, self._places = [], []
            self._sampler = None

    @contextmanager
    def _memory_guard(self, name: str) -> Iterator[None]:
        try:
            yield
        except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
            if not _is_out_of_memory(error):
                raise
            raise OutOfMemory(
                f"out of memory in {name} with {len(self.rows)} rows of up to "
                f"{max(len(row.sequence.tokens) for row in self.rows):,} tokens: lower max_batch_size, "
                "num_speculative_tokens, the prompt's length or max_new_tokens"
            ) from error


def _room(row: Row) -> int:
    """Most tokens that a round of the row can accept, for it emits one more."""
    return max(0, row.remaining - 1)


def _is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, OutOfMemory):
        return False
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)
