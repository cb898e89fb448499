"""The same request with speculation and without, in turns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from time import monotonic
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from rich.table import Table

from foretoken.cli.answer import Answer, run
from foretoken.cli.json_output import answer_json, settings_json

if TYPE_CHECKING:
    from foretoken.drafters.base import Drafter
    from foretoken.engine.engine import Engine
    from foretoken.engine.prompts import Prompt
    from foretoken.sampling import SamplingParams

RUNS = 15
"""Timed runs of each kind, at most."""
ENOUGH_RUNS = 5
"""Those of each kind after which further ones are begun only within `MORE_SECONDS`: where a run takes a tenth of a
second, other work on the machine moves the ratio of so few by a fifth."""
MORE_SECONDS = 4.0
MAX_SECONDS = 10.0
"""No further runs are begun after so much time."""
_WARM_UP_TOKENS = 16
_ready: WeakKeyDictionary[Drafter, set[bool]] = WeakKeyDictionary()
"""Whose engines were made ready, whether for greedy requests, whether for others: a chat compares again and again."""


@dataclass(frozen=True)
class Comparison:
    """Answers to one request, some with speculation and some without.

    Attributes:
        name: of the drafter.
        speculative: the answers with speculation, in the order of their runs.
        plain: those of the target alone, each of which ran after the speculative one of the same index.
        relation: how the two outputs relate: equal, or with equal distributions.
    """

    name: str
    speculative: list[Answer]
    plain: list[Answer]
    relation: str

    @property
    def runs(self) -> int:
        """Timed runs of each kind."""
        return len(self.plain)

    @property
    def equal(self) -> bool:
        """Whether both first answers are the same tokens."""
        return self.speculative[0].token_ids == self.plain[0].token_ids

    @property
    def speed(self) -> float:
        """Tokens a second with speculation: the median of the runs."""
        return _speed(self.speculative)

    @property
    def plain_speed(self) -> float:
        """Tokens a second of the target alone: the median of the runs."""
        return _speed(self.plain)

    @property
    def speed_up(self) -> float:
        """The ratio of the two medians."""
        return self.speed / self.plain_speed if self.plain_speed else 0.0

    @property
    def measured(self) -> str:
        """How the speeds were measured, in a sentence."""
        runs = "one run of each" if self.runs == 1 else f"medians of {self.runs} runs of each, in turns"
        return f"Speeds are {runs}, after a warm-up of both; prefill is included, loading is not."

    def table(self) -> Table:
        """The numbers side by side: speeds of all runs, the rest of the first ones, which were shown."""
        ours, theirs = self.speculative[0].stats, self.plain[0].stats
        table = Table("", self.name, "target alone", title_justify="left")
        for column in table.columns[1:]:
            column.justify = "right"
        table.add_row("tokens", f"{ours.emitted:,}", f"{theirs.emitted:,}")
        table.add_row("tokens/s", f"{self.speed:.1f}", f"{self.plain_speed:.1f}")
        table.add_row("speed-up", f"{self.speed_up:.2f}×", "1×", style="bold")
        table.add_row("target passes", f"{ours.rounds:,}", f"{theirs.rounds:,}")
        table.add_row("mean acceptance length", f"{ours.mean_acceptance_length:.2f}", "1")
        table.add_row("acceptance rate", f"{ours.acceptance_rate:.0%}" if ours.drafted else "nothing drafted", "–")
        return table

    def as_json(self, engine: Engine, params: SamplingParams, trace: bool) -> dict[str, Any]:
        """For ``--json``: the first speculative answer, and under ``compare`` the plain one and the speeds."""
        return {
            **settings_json(engine, params),
            **answer_json(engine, self.speculative[0], trace),
            "compare": {
                "plain": answer_json(engine, self.plain[0]),
                "speed_up": self.speed_up,
                "runs": self.runs,
                "tokens_per_second": [one.stats.tokens_per_second for one in self.speculative],
                "plain_tokens_per_second": [one.stats.tokens_per_second for one in self.plain],
                "measured": self.measured,
                "texts_equal": self.equal,
                "relation": self.relation,
            },
        }


def _speed(answers: list[Answer]) -> float:
    return median(answer.stats.tokens_per_second for answer in answers)


def plain_engine(engine: Engine) -> Engine:
    """The same target and verifier with nothing that drafts."""
    from foretoken.engine.engine import Engine

    return Engine(engine.target, None, engine.verifier, reuse_prefixes=False)


def fix_seed(engine: Engine, params: SamplingParams) -> SamplingParams:
    """The same seed for both outputs where the verifier is a coupled one, which has one output to give for it."""
    from foretoken.randomness import fresh_seed
    from foretoken.verify import is_coupled

    if params.seed is not None or not is_coupled(engine.verifier):
        return params
    return replace(params, seed=fresh_seed())


def warm_up(engine: Engine, plain: Engine, prompt: Prompt, params: SamplingParams) -> None:
    """Get both ready, and decode some tokens with the request's parameters: what an engine does once is not timed.

    The engine keeps nothing of them, nor of other requests: both ways are to prefill the prompt when they are timed.
    """
    from foretoken.engine.prompts import encode

    tokens = encode(engine.target, prompt)
    length = min(_WARM_UP_TOKENS, params.max_new_tokens)
    short = replace(params, max_new_tokens=length, min_new_tokens=0, ignore_eos=True, stop=(), stop_token_ids=())
    engine.check(tokens, params)
    kinds = _ready.setdefault(engine.drafter, set())
    for one in (engine, plain):
        if params.greedy not in kinds:
            one.warm_up(params)
        one.generate(tokens, short)
    kinds.add(params.greedy)
    _begin_anew(engine)


def _begin_anew(engine: Engine) -> None:
    """Have it prefill the prompt, as the plain engine does, and copy nothing from the runs before."""
    from foretoken.drafters.sharing import forget_requests

    engine.release()
    forget_requests(engine.drafter)


def alternate(
    engine: Engine,
    plain: Engine,
    prompt: Prompt,
    params: SamplingParams,
    speculative: list[Answer],
    alone: list[Answer],
    *,
    prediction: str | None = None,
    runs: int = RUNS,
    clock: Callable[[], float] = monotonic,
) -> bool:
    """Go on with silent runs of both kinds in turns, up to `runs` of each, and append them to what there is.

    Stops early after `MAX_SECONDS`, and once there are `ENOUGH_RUNS`, after `MORE_SECONDS`.

    Returns:
        Whether Ctrl-C ended a run, which then does not count.
    """
    begun = clock() - sum(sum(one.stats.seconds.values()) for one in (*speculative, *alone))
    while len(alone) < runs and clock() - begun < (MAX_SECONDS if len(alone) < ENOUGH_RUNS else MORE_SECONDS):
        _begin_anew(engine)
        ours = run(engine, prompt, params, prediction=prediction)
        theirs = run(plain, prompt, params) if not ours.interrupted else ours
        if theirs.interrupted:
            return True
        speculative.append(ours)
        alone.append(theirs)
    return False


def relation(engine: Engine, params: SamplingParams, speculative: Answer, plain: Answer) -> str:
    """How a speculative and a plain output relate."""
    from foretoken.verify import is_coupled

    verifier = engine.verifier
    if not verifier.lossless:
        return f"{verifier.name!r} is lossy: the first output is not drawn from the target's distribution"
    coupled = is_coupled(verifier)
    if not (params.greedy or coupled):
        return (
            f"Both outputs are drawn from the target's distribution ({verifier.name!r} is lossless); they need not be "
            "equal."
        )
    reason = "greedy decoding" if params.greedy else f"{verifier.name!r} verifier, seed {params.seed}"
    if speculative.token_ids == plain.token_ids:
        return f"The outputs are equal, token by token ({reason})."
    pairs = zip(speculative.token_ids, plain.token_ids, strict=False)
    position = next((number for number, (ours, theirs) in enumerate(pairs, start=1) if ours != theirs), None)
    if position is None:
        return "One output is the beginning of the other: it was cut short."
    return (
        f"The outputs differ from token {position:,} on: two tokens were so close there that rounding decided "
        f"({reason}; --dtype float32 makes this rarer)."
    )
