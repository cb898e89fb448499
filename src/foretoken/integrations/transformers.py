"""Speculation inside transformers: ``model.generate(..., custom_generate=foretoken.custom_generate(...))``."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as AbstractSequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from inspect import currentframe
from types import FrameType
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from foretoken.draft import Draft
from foretoken.engine.engine import Engine
from foretoken.engine.prompts import encode
from foretoken.engine.row import Row
from foretoken.errors import ParameterError, PromptError
from foretoken.models import LanguageModel
from foretoken.policy.request import AUTO
from foretoken.randomness import fresh_seed, gumbel
from foretoken.sampling import Sampler, SamplingParams
from foretoken.sampling.params import check_integer
from foretoken.sampling.vocabulary import zeros_for_none
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
    ``scores=None``: speculation keeps none). transformers does not pass three arguments of ``generate`` on to a
    custom_generate function; give them here instead: `streamer`, and `stop_strings` with `tokenizer`. `drafter`
    replaces ``assistant_model`` and ``prompt_lookup_num_tokens``.

    Args:
        drafter: as for `Engine`.
        verifier: as for `Engine`.
        num_speculative_tokens: as for `Engine`.
        seed: key of all randomness; row b of the batch uses ``seed + b``. None takes a fresh one at every call:
            transformers' ``set_seed`` has no effect, since no global generator is used.
        streamer: gets the prompt, then every token as soon as it is verified, as from ``generate``; for one row.
        stop_strings: strings that end the output, as for ``generate``; needs `tokenizer`.
        tokenizer: the model's tokenizer.
        engine_options: further options of `Engine`.

    Returns:
        The function to pass to ``generate``. It keeps the drafter between calls, and one engine for each model.

    Raises:
        ParameterError: by a call of ``generate`` with options other than those of sampling and greedy search (beams,
            scores to return, an assistant, …), with logits processors that keep a state between calls, or with a
            `streamer` given to ``generate`` itself, which would wait for ever.
    """
    if seed is not None:
        seed = check_integer("seed", seed, 0, 2**64 - 1, cure="use None for a fresh one")
    further_criteria = _stop_string_criteria(stop_strings, tokenizer)
    engines: WeakKeyDictionary[Any, Engine] = WeakKeyDictionary()

    def generate(
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        inputs_tensor: Tensor | None = None,
        **model_kwargs: Any,
    ) -> Any:
        _refuse_what_transformers_drops(currentframe())
        _refuse_what_is_not_sampling(generation_config, model_kwargs)
        _refuse_stateful(logits_processor)
        if not len(input_ids):
            raise PromptError("input_ids has no rows: give at least one prompt")
        if streamer is not None and len(input_ids) > 1:
            raise ParameterError(f"streamer takes one row, but input_ids has {len(input_ids):,}: leave it out")
        engine = engines.get(model)
        if engine is None:
            engine = engines[model] = Engine(model, drafter, verifier, num_speculative_tokens, **engine_options)
        rows = _rows(
            engine,
            input_ids,
            inputs_tensor if model.config.is_encoder_decoder else None,
            model_kwargs.get("attention_mask"),
            generation_config,
            seed=seed,
            stop=_Stop([*stopping_criteria, *further_criteria], streamer),
        )
        with _streaming(streamer, input_ids):
            _run(engine, rows, logits_processor)
        pad = generation_config.pad_token_id if generation_config.pad_token_id is not None else 0
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
        attention_mask: 0 on the prompt's padding; None or a mask of another shape means no padding.
        config: transformers' generation config.
        seed: seed of the first row; None for a fresh one, which promises no output.
        stop: called after each token.
    """
    prompts = input_ids if encoder_ids is None else encoder_ids
    if attention_mask is None or attention_mask.shape != prompts.shape:
        attention_mask = torch.ones_like(prompts)
    first, rows = fresh_seed() if seed is None else seed, []
    for number, (given, prompt, mask) in enumerate(zip(input_ids, prompts, attention_mask, strict=True)):
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
            padding = given_tokens[: len(given_tokens) - len(tokens)]
        else:
            sequence = Sequence(given_tokens, len(given_tokens), params, key, source=tokens)
            padding = []
        rows.append(_BatchRow(sequence, engine, padding, stop))
    return rows


def _run(engine: Engine, rows: list[_BatchRow], processors: Any) -> None:
    """Decode all rows to their ends.

    Raises:
        ForetokenError: a row failed.
    """
    loop = engine.decode_loop(lambda sequences: _processor_sampler(sequences, rows, processors, engine))
    loop.join(rows)
    while loop.rows:
        loop.step()
    for row in rows:
        if row.error is not None:
            raise row.error


@contextmanager
def _streaming(streamer: Any, input_ids: Tensor) -> Iterator[None]:
    """Give the prompt to a streamer, and end it whatever happens: another thread may be waiting for it."""
    if streamer is None:
        yield
        return
    try:
        streamer.put(input_ids.cpu())
        yield
    finally:
        streamer.end()


def _stop_string_criteria(stop_strings: Any, tokenizer: Any) -> list[Any]:
    if stop_strings is None:
        return []
    if tokenizer is None:
        raise ParameterError(
            "stop_strings needs tokenizer, the model's: custom_generate(…, stop_strings=…, tokenizer=…)"
        )
    from transformers import StopStringCriteria

    return [StopStringCriteria(tokenizer, stop_strings)]


_DROPPED = {
    "streamer": "give it to custom_generate(streamer=…)",
    "assistant_model": "give it to custom_generate as the drafter",
}
"""Arguments that transformers' ``generate`` does not pass on to a custom_generate function, and what to do instead."""


