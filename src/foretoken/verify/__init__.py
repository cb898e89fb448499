"""Verifiers: which drafted tokens to keep, and what to say next, so that the output has the target's law.

This package is mathematics: it imports no model and no drafter.
"""

from __future__ import annotations

from foretoken.errors import ParameterError
from foretoken.verify.base import AnyVerifier, CoupledVerifier, Verdict, Verifier, decide
from foretoken.verify.coupled import CoupledVerifier as _Coupled
from foretoken.verify.residual import adjusted_distribution
from foretoken.verify.token import TokenVerifier, UnadjustedTokenVerifier

__all__ = [
    "AnyVerifier",
    "CoupledVerifier",
    "Verdict",
    "Verifier",
    "adjusted_distribution",
    "decide",
    "get",
    "names",
]

_VERIFIERS: dict[str, AnyVerifier] = {
    verifier.name: verifier for verifier in (TokenVerifier(), _Coupled(), UnadjustedTokenVerifier())
}


def get(name: str | AnyVerifier) -> AnyVerifier:
    """The verifier of that name; an object that is a verifier already is returned as it is.

    Raises:
        ParameterError: no verifier has that name; the message lists those there are.
    """
    if isinstance(name, Verifier | CoupledVerifier):
        return name
    if name not in _VERIFIERS:
        raise ParameterError(f"unknown verifier {name!r}: choose one of {', '.join(_VERIFIERS)}")
    return _VERIFIERS[name]


def names() -> tuple[str, ...]:
    """Names of all verifiers, the lossless ones first."""
    return tuple(sorted(_VERIFIERS, key=lambda name: not _VERIFIERS[name].lossless))
