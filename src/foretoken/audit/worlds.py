"""Small worlds: pairs of tiny random models whose joint distribution of the first tokens can be written down.

A world is an ordinary pair of checkpoints (Llama, 8 tokens, head size 32, so that every engine loads it), two prompts
and a claim. The target is sharp, and the drafter is wrong about it in a way that makes faults show: a *stranger* was
made independently and is mostly rejected, a *cousin* has the target's weights disturbed and is accepted about half of
the time, a *twin* has them disturbed a little and is mostly accepted. (Most faults act where both happen; some, only in
a round that is accepted whole, or at a first token that is rejected.)
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from foretoken.audit.errors import AuditError
from foretoken.audit.reference import ReferenceModel, enumerate_probs, joint
from foretoken.audit.statistics import Floats
from foretoken.audit.world_models import DISTURBANCE, LETTERS, LLAMA, Architecture, make_pair, make_tokenizer
from foretoken.sampling.params import SamplingParams

VOCAB_SIZE = 8
NUM_SPECULATIVE_TOKENS = 2
MAX_CELLS = 20_000
"""Most sequences whose joint distribution is enumerated."""

PROMPT_LENGTH = 12
MARGIN = 3e-4
"""Filters decide at least this clearly in a world, where a seed can be found."""

SHAPED = SamplingParams(temperature=0.7, top_k=6, top_p=0.9)
LEAST_MARGIN = 1e-6
"""Filters that decide less clearly than this are no claim to audit."""

ATTEMPTS = 12
"""Seeds tried for a world in which the filters decide clearly."""

_FILE = "world.json"
_MARK = " · "
"""Between the kind of a world and its claim, in its name."""


@dataclass(frozen=True, eq=False)
class World:
    """A target, a drafter, prompts and a claim.

    Attributes:
        name: what the report calls it.
        path: a folder with the checkpoints ``target`` and ``drafter``, tokenizer included.
        params: the claimed sampling parameters.
        prompts: token ids.
        depth: tokens whose joint distribution is tested: those of one round, k draft tokens and the one after them.
        num_speculative_tokens: k, what the subject should be set to.
    """

    name: str
    path: Path
    params: SamplingParams
    prompts: tuple[tuple[int, ...], ...]
    depth: int
    num_speculative_tokens: int

    @property
    def target_path(self) -> str:
        """Folder of the target."""
        return str(self.path / "target")

    @property
    def drafter_path(self) -> str:
        """Folder of the drafter."""
        return str(self.path / "drafter")

    @cached_property
    def target(self) -> Any:
        """The target as a transformers model, float32."""
        return _load(self.target_path)

    @cached_property
    def drafter(self) -> Any:
        """The drafter as a transformers model, float32."""
        return _load(self.drafter_path)

    @cached_property
    def target_reference(self) -> ReferenceModel:
        """The target in float64."""
        return ReferenceModel(self.target, torch.float64)

    @cached_property
    def drafter_reference(self) -> ReferenceModel:
        """The drafter in float64."""
        return ReferenceModel(self.drafter, torch.float64)

    @property
    def vocab_size(self) -> int:
        """Tokens, V."""
        return self.target_reference.vocab_size

    @cached_property
    def enumerated(self) -> list[tuple[list[Floats], list[Floats]]]:
        """For each prompt, the target's distributions after every sequence shorter than `depth`: ``[V ** d, V]``, and
        what filters left of them: ``[V ** d, 1]``."""
        return [self._enumerate(self.target_reference, prompt) for prompt in self.prompts]

    @cached_property
    def drafter_enumerated(self) -> list[tuple[list[Floats], list[Floats]]]:
        """Likewise of the drafter."""
        return [self._enumerate(self.drafter_reference, prompt) for prompt in self.prompts]

    def _enumerate(self, reference: ReferenceModel, prompt: Sequence[int]) -> tuple[list[Floats], list[Floats]]:
        levels, _, masses = enumerate_probs(reference, prompt, self.depth, self.params)
        return levels, masses

    @property
    def levels(self) -> list[list[Floats]]:
        """For each prompt, the target's distributions after every sequence shorter than `depth`: ``[V ** d, V]``."""
        return [levels for levels, _ in self.enumerated]

    @cached_property
    def joint_probs(self) -> list[Floats]:
        """For each prompt, the distribution of the first `depth` tokens, ``[V ** depth]``."""
        return [joint(levels) for levels in self.levels]

    @cached_property
    def drafter_joint_probs(self) -> list[Floats]:
        """For each prompt, the distribution of the first `depth` tokens that the drafter alone would write."""
        return [joint(levels) for levels, _ in self.drafter_enumerated]