def _refuse_what_transformers_drops(frame: FrameType | None) -> None:
    """Raise if the caller, ``generate``, was given such an argument; it is visible in the caller's frame only.

    If they were ignored silently a streamer would wait for ever, and an assistant would have no effect.
    """
    caller = frame.f_back if frame is not None else None
    if caller is None or caller.f_code.co_name != "generate":
        return
    for name, cure in _DROPPED.items():
        if caller.f_locals.get(name) is not None:
            if name == "streamer":
                caller.f_locals[name].end()
            raise ParameterError(f"{name}: transformers does not pass it on to a custom_generate function: {cure}")


def _refuse_what_is_not_sampling(config: Any, model_kwargs: dict[str, Any]) -> None:
    if (config.num_beams or 1) > 1:
        raise ParameterError(f"num_beams={config.num_beams}: custom_generate samples; for beams use beam_search")
    for name in ("penalty_alpha", "dola_layers"):
        if getattr(config, name, None):
            raise ParameterError(
                f"{name}={getattr(config, name)!r}: custom_generate samples from the model's own distribution; "
                "leave it out"
            )
    for name in ("prompt_lookup_num_tokens", "assistant_early_exit"):
        if getattr(config, name, None):
            raise ParameterError(
                f"{name}={getattr(config, name)!r}: choose the drafter in custom_generate(drafter=…), such as "
                "'prompt-lookup' or 'early-exit', and leave this out"
            )
    for name in ("output_scores", "output_logits", "output_attentions", "output_hidden_states"):
        if getattr(config, name, None):
            raise ParameterError(
                f"{name}=True: speculation scores several positions at once and keeps none; leave it out"
            )
    if model_kwargs.get("inputs_embeds") is not None:
        raise ParameterError("inputs_embeds: drafters need token ids; give input_ids")


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
        return any([bool(torch.as_tensor(criterion(tokens, None)).any()) for criterion in self._criteria])


class _BatchRow(Row):
    """A row of ``generate``'s batch, which ends when a stopping criterion is met."""

    def __init__(self, sequence: Sequence, engine: Engine, padding: list[int], stop: _Stop) -> None:
        super().__init__(sequence, engine.target, verifier=engine.verifier)
        self.padding = padding
        self._stop = stop

    def must_stop(self, token: int) -> bool:
        """Whether a criterion is met by the sequence, which ends with `token`."""
        return self._stop(token, torch.tensor([self.padding + self.sequence.tokens], device=self._model.device))


def _processor_sampler(
    sequences: AbstractSequence[Sequence], rows: AbstractSequence[_BatchRow], processors: Any, engine: Engine
) -> _ProcessorSampler:
    """A sampler of some of a batch's rows."""
    numbers = {row.sequence.id: number for number, row in enumerate(rows)}
    steps = {
        sequence.id: _RowSteps(
            rows[numbers[sequence.id]].padding, _for_row(processors, numbers[sequence.id], len(rows))
        )
        for sequence in sequences
    }
    return _ProcessorSampler(
        [sequence.params for sequence in sequences],
        [sequence.seed for sequence in sequences],
        steps,
        alters=len(processors) > 0,
        vocab_size=engine.target.vocab_size,
        device=engine.target.device,
    )


@dataclass(frozen=True)
class _RowSteps:
    """The logits processors of a row.

    Attributes:
        padding: padding tokens before the row's own, which the processors get as well.
        processors: as they would be for a batch of this row alone.
    """

    padding: list[int]
    processors: Any


