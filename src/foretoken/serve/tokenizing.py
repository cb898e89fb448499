"""Tokenizing beside the engine's thread, so that a long prompt holds up no round; and parsing beside the event loop."""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from foretoken.engine.prompts import Prompt, encode, encode_prediction
from foretoken.errors import GrammarError
from foretoken.sampling import Grammar, SamplingParams
from foretoken.serve.calls import OutputParser, Parsed
from foretoken.serve.decoding import Decoding
from foretoken.serve.errors import ApiError

_THREADS = 2


class Tokenizing:
    """Prompts to tokens, on threads that have a copy of the tokenizer each: one can't be shared. And whole answers to
    their parts, which takes seconds where they are long.

    Args:
        engine: what the prompts are for.
    """

    def __init__(self, engine: Decoding) -> None:
        self._engine = engine
        self._original = copy.deepcopy(engine.facts.target.tokenizer)  # before the engine's thread uses it
        self._copying = threading.Lock()
        self._local = threading.local()
        self._pool = ThreadPoolExecutor(_THREADS, "foretoken-tokenizer")

    async def encode(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | None = None,
    ) -> list[list[int]]:
        """Each prompt's tokens.

        Args:
            prompts: as `Engine.submit` takes them.
            params: how they will be sampled, where the engine has to be asked whether it can do that.

        Raises:
            PromptError: a prompt can't be used.
            ParameterError: the parameters name tokens that the model does not have.
            RequestTooLarge: `cache_memory` is not enough for one of them.
        """
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._encode, prompts, params)

    async def encode_chat(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        params: Callable[[list[int]], SamplingParams],
    ) -> tuple[list[int], SamplingParams]:
        """A chat's tokens, and how its answer is sampled.

        Args:
            messages: of the chat.
            tools: as its template takes them.
            params: says, given the tokens, how it is sampled.

        Raises:
            PromptError: the messages can't be used.
            ParameterError: the parameters name tokens that the model does not have.
            RequestTooLarge: `cache_memory` is not enough for the chat.
        """
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._encode_chat, messages, tools, params)

    async def encode_prediction(self, text: str) -> list[int]:
        """A predicted output's tokens.

        Raises:
            PromptError: it is too long, or can't be encoded.
        """
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._encode_prediction, text)

    async def decode(self, tokens: Sequence[int]) -> str:
        """The string that tokens stand for, special tokens included."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._decode, tokens)

    async def parse(self, parser: OutputParser, text: str) -> Parsed:
        """The parts of a whole answer.

        Args:
            parser: of this answer alone.
            text: all of it.
        """
        return await asyncio.get_running_loop().run_in_executor(self._pool, parser.feed, text, True)

    async def compile(self, grammar: Grammar | None, param: str) -> None:
        """Compile a request's grammar, so that the engine's thread need not.

        Raises:
            ApiError: it can't be used; `param` is the request's field that it comes from.
        """
        if grammar is None:
            return
        try:
            await asyncio.get_running_loop().run_in_executor(self._pool, self._engine.compile, grammar)
        except GrammarError as error:
            raise ApiError(400, f"{param}: {error}", param, "invalid_grammar") from None

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _encode(self, prompts: Sequence[Prompt], params: SamplingParams | None) -> list[list[int]]:
        tokens = [encode(self._engine.facts.target, prompt, self._tokenizer()) for prompt in prompts]
        if params is not None:
            for prompt in tokens:
                self._engine.check(prompt, params)
        return tokens

    def _encode_chat(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        params: Callable[[list[int]], SamplingParams],
    ) -> tuple[list[int], SamplingParams]:
        tokens = encode(self._engine.facts.target, messages, self._tokenizer(), tools)
        found = params(tokens)
        self._engine.check(tokens, found)
        return tokens, found

    def _encode_prediction(self, text: str) -> list[int]:
        return list(encode_prediction(self._engine.facts.target, text, self._tokenizer(), self._engine.facts.limits))

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer().decode(list(tokens), clean_up_tokenization_spaces=False))

    def _tokenizer(self) -> Any:
        if not hasattr(self._local, "tokenizer"):
            with self._copying:
                self._local.tokenizer = copy.deepcopy(self._original)
        return self._local.tokenizer
