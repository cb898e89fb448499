"""Speculation inside transformers: ``model.generate(..., custom_generate=foretoken.custom_generate(...))``."""

from __future__ import annotations

import copy
from collections.abc import Callable
from collections.abc import Sequence as AbstractSequence
from functools import partial
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
from foretoken.randomness import fresh_seed, gumbel
from foretoken.sampling import Sampler, SamplingParams
from foretoken.sampling.params import check_integer
from foretoken.sampling.vocabulary import zeros_for_none
from foretoken.sequence import Sequence
from foretoken.verify import AnyVerifier


def custom_generate(
    drafter: Any = None,
    verifier: str | AnyVerifier = "auto",
    num_speculative_tokens: int | Literal["auto"] = "auto",
    *,
    seed: int | None = None,
    **engine_options: Any,
) -> Callable[..., Any]:
    """A function for the `custom_generate` argument of transformers' ``generate``.

    Everything that ``generate`` was told is kept: its logits processors run on every drafted position with that
    position's own text, in their own order, and its stopping criteria see every token.

    Args:
        drafter: as for `Engine`.
        verifier: as for `Engine`.
        num_speculative_tokens: as for `Engine`.
        seed: key of all randomness; row b of the batch uses ``seed + b``. None takes a fresh one at every call:
            transformers' ``set_seed`` has no effect, since no global generator is used.
        engine_options: further options of `Engine`.

    Returns:
        A callable to pass on. It keeps the drafter between calls, and one engine for each model it meets.

    Raises:
        ParameterError: on a call that asks for more than sampling or greedy search (beams, scores to return, …), or
            for logits processors that keep a state between calls.
    """
    if seed is not None:
        seed = check_integer("seed", seed, 0, 2**64 - 1, cure="use None for a fresh one")
    engines: WeakKeyDictionary[Any, Engine] = WeakKeyDictionary()

    def generate(
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        inputs_tensor: Tensor | None = None,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        _refuse_what_is_not_sampling(generation_config, model_kwargs)
        _refuse_stateful(logits_processor)
        engine = engines.get(model)
        if engine is None:
            engine = engines[model] = Engine(model, drafter, verifier, num_speculative_tokens, **engine_options)
        mask = model_kwargs.get("attention_mask")
        texts = input_ids if inputs_tensor is None or not model.config.is_encoder_decoder else inputs_tensor
        if mask is None or mask.shape != texts.shape:
            mask = torch.ones_like(texts)
        first = fresh_seed() if seed is None else seed
        budget = generation_config.max_length - input_ids.shape[1]
        rows = []
        if not len(input_ids):
            raise PromptError("input_ids holds no rows: give at least one prompt")
        for place in range(input_ids.shape[0]):
            given = input_ids[place].tolist()
            real = texts[place][mask[place].bool()].tolist()
            _check_prompt(engine.target, place, real)
            params = SamplingParams(
                temperature=1.0 if generation_config.do_sample else 0.0,
                max_new_tokens=max(budget, 1),
                seed=(first + place) % 2**63,
                ignore_eos=True,  # the stopping criteria know the end tokens
            )
            if model.config.is_encoder_decoder:
                sequence = Sequence(given, len(given), params, params.seed or 0, source=real)
                padding: list[int] = []
            else:
                sequence = Sequence(real, len(real), params, params.seed or 0)
                padding = given[: len(given) - len(real)]
            rows.append(_Row(sequence, engine, padding, stopping_criteria, streamer))
        rounds = engine.rounds(
            make_sampler=lambda sequences: _ProcessorSampler(sequences, rows, logits_processor, engine)
        )
        rounds.join(rows)
        while rounds.rows:
            rounds.step()
        for row in rows:
            if row.error is not None:
                raise row.error
        if streamer is not None:
            streamer.end()
        outputs = [row.sequence.output for row in rows]
        longest = max(map(len, outputs))
        pad = generation_config.pad_token_id if generation_config.pad_token_id is not None else 0
        padded = torch.tensor([output + [pad] * (longest - len(output)) for output in outputs], device=input_ids.device)
        sequences = torch.cat([input_ids, padded.to(input_ids.dtype)], dim=1)
        if generation_config.return_dict_in_generate:
            from transformers.generation import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

            kind = GenerateEncoderDecoderOutput if model.config.is_encoder_decoder else GenerateDecoderOnlyOutput
            return kind(sequences=sequences)
        return sequences

    return generate


def _refuse_what_is_not_sampling(config: Any, model_kwargs: dict[str, Any]) -> None:
    if (config.num_beams or 1) > 1:
        raise ParameterError(f"num_beams={config.num_beams}: custom_generate samples; for beams use beam_search")
    for name in ("penalty_alpha", "dola_layers"):
        if getattr(config, name, None):
            raise ParameterError(
                f"{name}={getattr(config, name)!r}: custom_generate samples from the model's own law; leave it out"
            )
    for name in ("output_scores", "output_logits", "output_attentions", "output_hidden_states"):
        if getattr(config, name, None):
            raise ParameterError(
                f"{name}=True: speculation scores several positions at once and keeps none; leave it out"
            )
    if model_kwargs.get("inputs_embeds") is not None:
        raise ParameterError("inputs_embeds: drafters need token ids; give input_ids")


def _check_prompt(model: LanguageModel, place: int, tokens: list[int]) -> None:
    if not tokens:
        raise PromptError(f"row {place} of input_ids is empty, or all masked: give at least one token")
    try:
        encode(model, tokens)
    except PromptError as error:
        raise PromptError(f"row {place} of input_ids: {error}") from None
    if model.decoder_start_token_id is None and len(tokens) >= model.max_length:
        raise PromptError(
            f"row {place} of input_ids has {len(tokens):,} tokens, the model {model.name} takes {model.max_length:,}, "
            "and at least one must be left for the output: shorten the prompt"
        )


class _Row(Row):
    """A row that ends where transformers' stopping criteria say so."""

    def __init__(self, sequence: Sequence, engine: Engine, padding: list[int], criteria: Any, streamer: Any) -> None:
        super().__init__(sequence, engine.target, verifier=engine.verifier)
        self.padding = padding
        self._criteria = criteria
        self._streamer = streamer

    def must_stop(self, token: int) -> bool:
        """Ask the criteria; they are written for batches, and get one of a single row."""
        if self._streamer is not None:
            self._streamer.put(torch.tensor([token]))
        text = torch.tensor([self.padding + self.sequence.tokens], device=self._model.device)
        return bool(torch.as_tensor(self._criteria(text, None)).any())


class _ProcessorSampler(Sampler):
    """A sampler that runs transformers' logits processors instead of our own steps.

    They take whole texts, so that each node of each row is a call of its own. What follows a token that they forbid
    is never reached, and they are not asked about it: a grammar may have no answer.
    """

    def __init__(
        self, sequences: AbstractSequence[Sequence], rows: AbstractSequence[_Row], processors: Any, engine: Engine
    ) -> None:
        super().__init__(
            [sequence.params for sequence in sequences],
            [sequence.seed for sequence in sequences],
            vocab_size=engine.target.vocab_size,
            device=engine.target.device,
        )
        self.alters = len(processors) > 0
        self._altered = frozenset(range(len(sequences)) if self.alters else ())
        places = {row.sequence.id: place for place, row in enumerate(rows)}
        self._padding = {row.sequence.id: row.padding for row in rows}
        self._processors = {sequence.id: _for_row(processors, places[sequence.id], len(rows)) for sequence in sequences}

    def scores(
        self, logits: Tensor, sequences: AbstractSequence[Sequence], draft: Draft, nodes: Tensor | None = None
    ) -> Tensor:
        """``[B, M, V]`` float32, all processors applied (warpers too: what is left to do is a softmax)."""
        # Processors may write to what they are given, and that is the model's output.
        scores = logits.to(torch.float32, copy=True)
        above = draft.ancestors()
        tokens = torch.cat([torch.zeros_like(draft.counts[:, None]), draft.tokens], dim=1)
        for place, sequence in enumerate(sequences):
            before = self._padding[sequence.id] + sequence.tokens
            parents = [0, *draft.parents[place].tolist()]
            unreachable: set[int] = set()
            for column in range(scores.shape[1]):
                node = column if nodes is None else int(nodes[place, column])
                if nodes is None and node > 0:
                    parent = parents[node]
                    if parent in unreachable or scores[place, parent, tokens[place, node]] == -torch.inf:
                        unreachable.add(node)
                        continue
                on_path = above[place, node].clone()
                on_path[0] = False
                text = torch.tensor([before + tokens[place][on_path].tolist()], device=scores.device)
                scores[place, column] = self._processors[sequence.id](text, scores[place, column : column + 1])[0]
                # After a drafted token there may be no answer, since the token itself may be rejected yet.
                if node == 0 and bool((scores[place, column] == -torch.inf).all()):
                    raise ParameterError(
                        f"the logits processors forbid every token after the {text.shape[1]:,} there are: allow at "
                        "least one"
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
            places = self.positions(sequences)[:, None] + depths
            scores = scores + gumbel(self.seeds, places, scores.shape[-1])
        return scores.argmax(-1)


_STATEFUL = ("UnbatchedClassifierFreeGuidance", "ClassifierFreeGuidance", "SynthIDText")
"""Logits processors that remember their calls, or score rows of their own: names begin so."""


def _refuse_stateful(processors: Any) -> None:
    for processor in processors:
        name = type(processor).__name__
        if name.startswith(_STATEFUL):
            raise ParameterError(
                f"{name} (guidance_scale or watermarking) must be called once for each token, in order, and "
                "speculation scores several at once: leave it out"
            )


def _for_row(processors: Any, place: int, batch_size: int) -> Any:
    """The processors as they would be for this row alone: what they keep for each row is cut to one."""
    result = []
    for processor in processors:
        one = copy.copy(processor)
        kept = vars(one)
        if isinstance(kept.get("prompt_ignore_length"), Tensor) and len(one.prompt_ignore_length) == batch_size:
            one.prompt_ignore_length = one.prompt_ignore_length[place : place + 1]
        if isinstance(kept.get("encoder_input_ids"), Tensor):
            # There may be several rows for each source.
            source = place * len(one.encoder_input_ids) // batch_size
            one.encoder_input_ids = one.encoder_input_ids[source : source + 1]
        if isinstance(kept.get("generated_ngrams"), list):
            one.generated_ngrams = [one.generated_ngrams[place * one.batch_size // batch_size]]
            one.batch_size = 1
        if "_prefix_allowed_tokens_fn" in kept:
            one._prefix_allowed_tokens_fn = partial(_ask_about_row, one._prefix_allowed_tokens_fn, place)
        result.append(one)
    return type(processors)(result)


def _ask_about_row(allowed: Callable[[int, Tensor], list[int]], place: int, _: int, text: Tensor) -> list[int]:
    """The tokens that a function of row and text allows, where a batch of this row alone would ask for row 0."""
    return allowed(place, text)
