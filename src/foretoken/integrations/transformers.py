"""Speculation inside transformers: ``model.generate(..., custom_generate=foretoken.custom_generate(...))``."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from collections.abc import Sequence as AbstractSequence
from contextlib import contextmanager
from inspect import currentframe
from typing import Any, Literal

import torch
from torch import Tensor

from foretoken.engine.engine import Engine
from foretoken.engine.prompts import encode
from foretoken.engine.row import Row
from foretoken.errors import ParameterError, PromptError
from foretoken.integrations.kept_engines import Owner, kept_engines
from foretoken.integrations.processors import ProcessorSampler, RowSteps, for_row
from foretoken.integrations.refusals import (
    refuse_engine_options,
    refuse_other_inputs,
    refuse_stateful,
    refuse_what_is_not_sampling,
    refuse_what_transformers_drops,
)
from foretoken.models import LanguageModel
from foretoken.policy.request import AUTO
from foretoken.randomness import fresh_seed
from foretoken.sampling import SamplingParams
from foretoken.sampling.params import check_integer
from foretoken.sequence import Sequence
from foretoken.verify import AnyVerifier


def custom_generate(
    drafter: Any = AUTO,
    verifier: str | AnyVerifier = "auto",
    num_speculative_tokens: int | Literal["auto"] = "auto",
    *,
    seed: int | None = None,
    streamer: Any = None,
    stop_strings: str | AbstractSequence[str] | None = None,
    tokenizer: Any = None,
    **engine_options: Any,
) -> Callable[..., Any]:
    """A function for the `custom_generate` argument of transformers' ``generate``.

    The arguments of ``generate`` keep their effect: its logits processors run at every drafted position, on the tokens
    up to that position and in their own order, and its stopping criteria are called after every token (with
    ``scores=None``: speculation keeps none). Both get one row at a time, and processors must depend on nothing but
    their arguments. transformers does not pass three arguments of ``generate`` on to a custom_generate function; give
    them here instead: `streamer`, and `stop_strings` with `tokenizer`. `drafter` replaces ``assistant_model`` and
    ``prompt_lookup_num_tokens``. A model that is being trained is in evaluation mode for as long as this takes.

    Args:
        drafter: as for `Engine`.
        verifier: as for `Engine`.
        num_speculative_tokens: as for `Engine`.
        seed: key of all randomness; row b of the batch uses ``seed + b`` modulo 2^63. None takes a fresh one at every
            call: transformers' ``set_seed`` has no effect, since no global generator is used.
        streamer: gets the prompt, then every token as soon as it is verified, as from ``generate``; for one row.
        stop_strings: strings that end the output, as for ``generate``; needs `tokenizer`.
        tokenizer: the model's tokenizer.
        engine_options: further options of `Engine`; not `cache_memory`.

    Returns:
        The function to pass to ``generate``. It keeps the drafter between calls; each model keeps an engine for it.

    Raises:
        ParameterError: for `cache_memory`; or by a call of ``generate`` with options other than those of sampling and
            greedy search (beams, scores to return, an assistant, …), with inputs of the model other than tokens and
            their mask (images, positions, a KV cache, …), with logits processors that keep a state between calls, or
            with a `streamer` given to ``generate`` itself, which would wait for ever.
    """
    refuse_engine_options(engine_options)
    return generate_with(
        Owner(),
        lambda model: Engine(model, drafter, verifier, num_speculative_tokens, **engine_options),
        seed=seed,
        streamer=streamer,
        stop_strings=stop_strings,
        tokenizer=tokenizer,
    )


def generate_with(
    owner: Owner,
    make_engine: Callable[[Any], Engine],
    *,
    seed: int | None,
    streamer: Any,
    stop_strings: str | AbstractSequence[str] | None,
    tokenizer: Any,
) -> Callable[..., Any]:
    """`custom_generate` for an owner of engines.

    Args:
        owner: of the engines, which models keep.
        make_engine: makes one for a model.
        seed, streamer, stop_strings, tokenizer: see `custom_generate`.
    """
    if seed is not None:
        seed = check_integer("seed", seed, 0, 2**64 - 1, cure="leave it out for a fresh one")
    further_criteria = _stop_string_criteria(stop_strings, tokenizer)

    def generate(
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        inputs_tensor: Tensor | None = None,
        **model_kwargs: Any,
    ) -> Any:
        with _ending(streamer):  # whatever happens: another thread may be waiting for it
            refuse_what_transformers_drops(currentframe())
            refuse_what_is_not_sampling(generation_config)
            refuse_other_inputs(currentframe(), generation_config, model_kwargs, inputs_tensor)
            refuse_stateful(logits_processor)
            if not len(input_ids):
                raise PromptError("input_ids has no rows: give at least one prompt")
            if streamer is not None and len(input_ids) > 1:
                raise ParameterError(f"streamer takes one row, but input_ids has {len(input_ids):,}: leave it out")
            with _evaluating(model):
                engine = kept_engines(model).of(model, owner, make_engine)
                rows = _rows(
                    engine,
                    input_ids,
                    inputs_tensor if model.config.is_encoder_decoder else None,
                    model_kwargs.get("attention_mask"),
                    generation_config,
                    seed=seed,
                    stop=_Stop([*stopping_criteria, *further_criteria], streamer),
                )
                if streamer is not None:
                    streamer.put(input_ids.cpu())
                _run(engine, rows, logits_processor, frozenset(_end_tokens(generation_config)))
        _warn_of_context(engine, rows)
        pad = _padding_token(generation_config)
        outputs = [row.sequence.output for row in rows]
        longest = max(map(len, outputs))
        padded = torch.tensor([output + [pad] * (longest - len(output)) for output in outputs], device=input_ids.device)
        sequences = torch.cat([input_ids, padded.to(input_ids.dtype)], dim=1)
        if generation_config.return_dict_in_generate:
            from transformers.generation import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

            kind = GenerateEncoderDecoderOutput if model.config.is_encoder_decoder else GenerateDecoderOnlyOutput
            return kind(sequences=sequences)
        return sequences

    return generate


def _rows(
    engine: Engine,
    input_ids: Tensor,
    encoder_ids: Tensor | None,
    attention_mask: Tensor | None,
    config: Any,
    *,
    seed: int | None,
    stop: _Stop,
) -> list[_BatchRow]:
    """One engine row for each row of ``input_ids`` ``[B, T]``, without its padding.

    Args:
        engine: the engine that decodes the rows.
        input_ids: the decoder's tokens.
        encoder_ids: the encoder's tokens, for encoder-decoder models.
        attention_mask: 0 on the prompt's padding; None means no padding.
        config: transformers' generation config.
        seed: seed of the first row; None for a fresh one, which promises no output.
        stop: called after each token.
    """
    prompts = input_ids if encoder_ids is None else encoder_ids
    prompts = _one_for_each(input_ids, prompts)
    mask_of = torch.ones_like(prompts) if attention_mask is None else _one_for_each(input_ids, attention_mask)
    if mask_of.shape != prompts.shape:
        raise ParameterError(
            f"attention_mask has shape {tuple(mask_of.shape)}, but its tokens {tuple(prompts.shape)}: give one number "
            "for each token"
        )
    first, rows = fresh_seed() if seed is None else seed, []
    for number, (given, prompt, mask) in enumerate(zip(input_ids, prompts, mask_of, strict=True)):
        given_tokens, tokens = given.tolist(), prompt[mask.bool()].tolist()
        _check_prompt(engine.target, number, tokens)
        key = (first + number) % 2**63
        params = SamplingParams(
            temperature=1.0 if config.do_sample else 0.0,
            max_new_tokens=max(config.max_length - input_ids.shape[1], 1),
            seed=None if seed is None else key,
            ignore_eos=True,  # the stopping criteria check end tokens
        )
        if encoder_ids is None:
            sequence = Sequence(tokens, len(tokens), params, key)
        else:
            sequence = Sequence(list(given_tokens), len(given_tokens), params, key, source=tokens)
        rows.append(_BatchRow(sequence, engine, given_tokens, stop))
    return rows


def _one_for_each(rows: Tensor, given: Tensor) -> Tensor:
    """What was given for each row, where it was given for each source: several rows may follow one another for one."""
    copies = len(rows) // max(len(given), 1)
    return given.repeat_interleave(copies, 0) if copies > 1 else given


def _run(engine: Engine, rows: list[_BatchRow], processors: Any, ends: frozenset[int]) -> None:
    """Decode all rows to their ends, with processors that are not called behind `ends`.

    Raises:
        ForetokenError: a row failed.
    """
    loop = engine.decode_loop(lambda sequences: _processor_sampler(sequences, rows, processors, ends, engine))
    waiting = list(rows)
    while waiting or loop.rows:
        free = engine.max_batch_size - len(loop.rows)
        loop.join(waiting[:free])
        del waiting[:free]
        loop.step()
    for row in rows:
        if row.error is not None:
            raise row.error


@contextmanager
def _ending(streamer: Any) -> Iterator[None]:
    """End a streamer with the block."""
    try:
        yield
    finally:
        if streamer is not None:
            streamer.end()


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """Have a model in evaluation mode: one that drops out units at random has no distribution of its own."""
    training = [module for module in model.modules() if module.training]
    if training:
        model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _padding_token(config: Any) -> int:
    """What rows that ended earlier are filled with: as in ``generate``, an end token where there is no other."""
    if config.pad_token_id is not None:
        return int(config.pad_token_id)
    return next(iter(_end_tokens(config)), 0)


def _end_tokens(config: Any) -> list[int]:
    """The tokens that end an output: transformers has a stopping criterion for them."""
    ends = config.eos_token_id
    return [] if ends is None else torch.as_tensor(ends).flatten().tolist()


def _warn_of_context(engine: Engine, rows: list[_BatchRow]) -> None:
    """Say so where outputs are shorter than was asked for; ``generate`` itself goes on behind a model's context."""
    most = engine.target.max_length
    if any(
        len(row.sequence.tokens) >= most and len(row.sequence.output) < row.sequence.params.max_new_tokens
        for row in rows
    ):
        warnings.warn(
            f"an output ended at the {most:,} tokens that the model {engine.target.name} takes: "
            "lower max_new_tokens, or shorten the prompt",
            stacklevel=3,
        )


