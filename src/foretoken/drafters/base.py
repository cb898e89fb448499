"""The contract of a drafter: `Drafter`, and `Batch`, a round as drafters see it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass
from inspect import signature

import torch
from torch import Tensor

from foretoken.draft import Draft, check_proposal
from foretoken.drafters.per_sequence import PerSequence
from foretoken.drafters.plain_rounds import PlainRounds
from foretoken.drafters.row_rounds import RowRounds
from foretoken.drafters.tree_plan import TreePlan
from foretoken.models.base import Cache, LanguageModel
from foretoken.sampling import Sampler
from foretoken.sequence import Sequence
from foretoken.verify.base import Verdict


@dataclass(frozen=True)
class Batch:
    """The rows of one round.

    Attributes:
        sequences: one a row; drafters read them and never change them.
        sampler: the rows' sampling parameters.
        seeds: ``[B]`` int64, key of each row's randomness.
        positions: ``[B]`` int64, tokens of each row: the absolute position of the first token to come.
        vocab_size: the target's; a drafter never proposes a token at or above it.
        shared_noise: of each row, whether its verifier is a coupled one. There a drafter with a distribution of its own
            should propose the token that this picks under the noise it shares with the target (`Sampler.picks`); the
            draft's `probs` are ignored in such a row.
        trees: of each row, whether its verifier and the target take trees; elsewhere a drafter drafts a chain.
        depths: of each row, the longest path that can still be emitted; empty where it was not computed. Longer paths
            are allowed, and useless.
        cache: the target's KV cache, for drafters that run layers of the target itself: it holds every token of each
            row but the root. Such drafters drop the tentative nodes that they append.
        slots: of each row, its row of `cache`; rows that are still in prefill may lie between.
        drawn_only: of each row, whether siblings have to be drawn, with replacement; empty where there is no such row.
            See `takes_chosen_trees`.
        reproducible: of each row, whether its request names a seed and its output depends on its drafts: since a seed
            has to give one output, such a draft must not depend on other rows, other requests or the clock; empty where
            there is no such row.
        drafters: of each row, the names of the drafters that may draft in it, None for all; empty where all rows take
            all drafters.
        begun: of each row, tokens of another drafter with which its draft begins: a drafter that `extends` such drafts
            proposes the tokens after them; empty where there are none.
        least: of each row, the probability of being accepted, with all before it, below which a token is not worth its
            verification: drafters that know it (`Drafter.estimates`) leave such tokens out; empty where it is not
            known.
        exact: of each row, whether its limit is a draft length fixed by the user, not a bound on the policy's choice;
            empty where there is no such row.
    """

    sequences: list[Sequence]
    sampler: Sampler
    seeds: Tensor
    positions: Tensor
    vocab_size: int
    shared_noise: tuple[bool, ...]
    trees: tuple[bool, ...]
    depths: tuple[int, ...] = ()
    cache: Cache | None = None
    slots: tuple[int, ...] = ()
    drawn_only: tuple[bool, ...] = ()
    reproducible: tuple[bool, ...] = ()
    least: tuple[float, ...] = ()
    exact: tuple[bool, ...] = ()
    drafters: tuple[frozenset[str] | None, ...] = ()
    begun: tuple[tuple[int, ...], ...] = ()

    @property
    def device(self) -> torch.device:
        """The device that the draft belongs on."""
        return self.seeds.device

    def with_least(self, least: tuple[float, ...]) -> Batch:
        """The same round with this `least`; `dataclasses.replace` takes ten times as long."""
        made, values = object.__new__(Batch), self.__dict__.copy()
        values["least"] = least
        object.__setattr__(made, "__dict__", values)
        return made

    def takes_chosen_trees(self, row: int) -> bool:
        """Whether a row's draft may branch where its tokens are chosen by a rule rather than drawn."""
        return self.trees[row] and not (self.drawn_only and self.drawn_only[row])