def make_worlds(
    directory: str | Path,
    claims: Sequence[tuple[str, SamplingParams]] | None = None,
    num_speculative_tokens: int = NUM_SPECULATIVE_TOKENS,
    vocab_size: int = VOCAB_SIZE,
    seed: int = 0,
    architecture: Architecture = LLAMA,
) -> list[World]:
    """Make small worlds and save their checkpoints.

    Args:
        directory: a folder for the checkpoints; made if it is not there.
        claims: pairs of a kind, ``twin``, ``cousin`` or ``stranger``, and sampling parameters; None means a cousin at
            temperature 1, a twin with temperature, top-k and top-p, and a stranger at temperature 1.
        num_speculative_tokens: k. The joint distribution of k + 1 tokens is tested, or of as many as can be enumerated.
        vocab_size: tokens, 4 to 26.
        seed: of the weights.
        architecture: of target and drafter.

    Raises:
        AuditError: a size out of its range, an unknown kind, a folder that can't be written to, or a claim that no
            world separates from its ties.
    """
    if not 4 <= vocab_size <= len(LETTERS):
        raise AuditError(f"vocab_size={vocab_size}: a small world has 4 to {len(LETTERS)} tokens")
    if num_speculative_tokens < 1:
        raise AuditError(f"num_speculative_tokens={num_speculative_tokens}: an audit needs at least 1")
    if claims is None:
        claims = [("cousin", SamplingParams()), ("twin", SHAPED), ("stranger", SamplingParams())]
    if seed < 0:
        raise AuditError(f"seed={seed}: give 0 or more")
    depth = 1
    while depth <= num_speculative_tokens and vocab_size ** (depth + 1) <= MAX_CELLS:
        depth += 1
    directory = _writable(Path(directory))
    pairs: dict[tuple[str, int], tuple[Any, Any]] = {}
    worlds = []
    for kind, params in claims:
        if kind not in DISTURBANCE:
            raise AuditError(f"unknown kind of world {kind!r}: choose one of {', '.join(DISTURBANCE)}")
        best: tuple[float, World] | None = None
        for attempt in range(seed, seed + ATTEMPTS):
            if (kind, attempt) not in pairs:
                pairs[kind, attempt] = make_pair(kind, vocab_size, attempt, architecture)
            target, drafter = pairs[kind, attempt]
            reference = ReferenceModel(target, torch.float64)
            prompts = _prompts(reference, params, attempt)
            margin = min(enumerate_probs(reference, prompt, depth, params)[1] for prompt in prompts)
            if best is None or margin > best[0]:
                path = directory / f"{kind}-{attempt}"
                world = World(_named(kind, params), path, params, prompts, depth, num_speculative_tokens)
                world.__dict__.update(target=target, drafter=drafter, target_reference=reference)
                best = (margin, world)
            if margin >= MARGIN:
                break
        assert best is not None
        _check_margin(best[0], params, "every world tried")
        _save_pair(best[1])
        worlds.append(best[1])
    return worlds