def _stop_string_criteria(stop_strings: Any, tokenizer: Any) -> list[Any]:
    if stop_strings is None:
        return []
    if tokenizer is None:
        raise ParameterError(
            "stop_strings needs tokenizer, the model's: custom_generate(…, stop_strings=…, tokenizer=…)"
        )
    from transformers import StopStringCriteria

    return [StopStringCriteria(tokenizer, stop_strings)]


def _check_prompt(model: LanguageModel, row: int, tokens: list[int]) -> None:
    if not tokens:
        raise PromptError(f"row {row} of input_ids is empty, or all masked: give at least one token")
    try:
        encode(model, tokens)
    except PromptError as error:
        raise PromptError(f"row {row} of input_ids: {error}") from None
    if model.decoder_start_token_id is None and len(tokens) >= model.max_length:
        raise PromptError(
            f"row {row} of input_ids has {len(tokens):,} tokens, the model {model.name} takes {model.max_length:,}, "
            "and at least one must be left for the output: shorten the prompt"
        )


class _Stop:
    """Calls transformers' stopping criteria after each token, and passes the token to a streamer."""

    def __init__(self, criteria: list[Any], streamer: Any) -> None:
        self._criteria = criteria
        self._streamer = streamer

    def __call__(self, token: int, tokens: Tensor) -> bool:
        """Whether to stop after `token`, the last one of `tokens` ``[1, T]``, a batch of one row."""
        if self._streamer is not None:
            self._streamer.put(torch.tensor([token]))
        # All are called, even after one returned True: some count their calls.
        return any([_says_stop(criterion, tokens) for criterion in self._criteria])


