"""`generate` of transformers as a subject."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from foretoken.audit.errors import AuditError
from foretoken.audit.subjects import Sample, SampleRequest, Speculation
from foretoken.sampling.params import SamplingParams


class TransformersSubject:
    """`generate` of a transformers model.

    Args:
        module: the model.
        assistant: an assistant model, or None.
        options: further arguments of `generate`: ``prompt_lookup_num_tokens=3``, ``assistant_early_exit=1``, ….
        name: what the report calls it.
    """

    def __init__(
        self, module: Any, assistant: Any = None, options: dict[str, Any] | None = None, name: str | None = None
    ) -> None:
        import transformers

        self.module, self.assistant, self.options = module, assistant, dict(options or {})
        mode = "assistant model" if assistant is not None else ", ".join(f"{k}={v}" for k, v in self.options.items())
        self.name = name or f"transformers generate ({mode or 'plain'})"
        self.details = {"transformers": transformers.__version__, "torch": torch.__version__, "mode": mode or "plain"}
        # Plain decoding drafts nothing; for speculative modes None until their first rounds have been observed.
        self.speculation: Speculation | None = None if self.speculative else Speculation()

    @property
    def speculative(self) -> bool:
        """Whether a batch must be of one row."""
        keys = {"prompt_lookup_num_tokens", "assistant_early_exit", "assistant_model", "custom_generate", "use_mtp"}
        return self.assistant is not None or bool(keys & set(self.options))

    def sample(self, request: SampleRequest) -> list[Sample]:
        """Call `generate`; its global random state is seeded for the call and put back afterwards."""
        options = {**transformers_options(request.params, self.name), **self.options}
        if self.assistant is not None:
            options["assistant_model"] = self.assistant
        size = 1 if self.speculative else min(request.count, 256)
        device = self.module.device
        devices = [device] if device.type == "cuda" else []
        samples: list[Sample] = []
        prompt = torch.tensor([request.prompt], device=device)
        with torch.random.fork_rng(devices=devices), torch.inference_mode(), _recorded_rounds(self.module) as rounds:
            torch.manual_seed(request.seed)
            while len(samples) < request.count:
                rows = min(size, request.count - len(samples))
                batch = prompt.expand(rows, -1)
                rounds.clear()
                try:
                    output = self.module.generate(
                        batch,
                        attention_mask=torch.ones_like(batch),
                        max_new_tokens=request.num_tokens,
                        **options,
                    )
                except (RuntimeError, ValueError, TypeError, IndexError, AttributeError, KeyError) as error:
                    raise AuditError(f"{self.name} failed: {type(error).__name__}: {error}") from error
                ends = _ends(self.module)
                emitted = self._rounds(rounds)
                for row in output[:, prompt.shape[1] :].tolist():
                    tokens = _until_end(row, ends)
                    samples.append(Sample(tokens, emitted if emitted and sum(emitted) == len(tokens) else None))
        return samples

    def _rounds(self, rounds: Sequence[Speculation]) -> list[int] | None:
        """Tokens of each round of the last call, if rounds could be observed."""
        if not rounds:
            return None
        self.speculation = sum(rounds, self.speculation or Speculation())
        return [one.accepted + 1 for one in rounds]

    def close(self) -> None:
        """Nothing to release."""


@contextmanager
def _recorded_rounds(module: Any) -> Iterator[list[Speculation]]:
    """Record every round of assisted generation, by wrapping the candidate generator's method that is called after it.

    That generator is no public part of transformers: if another version makes or calls it in another way, nothing is
    recorded.
    """
    rounds: list[Speculation] = []
    make = getattr(module, "_get_candidate_generator", None)
    if make is None:
        yield rounds
        return

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        generator = make(*args, **kwargs)
        update = getattr(generator, "update_candidate_strategy", None)
        if update is not None:

            def recorded(input_ids: Any, scores: Any, num_matches: Any) -> Any:
                rounds.append(Speculation(int(scores.shape[1]) - 1, int(num_matches)))  # one score for each, one more
                return update(input_ids, scores, num_matches)

            generator.update_candidate_strategy = recorded
        return generator

    module._get_candidate_generator = wrapped
    try:
        yield rounds
    finally:
        del module._get_candidate_generator


def transformers_options(params: SamplingParams, name: str = "transformers generate") -> dict[str, Any]:
    """Sampling parameters as arguments of `generate`, its own defaults (such as top_k = 50) switched off.

    Raises:
        AuditError: it has no such parameter.
    """
    for field_name in ("presence_penalty", "frequency_penalty", "logit_bias"):
        if getattr(params, field_name):
            raise AuditError(f"{field_name}={getattr(params, field_name)}: {name} has no such parameter; leave it out")
    options: dict[str, Any] = {"repetition_penalty": params.repetition_penalty}
    if params.greedy:
        return {"do_sample": False, **options}
    options.update(do_sample=True, temperature=params.temperature, top_k=params.top_k or 0)
    options.update(top_p=params.top_p, min_p=params.min_p)
    return options


def _ends(module: Any) -> list[int]:
    ends = getattr(module.generation_config, "eos_token_id", None)
    return [] if ends is None else [ends] if isinstance(ends, int) else list(ends)


def _until_end(tokens: list[int], ends: Sequence[int]) -> list[int]:
    """Cut the padding after an end token."""
    for position, token in enumerate(tokens):
        if token in ends:
            return tokens[: position + 1]
    return tokens


def transformers_subject(
    module: Any,
    assistant: Any = None,
    mode: str = "assistant",
    num_speculative_tokens: int = 2,
    options: dict[str, Any] | None = None,
) -> TransformersSubject:
    """`generate` in one of its speculative modes.

    Args:
        module: the target.
        assistant: the assistant, for ``mode="assistant"``.
        mode: ``assistant``, ``prompt-lookup``, ``early-exit`` or ``plain``; ``mtp``, ``dflash`` and
            ``single-position`` in their own worlds (`foretoken.audit.transformers_modes`).
        num_speculative_tokens: tokens of prompt lookup. The other modes draft as many as their own schedule says; pass
            options to change that.
        options: further arguments of `generate`.
    """
    options = dict(options or {})
    if mode == "prompt-lookup":
        options.setdefault("prompt_lookup_num_tokens", num_speculative_tokens)
    elif mode == "early-exit":
        options.setdefault("assistant_early_exit", 1)
    elif mode not in (*_WITH_ASSISTANT, "plain", "mtp"):
        modes = ("assistant", "prompt-lookup", "early-exit", "plain", "mtp", "dflash", "single-position")
        raise AuditError(f"unknown mode {mode!r}: choose one of {', '.join(modes)}")
    if mode in _WITH_ASSISTANT and assistant is None:
        raise AuditError(f"mode {mode} needs an assistant model: name its folder with --drafter")
    return TransformersSubject(
        module, assistant if mode in _WITH_ASSISTANT else None, options, f"transformers generate ({mode})"
    )


_WITH_ASSISTANT = ("assistant", "dflash", "single-position")