def _writable(directory: Path) -> Path:
    """The folder, made if it is not there.

    Raises:
        AuditError: it is no folder, or can't be made.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        reason = "it is a file" if isinstance(error, FileExistsError) else getattr(error, "strerror", None) or error
        raise AuditError(f"worlds can't be saved in {str(directory)!r} ({reason}): name another folder") from error
    return directory


def save_world(world: World) -> Path:
    """Write what is needed to find the world again beside its checkpoints; returns that file."""
    fields = asdict(world.params)
    fields["logit_bias"] = [list(item) for item in (world.params.logit_bias or {}).items()]
    text = json.dumps(
        {
            "name": world.name,
            "params": fields,
            "prompts": world.prompts,
            "depth": world.depth,
            "num_speculative_tokens": world.num_speculative_tokens,
        },
        indent=1,
    )
    file = _writable(world.path) / _FILE
    file.write_text(text, encoding="utf-8")
    return file


def load_world(path: str | Path) -> World:
    """The world that `save_world` wrote into that folder, or into the one of its folders that holds a world.

    Raises:
        AuditError: there is none, or there are several.
    """
    if not (Path(path) / _FILE).exists():
        inside = sorted(file.parent for file in Path(path).glob(f"*/{_FILE}"))
        if len(inside) > 1:
            names = ", ".join(repr(str(folder)) for folder in inside)
            raise AuditError(f"{str(path)!r} holds several worlds: give one of {names}")
        path = inside[0] if inside else path
    file = Path(path) / _FILE
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        fields = data["params"]
        fields["logit_bias"] = dict(map(tuple, fields["logit_bias"])) or None
        prompts = tuple(tuple(prompt) for prompt in data["prompts"])
        params = SamplingParams(**fields)
        return World(data["name"], Path(path), params, prompts, data["depth"], data["num_speculative_tokens"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise AuditError(
            f"{str(path)!r} holds no world ({error}): make one with 'foretoken audit make-world {path}'"
        ) from error


def claimed(world: World, params: SamplingParams) -> World:
    """The same models and prompts under another claim.

    Raises:
        AuditError: its filters part tokens that are equal but for rounding.
    """
    reference, depth = world.target_reference, world.depth
    margin = min(enumerate_probs(reference, prompt, depth, params)[1] for prompt in world.prompts)
    _check_margin(margin, params, "this world")
    return replace(world, name=_named(world.name.partition(_MARK)[0], params), params=params)


def _named(kind: str, params: SamplingParams) -> str:
    return f"{kind}{_MARK}{describe(params)}"


def _check_margin(margin: float, params: SamplingParams, where: str) -> None:
    if margin < LEAST_MARGIN:
        raise AuditError(
            f"claim {describe(params)}: its filters part tokens that are equal to {LEAST_MARGIN:g} in {where}; "
            "change top_k, top_p or min_p a little"
        )


def describe(params: SamplingParams) -> str:
    """The parameters that shape the distribution, in a few words."""
    if params.greedy:
        return "greedy"
    default = SamplingParams()
    names = ("top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias")
    parts = [f"temperature {params.temperature:g}"]
    for name in names:
        value = getattr(params, name)
        if value != getattr(default, name):
            parts.append(f"{name} {value:g}" if isinstance(value, int | float) else f"{name} {value}")
    return ", ".join(parts)


def _prompts(reference: ReferenceModel, params: SamplingParams, seed: int) -> tuple[tuple[int, ...], ...]:
    """Two prompts with repeated pairs in them, so that n-gram lookup has something to find.

    Of several candidates, those after which the first token is most open.
    """
    rng = np.random.default_rng([seed, 1])
    candidates = []
    for _ in range(8):
        piece = rng.permutation(reference.vocab_size)[:4].tolist()
        tail = rng.integers(0, reference.vocab_size, PROMPT_LENGTH - 10).tolist()
        prompt = (*piece, *tail, *piece, *piece[:2])
        first = reference.probs(prompt, [[0]], params)[0][0]
        candidates.append((-float(np.log(np.where(first > 0, first, 1.0)) @ first), prompt))
    return tuple(prompt for _, prompt in sorted(candidates, reverse=True)[:2])


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Keep transformers from drawing bars of its own while it loads or saves."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _load(path: str) -> Any:
    from transformers import AutoModelForCausalLM

    with no_progress_bars():
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def _save_pair(world: World) -> None:
    tokenizer = make_tokenizer(world.vocab_size)
    with no_progress_bars():
        for model, folder in ((world.target, world.target_path), (world.drafter, world.drafter_path)):
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