def _says_stop(criterion: Any, tokens: Tensor) -> bool:
    found = torch.as_tensor(criterion(tokens, None))
    if found.numel() != 1:
        raise ParameterError(
            f"{type(criterion).__name__} returned {found.numel()} values for one row: a stopping criterion gets one "
            "row at a time here, whatever the batch: return one"
        )
    return bool(found)


class _BatchRow(Row):
    """A row of ``generate``'s batch, which ends when a stopping criterion is met."""

    def __init__(self, sequence: Sequence, engine: Engine, given: list[int], stop: _Stop) -> None:
        super().__init__(sequence, engine.target, verifier=engine.verifier)
        self.given = given  # with its padding
        self.dead_ends: dict[tuple[int, ...], ParameterError] = {}  # see `RowSteps`
        self._stop = stop

    def must_stop(self, token: int) -> bool:
        """Whether a criterion is met by the sequence, which ends with `token`.

        Raises:
            ParameterError: none is, and the processors leave no token that could follow.
        """
        output = self.sequence.output
        stops = self._stop(token, torch.tensor([self.given + output], device=self._model.device))
        error = self.dead_ends.get(tuple(output)) if self.dead_ends else None
        if error is not None and not stops and len(self.sequence.tokens) < self._end:
            raise error
        return stops


def _processor_sampler(
    sequences: AbstractSequence[Sequence],
    rows: AbstractSequence[_BatchRow],
    processors: Any,
    ends: frozenset[int],
    engine: Engine,
) -> ProcessorSampler:
    """A sampler of some of a batch's rows."""
    numbers = {row.sequence.id: number for number, row in enumerate(rows)}
    steps = {}
    for sequence in sequences:
        row = rows[numbers[sequence.id]]
        own = for_row(processors, numbers[sequence.id], len(rows))
        steps[sequence.id] = RowSteps(row.given, own, row.dead_ends)
    return ProcessorSampler(
        [sequence.params for sequence in sequences],
        [sequence.seed for sequence in sequences],
        steps,
        alters=len(processors) > 0,
        ends=ends,
        vocab_size=engine.target.vocab_size,
        device=engine.target.device,
    )
