"""Recording of a round: its tokens and their origins go to the rows, with log-probabilities and seconds."""

from __future__ import annotations

from collections.abc import Sequence as AbstractSequence
from time import perf_counter

from torch import Tensor

from foretoken.draft import Draft
from foretoken.drafters.row_rounds import Drafted
from foretoken.engine.outputs import PARTS, Origin, TokenLogprob
from foretoken.engine.row import Row
from foretoken.engine.verification import Verified


class RoundClock:
    """Wall-clock seconds of the current round, by part; time before the first `turn_to` is ``other``.

    Args:
        learning: seconds that drafters took after the round before, which count as theirs in this one.
    """

    def __init__(self, learning: float = 0.0) -> None:
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._seconds["drafter"] = learning
        self._part, self._since = "other", perf_counter()

    def turn_to(self, part: str) -> None:
        """Count the time from now on as this part's."""
        now = perf_counter()
        self._seconds[self._part] += now - self._since
        self._part, self._since = part, now

    def so_far(self) -> float:
        """Seconds until now."""
        self.turn_to(self._part)
        return sum(self._seconds.values())

    def stop(self) -> dict[str, float]:
        """Stop, and return the seconds by part."""
        self.turn_to("other")
        return self._seconds

    def since_stop(self) -> float:
        """Seconds since `stop`."""
        return perf_counter() - self._since


_PLAIN: tuple[Origin, ...] = ("target",)
_ACCEPTED: tuple[Origin, ...] = ("accepted",)


def emit_plain(row: Row, tokens: AbstractSequence[int], *, more: bool = False) -> None:
    """Append the target's own tokens of passes without a draft, one each, to a row; `more` as in `emit`."""
    taken = row.extend(tokens, _PLAIN * len(tokens), more=more)
    row.stats.record((), 0, taken, rounds=taken)


def emit_drafted(row: Row, rounds: AbstractSequence[Drafted]) -> None:
    """Append the tokens of such rounds to a row, all as one event, until it ends."""
    for number, one in enumerate(rounds):
        if row.finished:  # or cancelled meanwhile
            break
        last: Origin = "target" if not one.drafted else "bonus" if one.accepted == one.drafted else "residual"
        taken = row.extend(one.tokens, (*_ACCEPTED * one.accepted, last), more=number > 0)
        row.stats.record(range(1, one.drafted + 1), min(one.accepted, taken), taken)


def emit(
    rows: AbstractSequence[Row],
    draft: Draft,
    verified: Verified,
    logits: Tensor,
    forced: AbstractSequence[AbstractSequence[int]] = (),
    *,
    more: bool = False,
) -> None:
    """Append a round's tokens to its rows: accepted draft tokens, then the token after them.

    Args:
        rows: of the round.
        draft: what was verified.
        verified: which tokens were accepted; of rows with unusable logits, those before these.
        logits: ``[B, N+1, V]``, the target's, for log-probabilities.
        forced: of each row, the tokens that its draft begins with because its grammar forces them; empty for
            none.
        more: put these tokens into the event of the tokens before them.
    """
    tokens, parents, counts = draft.listed
    depths = None if draft.is_chain else draft.depths().tolist()
    for index, row in enumerate(rows):
        count, nodes = counts[index], verified.accepted[index]
        if count == 0 and row.logprobs is None and verified.usable[index]:  # most rounds of a large batch
            row.stats.record((), 0, row.extend((verified.following[index],), _PLAIN, more=more))
            continue
        row_depths = list(range(1, count + 1)) if depths is None else depths[index][1 : count + 1]
        emitted = [tokens[index][node - 1] for node in nodes] + [verified.following[index]]
        last: Origin
        if count == 0:
            last = "target"
        else:
            end = nodes[-1] if nodes else 0
            is_leaf = end == count if depths is None else end not in parents[index][:count]
            last = "bonus" if is_leaf else "residual"
        origins: list[Origin] = [*["accepted"] * len(nodes), last]  # type: ignore[list-item]
        sound = verified.sound[index]
        taken = row.extend(emitted[:sound], origins[:sound], more=more)
        if not sound:
            continue
        predicted = draft.predicted[index] if draft.predicted else 0
        row.stats.record(row_depths, min(len(nodes), taken), taken, predicted, len(forced[index]) if forced else 0)
        if row.logprobs is not None:
            top = row.sequence.params.logprobs or 0
            row.logprobs += token_logprobs(logits[index], [0, *nodes], emitted[:taken], top)


def token_logprobs(logits: Tensor, nodes: list[int], tokens: list[int], top: int) -> list[TokenLogprob]:
    """Log-probabilities of emitted tokens, and of the most probable ones.

    Args:
        logits: ``[N+1, V]`` of one row.
        nodes: the node that each token follows; may be longer than `tokens`.
        tokens: emitted ones.
        top: how many of the most probable tokens to report.
    """
    log_probs = logits[nodes[: len(tokens)]].float().log_softmax(-1)
    best = log_probs.topk(min(top, log_probs.shape[-1]))
    return [
        TokenLogprob(token, float(row[token]), dict(zip(ids, values, strict=True)))
        for row, token, ids, values in zip(log_probs, tokens, best.indices.tolist(), best.values.tolist(), strict=True)
    ]