class Drafter(PlainRounds, ABC):
    """Proposes tokens, which the target then verifies.

    A drafter of your own implements `propose`; everything else has a default. Rows may join, leave or change places
    between any two calls, and rounds may pass without a call: a drafter compares what it knows of a sequence with
    ``sequence.tokens`` and catches up. It keeps what it knows of sequences in a `foretoken.drafters.PerSequence`, which
    makes a sequence's state on first use and drops it with the sequence. A proposal may depend on nothing but the
    sequences' tokens and the drafter's own draws (`foretoken.randomness.uniforms`).

    Attributes:
        name: used in messages and reports; the class's name where a class gives none.
        models: the language models that it runs. The engine checks that they fit the target, and counts their KV
            caches against `cache_memory`.
        own_threads: proposals don't use torch's threads: they are computed in plain Python, or on another library's
            threads. Where neither target nor drafter does, the engine limits torch to one thread during a round.
        tree: which trees it grows, if that can be chosen; it may be replaced between two calls. None for drafters
            without a choice.
        hidden_layers: layers of the target whose hidden states it needs, as in `LanguageModel.forward`: 0 is the
            embeddings, and the last layer's are normalised. The engine passes them to `observe_hidden`.
        reads_cache: proposals read `Batch.cache`, which has to hold every token of each row but the root.
        quantize: how its own weights (`num_parameters`) were quantised; None for not at all.
        drafters: the drafters that it is made of, in the order in which it asks them.
        note: what a user should know about the choice of this drafter, in one sentence; empty for nothing.
        matches: for drafters that look up how a sequence went on before: for each sequence, the length of the suffix
            that the last proposal continued, 0 where there was none. None for all other drafters.
        estimates: for drafters that know how likely their drafts are: for each sequence and each node of the last
            proposal, the probability that it is accepted, with all nodes above it. None for all other drafters.
        foreseen: for drafters that draft without a model: for each sequence and each token of the last round, whether
            the drafter would have drafted that token there. None for all other drafters.
        call_sizes: numbers of draft tokens that a single call can make, in rising order. Other numbers are made up of
            these, and surplus tokens dropped. Empty where each token takes a step.
        extends: proposals may begin behind tokens that another drafter drafted (`Batch.begun`).
        max_length: tokens of the longest sequence that it drafts for; None for no limit.
    """

    name: str = ""
    models: tuple[LanguageModel, ...] = ()
    own_threads: bool = False
    tree: TreePlan | None = None
    hidden_layers: tuple[int, ...] = ()
    reads_cache: bool = False
    quantize: str | None = None
    drafters: tuple[Drafter, ...] = ()
    note: str = ""
    matches: PerSequence[int] | None = None
    estimates: PerSequence[list[float]] | None = None
    foreseen: PerSequence[list[bool]] | None = None
    call_sizes: tuple[int, ...] = ()
    extends: bool = False
    max_length: int | None = None

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.name in ("", *(base.__name__ for base in cls.__mro__[1:])):  # the class body sets none
            cls.name = cls.__name__

    def __repr__(self) -> str:
        """The class with the settings that its constructor takes and keeps under the same name."""
        settings = [name for name in signature(type(self)).parameters if name in vars(self)]
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in settings)})"

    @property
    def trees(self) -> bool:
        """Whether drafts may branch; a class attribute ``trees = True`` says so. By default, what `tree` says.

        With ``verifier="auto"`` such a drafter gets a verifier for trees, and ``num_speculative_tokens`` counts nodes.
        """
        return self.tree is not None and self.tree.branches

    @property
    def num_parameters(self) -> int:
        """Weights of its own, those of `models` not counted."""
        return 0

    @abstractmethod
    def propose(self, batch: Batch, limits: AbstractSequence[int]) -> Draft:
        """A draft for every row.

        Args:
            batch: the rows.
            limits: most tokens that each row may draft; 0 is allowed.

        Returns:
            A row for each sequence of the batch. The engine checks what a drafter of your own returns
            (`foretoken.draft.check_proposal`).
        """

    def reads(self, batch: Batch) -> bool:
        """Whether the drafter can `read` the single row of a batch; by default it can't."""
        return False

    def read(self, batch: Batch, most: int) -> list[bool]:
        """Read what the drafter has not seen of a single row, to tell whether it is of use before it drafts.

        Only where it `reads` the row.

        Args:
            batch: of that row.
            most: of how many tokens of the output, the last ones, it is to be told whether the drafter foresees them.

        Returns:
            Of each of these that it had not seen, whether it would have drafted that token there; empty where it can't
            tell, as with scores that are no numbers.
        """
        return []

    def in_row(self, batch: Batch, limit: int) -> RowRounds | None:
        """Rounds of a single row, in place of as many calls of `propose`, `observe` and `observe_seconds`.

        Called where `propose` would be, if nothing but a row's tokens is wanted: no log-probabilities and no trace, no
        grammar and no stop strings.

        Args:
            batch: of that row.
            limit: most tokens of each draft.

        Returns:
            None where each round takes these calls, as by default.
        """
        return None

    def observe(self, batch: Batch, draft: Draft, verdict: Verdict, logits: Tensor) -> None:
        """Learn from a round. Called after verification, before the batch's sequences are extended.

        Args:
            batch: as at `propose`.
            draft: the draft that was verified, which may be another drafter's.
            verdict: which tokens were accepted, and the token after them.
            logits: ``[B, N+1, V]``, the target's raw logits after each node.
        """
        return

    def judge(self, sequences: AbstractSequence[Sequence]) -> None:
        """Learn from the tokens that were appended to these sequences since the last proposal.

        Called instead of `observe` where another engine verifies, whose logits and verdicts are not available.
        """
        return

    def observe_hidden(
        self,
        sequences: AbstractSequence[Sequence],
        starts: AbstractSequence[int],
        counts: AbstractSequence[int],
        hidden: AbstractSequence[Tensor],
    ) -> None:
        """Receive the target's hidden states of tokens of the sequences, once for each token, in order.

        Called only if there are `hidden_layers`: with the prompt's tokens before the first call of `propose`, and with
        the root and the accepted tokens after every round, when the sequences have been extended. At `propose`, those
        of all tokens but the root have been passed.

        Args:
            sequences: the rows.
            starts: of each row, the position of the first of these tokens.
            counts: of each row, how many tokens; 0 is allowed.
            hidden: of each of the `hidden_layers`, ``[B, N, H]``: entry ``[b, i]`` belongs to token ``starts[b] + i``.
        """
        return

    def warm_up(self, drawn: bool) -> None:
        """Compile what drafts need; by default, what chains of the `models` need.

        Called before the first request of a kind.

        Args:
            drawn: for requests whose draft tokens are drawn; else for those whose tokens are chosen.
        """
        for model in self.models:
            model.warm_up_chains(drawn)

    def check_target(self, target: LanguageModel) -> None:
        """Check that the drafter can draft for the target; called before the first round.

        Raises:
            ForetokenError: it can't.
        """
        return

    def observe_seconds(self, seconds: float | None) -> None:
        """Learn how long a round took. Called at its end.

        Args:
            seconds: of the whole round; None where it also prefilled prompts, or verified tokens that grammars force.
        """
        return

    def keep_costs(self, key: str) -> None:
        """Load the costs that earlier processes stored under this key, and store new measurements there.

        Args:
            key: names the machine, the models and the drafter.
        """
        return


def proposal(drafter: Drafter, batch: Batch, limits: AbstractSequence[int]) -> Draft:
    """What a drafter proposes; a proposal of a drafter that is not the library's is checked first.

    Args:
        drafter: that is asked.
        batch: see `Drafter.propose`.
        limits: see `Drafter.propose`.

    Raises:
        ParameterError: see `foretoken.draft.check_proposal`.
    """
    made = drafter.propose(batch, limits)
    if type(drafter).__module__.startswith("foretoken."):
        return made
    rows = zip(batch.sequences, batch.shared_noise, strict=True)
    return check_proposal(made, [not (shared or sequence.params.greedy) for sequence, shared in rows], drafter.name)


class NoDrafter(Drafter):
    """Proposes nothing: every round is one plain decoding step of the target."""

    name = "none"
    own_threads = True

    def propose(self, batch: Batch, limits: AbstractSequence[int]) -> Draft:
        """An empty draft."""
        return Draft.empty(len(batch.sequences), batch.device)
