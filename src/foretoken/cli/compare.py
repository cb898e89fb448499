"""The same request with speculation and without."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rich.table import Table

from foretoken.cli.answer import Answer

if TYPE_CHECKING:
    from foretoken.engine.engine import Engine
    from foretoken.engine.prompts import Prompt
    from foretoken.sampling import SamplingParams

_WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Comparison:
    """Two answers to one request."""

    name: str
    """Of what speculated."""
    speculative: Answer
    plain: Answer
    relation: str
    """What can be said of the two texts."""

    @property
    def equal(self) -> bool:
        """Whether they are the same tokens."""
        return self.speculative.token_ids == self.plain.token_ids

    @property
    def speed_up(self) -> float:
        """How many times the plain tokens a second the speculative ones are."""
        plain = self.plain.stats.tokens_per_second
        return self.speculative.stats.tokens_per_second / plain if plain else 0.0

    def table(self) -> Table:
        """The numbers, side by side."""
        ours, theirs = self.speculative.stats, self.plain.stats
        table = Table("", self.name, "target alone", title_justify="left")
        for column in table.columns[1:]:
            column.justify = "right"
        table.add_row("tokens", f"{ours.emitted:,}", f"{theirs.emitted:,}")
        table.add_row("seconds", *(f"{sum(stats.seconds.values()):.2f}" for stats in (ours, theirs)))
        table.add_row("tokens/s", *(f"{stats.tokens_per_second:.1f}" for stats in (ours, theirs)))
        table.add_row("speed-up", f"{self.speed_up:.2f}×", "1×", style="bold")
        table.add_row("target passes", f"{ours.rounds:,}", f"{theirs.rounds:,}")
        table.add_row("mean acceptance length", f"{ours.mean_acceptance_length:.2f}", "1")
        table.add_row("acceptance rate", f"{ours.acceptance_rate:.0%}" if ours.drafted else "–", "–")
        return table

    def as_json(self, trace: bool) -> dict[str, Any]:
        """For ``--json``: the speculative answer, and under ``compare`` the other one."""
        return {
            **self.speculative.as_json(trace),
            "compare": {
                "plain": self.plain.as_json(trace=False),
                "speed_up": self.speed_up,
                "texts_equal": self.equal,
                "relation": self.relation,
            },
        }


def plain_engine(engine: Engine) -> Engine:
    """The same target and verifier with nothing that drafts."""
    from foretoken.engine.engine import Engine

    return Engine(engine.target, None, engine.verifier, reuse_prefixes=False)


def fix_seed(engine: Engine, params: SamplingParams) -> SamplingParams:
    """The same seed for both texts where the verifier is a coupled one, which has one text to give for it."""
    from foretoken.randomness import fresh_seed
    from foretoken.verify import is_coupled

    if params.seed is not None or not is_coupled(engine.verifier):
        return params
    return replace(params, seed=fresh_seed())


def warm_up(engine: Engine, prompt: Prompt) -> None:
    """A few tokens that nobody sees: first passes are slow, and would be charged to whoever decodes first."""
    from foretoken.engine.prompts import encode
    from foretoken.sampling import SamplingParams

    few = encode(engine.target, prompt)[-_WARM_UP_TOKENS:]
    params = SamplingParams(max_new_tokens=_WARM_UP_TOKENS, ignore_eos=True, temperature=0)
    for one in (engine, plain_engine(engine)):
        one.generate(few, params)


def relation(engine: Engine, params: SamplingParams, speculative: Answer, plain: Answer) -> str:
    """What can be said of a speculative and a plain text, honestly."""
    from foretoken.verify import is_coupled

    verifier = engine.verifier
    if not verifier.lossless:
        return f"{verifier.name!r} is lossy: the first text is not drawn from the target's law"
    coupled = is_coupled(verifier)
    if not (params.greedy or coupled):
        return f"Both texts are draws from the target's law ({verifier.name!r} is lossless); they need not be equal."
    reason = "greedy decoding" if params.greedy else f"{verifier.name!r} verifier, seed {params.seed}"
    if speculative.token_ids == plain.token_ids:
        return f"The texts are equal, token by token ({reason})."
    pairs = zip(speculative.token_ids, plain.token_ids, strict=False)
    place = next((number for number, (ours, theirs) in enumerate(pairs, start=1) if ours != theirs), None)
    if place is None:
        return "One text is the beginning of the other: it was cut short."
    return (
        f"The texts part at token {place:,}: two tokens were so close there that rounding decided "
        f"({reason}; --dtype float32 makes this rarer)."
    )
