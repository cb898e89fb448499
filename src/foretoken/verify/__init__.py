"""Verifiers: which draft tokens are accepted, and which token follows, so that the output is the target's own.

This package is mathematics: it imports no model and no drafter. `base` has the contract, and each verifier a module of
its own; `residual` and `trees` have what they share. `decide` draws a round's outcome, on a CPU by the shortcuts of
`fast`. `exact` proves a verifier lossless by enumeration (with `drawn`, that of what `decide` draws), and `bounds`
computes how many tokens any lossless verifier can accept.
"""

from __future__ import annotations

from functools import lru_cache

from foretoken.errors import ParameterError, did_you_mean, shown
from foretoken.verify.base import AnyVerifier, CoupledVerifier, Verdict, Verifier, is_coupled
from foretoken.verify.block import BlockVerifier
from foretoken.verify.coupled import SharedNoiseVerifier
from foretoken.verify.decide import decide
from foretoken.verify.ensemble import EnsembleVerifier
from foretoken.verify.kseq import KSeqVerifier
from foretoken.verify.lenient import LenientVerifier
from foretoken.verify.residual import adjusted_distribution
from foretoken.verify.token import TokenVerifier, UnadjustedTokenVerifier
from foretoken.verify.traversal import TraversalVerifier
from foretoken.verify.tree import TreeVerifier
from foretoken.verify.typical import TypicalVerifier

__all__ = [
    "AnyVerifier",
    "CoupledVerifier",
    "EnsembleVerifier",
    "LenientVerifier",
    "SharedNoiseVerifier",
    "TypicalVerifier",
    "Verdict",
    "Verifier",
    "adjusted_distribution",
    "decide",
    "get",
    "is_coupled",
    "names",
    "usual",
]

_VERIFIERS: dict[str, AnyVerifier] = {
    verifier.name: verifier
    for verifier in (
        TokenVerifier(),
        BlockVerifier(),
        TreeVerifier(),
        TraversalVerifier(),
        KSeqVerifier(),
        SharedNoiseVerifier(),
        TypicalVerifier(),
        LenientVerifier(),
        EnsembleVerifier(),
        UnadjustedTokenVerifier(),
    )
}

_PARAMETERS: dict[str, type[TypicalVerifier | LenientVerifier | EnsembleVerifier]] = {
    cls.name: cls for cls in (TypicalVerifier, LenientVerifier, EnsembleVerifier)
}


def get(name: str | AnyVerifier) -> AnyVerifier:
    """The verifier of that name; an object that is a verifier already is returned as it is.

    Verifiers with parameters take them after a colon, in the order of their constructor: ``lenient:0.8``,
    ``ensemble:0.7``, ``typical:0.09,0.3``.

    Raises:
        ParameterError: no verifier has that name, or the parameters don't fit; the message names valid ones.
    """
    if isinstance(name, Verifier | CoupledVerifier) and not isinstance(name, type):
        return name
    if hasattr(name, "stop_probs") or hasattr(name, "follow"):
        kind = name.__name__ if isinstance(name, type) else type(name).__name__
        cure = "give an instance of it" if isinstance(name, type) else "make it a subclass of foretoken.verify.Verifier"
        raise ParameterError(f"verifier is a {kind}: {cure}")
    if not isinstance(name, str) or not name:
        raise ParameterError(
            f"verifier is {shown(name)}: give an instance of a verifier's class, or one of {', '.join(_VERIFIERS)}"
        )
    base, colon, values = name.partition(":")
    if base not in _VERIFIERS:
        raise ParameterError(
            f"unknown verifier {shown(name)}{did_you_mean(base, _VERIFIERS)}: choose one of {', '.join(_VERIFIERS)}"
        )
    if not colon:
        return _VERIFIERS[base]
    if base not in _PARAMETERS:
        raise ParameterError(
            f"verifier {base!r} takes no parameters: got {shown(values)}, leave out what follows the name"
        )
    try:
        return _with_parameters(base, values)
    except (TypeError, ValueError) as error:
        if isinstance(error, ParameterError):
            raise
        raise ParameterError(
            f"can't read parameters {shown(values)}: write {base}:0.5, or {base} for defaults"
        ) from None


def usual(trees: bool) -> str:
    """The name of the default verifier, the one that accepts most: for drafts that may branch, or for chains.

    Both of them decide on a draft as a whole; on chains they are the same. Verifiers that decide token by token accept
    as many chosen tokens, and fewer drawn ones.
    """
    return TraversalVerifier.name if trees else BlockVerifier.name


def names() -> tuple[str, ...]:
    """Names of all verifiers, the lossless ones first."""
    return tuple(sorted(_VERIFIERS, key=lambda name: not _VERIFIERS[name].lossless))


@lru_cache(maxsize=64)
def _with_parameters(name: str, values: str) -> AnyVerifier:
    """One object for the same text: rows that share a verifier are verified together."""
    return _PARAMETERS[name](*map(float, values.split(",")))