class _ProcessorSampler(Sampler):
    """A sampler that runs transformers' logits processors instead of Foretoken's own steps.

    They take whole sequences, so that each node of each row is a call of its own. They are not called for nodes below a
    token that they forbid: those are never reached, and a grammar may be undefined there.
    """

    def __init__(
        self,
        params: AbstractSequence[SamplingParams],
        seeds: AbstractSequence[int],
        steps: Mapping[int, _RowSteps],
        *,
        alters: bool,
        vocab_size: int,
        device: torch.device | str,
    ) -> None:
        """Take `steps` by sequence id; `alters` tells whether there are any processors."""
        super().__init__(params, seeds, vocab_size=vocab_size, device=device)
        self.alters = alters
        self._altered = frozenset(range(len(self.params)) if alters else ())
        self._steps = steps

    def select(self, rows: AbstractSequence[int] | Tensor) -> _ProcessorSampler:
        """A sampler of some of the rows, with their processors."""
        params, seeds = self._of_rows(rows)
        return _ProcessorSampler(
            params, seeds, self._steps, alters=self.alters, vocab_size=self.vocab_size, device=self.device
        )

    def scores(
        self, logits: Tensor, sequences: AbstractSequence[Sequence], draft: Draft, nodes: Tensor | None = None
    ) -> Tensor:
        """``[B, M, V]`` float32, all processors applied, warpers too: only a softmax remains to be done."""
        # A copy: processors may write to their argument, and these logits are the model's output.
        scores = logits.to(torch.float32, copy=True)
        above = draft.ancestors()
        tokens = torch.cat([torch.zeros_like(draft.counts[:, None]), draft.tokens], dim=1)
        for row, sequence in enumerate(sequences):
            steps = self._steps[sequence.id]
            prefix = steps.padding + sequence.tokens
            parents = [0, *draft.parents[row].tolist()]
            unreachable: set[int] = set()
            for column in range(scores.shape[1]):
                node = column if nodes is None else int(nodes[row, column])
                if nodes is None and node > 0:
                    parent = parents[node]
                    if parent in unreachable or scores[row, parent, tokens[row, node]] == -torch.inf:
                        unreachable.add(node)
                        continue
                on_path = above[row, node].clone()
                on_path[0] = False
                path = torch.tensor([prefix + tokens[row][on_path].tolist()], device=scores.device)
                scores[row, column] = steps.processors(path, scores[row, column : column + 1])[0]
                # Below a draft token all may be forbidden, since the draft token itself may still be rejected.
                if node == 0 and bool((scores[row, column] == -torch.inf).all()):
                    raise ParameterError(
                        f"the logits processors forbid every token after {path.shape[1]:,} tokens: allow at least one"
                    )
        return scores

    def probabilities(
        self, logits: Tensor, sequences: AbstractSequence[Sequence], draft: Draft, nodes: Tensor | None = None
    ) -> Tensor:
        """``[B, M, V]`` float32: softmax of the scores, or all mass on the best token."""
        scores = self.scores(logits, sequences, draft, nodes)
        if self.all_greedy:
            return torch.nn.functional.one_hot(scores.argmax(-1), scores.shape[-1]).to(scores.dtype)
        return zeros_for_none(scores.softmax(-1))

    def picks(
        self,
        logits: Tensor,
        sequences: AbstractSequence[Sequence],
        draft: Draft,
        nodes: Tensor | None = None,
        noise: bool = True,
    ) -> Tensor:
        """``[B, M]``: argmax of the scores, with the shared noise added where rows are sampled."""
        scores = self.scores(logits, sequences, draft, nodes)
        if noise and not self.all_greedy:
            depths = draft.depths()
            depths = depths if nodes is None else depths.gather(1, nodes)
            positions = self.positions(sequences)[:, None] + depths
            scores = scores + gumbel(self.seeds, positions, scores.shape[-1])
        return scores.argmax(-1)


_STATEFUL = ("UnbatchedClassifierFreeGuidance", "ClassifierFreeGuidance", "SynthIDText")
"""Name prefixes of logits processors that keep a state between calls, or score rows of their own."""


def _refuse_stateful(processors: Any) -> None:
    for processor in processors:
        name = type(processor).__name__
        if name.startswith(_STATEFUL):
            raise ParameterError(
                f"{name} (guidance_scale or watermarking) must be called once for each token, in order, and "
                "speculation scores several at once: leave it out"
            )


def _for_row(processors: Any, row: int, batch_size: int) -> Any:
    """The processors as they would be for this row alone: their per-row attributes are cut to one row."""
    result = []
    for processor in processors:
        one = copy.copy(processor)
        kept = vars(one)
        if isinstance(kept.get("prompt_ignore_length"), Tensor) and len(one.prompt_ignore_length) == batch_size:
            one.prompt_ignore_length = one.prompt_ignore_length[row : row + 1]
        if isinstance(kept.get("encoder_input_ids"), Tensor):
            # There may be several rows for each source.
            source = row * len(one.encoder_input_ids) // batch_size
            one.encoder_input_ids = one.encoder_input_ids[source : source + 1]
        if isinstance(kept.get("generated_ngrams"), list):
            one.generated_ngrams = [one.generated_ngrams[row * one.batch_size // batch_size]]
            one.batch_size = 1
        if "_prefix_allowed_tokens_fn" in kept:
            one._prefix_allowed_tokens_fn = partial(_allowed_in_row, one._prefix_allowed_tokens_fn, row)
        result.append(one)
    return type(processors)(result)


def _allowed_in_row(allowed: Callable[[int, Tensor], list[int]], row: int, _: int, tokens: Tensor) -> list[int]:
    """The tokens that a function of row and sequence allows in `row`; a batch of this row alone asks for row 0."""
    return allowed(row, tokens)
