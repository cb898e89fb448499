"""OpenAI-compatible completion servers as subjects, over the standard library's HTTP."""

from __future__ import annotations

import json
import math
import re
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from foretoken.audit.errors import AuditError
from foretoken.audit.statistics import Floats, Ints
from foretoken.audit.subjects import Sample, SampleRequest, Speculation
from foretoken.sampling.params import SamplingParams

MAX_TIMEOUT_SECONDS = 86_400
_OUTSIDE_STANDARD = ("top_k", "min_p", "repetition_penalty", "return_token_ids", "return_tokens_as_token_ids")
_REFUSALS = (400, 422)
"""The statuses of an answer to a request with a field that the server does not take."""

_ALL_TOKENS = -1
"""A top_k that filters nothing, as servers write it: some refuse 0."""


class EndpointSubject:
    """A server that speaks ``POST /v1/completions``.

    Prompts are sent as token ids. Tokens come back as ids (``token_ids``, vLLM's ``return_token_ids``), or as the
    strings of ``logprobs.tokens``, which `tokenizer` turns into ids.

    Args:
        url: base address, with or without ``/v1``.
        model: name of the model there; None asks the server for its first one.
        tokenizer: a transformers tokenizer; needed if the server returns no token ids.
        api_key: sent as a bearer token.
        timeout_seconds: for each request.
        concurrency: requests under way at once.
        samples_per_request: the ``n`` of a request.
        end_token: what ends an output, one token or several; put back where the server leaves it out.
        extra: further fields of every request, such as ``{"ignore_eos": true}``; null leaves a field out.

    Raises:
        AuditError: the server can't be reached, or names no model; or `extra` has a seed.
    """

    speculation: Speculation | None = None

    def __init__(
        self,
        url: str,
        model: str | None = None,
        tokenizer: Any = None,
        *,
        api_key: str | None = None,
        timeout_seconds: float = 60.0,
        concurrency: int = 4,
        samples_per_request: int = 1,
        end_token: int | Sequence[int] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        check_url(url)
        if not 0 < timeout_seconds <= MAX_TIMEOUT_SECONDS:
            raise AuditError(f"timeout {timeout_seconds:g}: give seconds above 0, at most {MAX_TIMEOUT_SECONDS:,}")
        for name, value, limit in (
            ("concurrency", concurrency, 256),
            ("samples_per_request", samples_per_request, 1024),
        ):
            if not 1 <= value <= limit:
                raise AuditError(f"{name} {value:,}: give a number from 1 to {limit:,}")
        if "seed" in (extra or {}):
            raise AuditError(
                "field seed: each request is sent with a seed of its own, so that outputs differ; leave it out"
            )
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise AuditError("the API key has characters that no HTTP header can carry: check the variable it is in")
        self.url = url.rstrip("/")
        if not self.url.endswith("/v1"):
            self.url += "/v1"
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._seconds = timeout_seconds
        self._per_request = samples_per_request
        self._ends = () if end_token is None else (end_token,) if isinstance(end_token, int) else tuple(end_token)
        self._extra = dict(extra or {})
        self._tokenizer = tokenizer
        self._ids: dict[str, list[int]] | None = None
        self.model = model or self._first_model()
        self.name = f"{self.model} at {self.url}"
        self.details = {"endpoint": self.url, "model": self.model}
        self._pool = ThreadPoolExecutor(concurrency)

    def _first_model(self) -> str:
        try:
            return str(self._call("/models", None)["data"][0]["id"])
        except (KeyError, IndexError, TypeError) as error:
            raise AuditError(f"{self.url}/models names no model: say which with --model") from error

    def sample(self, request: SampleRequest) -> list[Sample]:
        """One HTTP request for each sample, or for `samples_per_request` of them."""
        return [self._sample(choice, request) for choice in self.choices(request)]

    def choices(self, request: SampleRequest) -> list[dict[str, Any]]:
        """The server's own answers, one a sample."""
        seeds = request.seeds()[:: self._per_request]
        counts = [min(self._per_request, request.count - i * self._per_request) for i in range(len(seeds))]
        bodies = [self._body(request, seed, count) for seed, count in zip(seeds, counts, strict=True)]
        result: list[dict[str, Any]] = []
        for answer, count in zip(
            self._pool.map(lambda body: self._call("/completions", body), bodies), counts, strict=True
        ):
            choices = answer.get("choices")
            if not isinstance(choices, list) or len(choices) != count:
                raise AuditError(f"{self.url} answered without {count} choices: {json.dumps(answer)[:200]}")
            result.extend(choices)
        return result

    def _body(self, request: SampleRequest, seed: int, count: int) -> dict[str, Any]:
        params = request.params
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": list(request.prompt),
            "max_tokens": request.num_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "seed": seed,
            "n": count,
            "logprobs": request.logprobs if request.logprobs is not None else 0,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,  # in logprobs: two tokens may have one text
            # Sent though they are neutral: where a request is silent, servers have defaults of their own.
            "top_k": params.top_k or _ALL_TOKENS,
            "min_p": params.min_p,
            "repetition_penalty": params.repetition_penalty,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
        }
        if params.logit_bias:
            body["logit_bias"] = {str(token): bias for token, bias in params.logit_bias.items()}
        body = {**body, **self._extra, **self.fields(request)}
        return {name: value for name, value in body.items() if value is not None}

    def fields(self, request: SampleRequest) -> dict[str, Any]:
        """Fields that depend on the request."""
        return {}

    def text(self, path: str) -> str:
        """What the server answers to GET outside of its API.

        Raises:
            AuditError: it does not answer.
        """
        try:
            with urllib.request.urlopen(self.url.removesuffix("/v1") + path, timeout=self._seconds) as response:
                return str(response.read().decode())
        except (OSError, HTTPException) as error:
            raise AuditError(f"{self.url.removesuffix('/v1')}{path} gave no proper answer: {error}") from error

    def _call(self, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, self._headers)
        try:
            with urllib.request.urlopen(request, timeout=self._seconds) as response:
                answer = json.loads(response.read())
        except urllib.error.HTTPError as error:
            reply = error.read().decode("utf-8", "replace").strip()
            named = [name for name in _OUTSIDE_STANDARD if name in (body or {}) and re.search(rf"\b{name}\b", reply)]
            # A reply that has values beside names quotes the request, whatever it refuses.
            quoted = any(re.search(rf"\b{name}\b['\"]?\s*[:=]\s*-?\d", reply) for name in named)
            left_out = " ".join(f"--field {name}=null" for name in named)
            refused = error.code in _REFUSALS and named and not quoted
            cure = f"; a request leaves {' and '.join(named)} out with {left_out}" if refused else ""
            raise AuditError(
                f"{self.url}{path} answered with status {error.code}: {reply[:300] or error.reason}{cure}"
            ) from error
        except TimeoutError as error:
            raise self._slow() from error
        except urllib.error.URLError as error:
            if isinstance(error.reason, TimeoutError):
                raise self._slow() from error
            raise AuditError(
                f"{self.url} can't be reached ({error.reason}): start the server, or check the address"
            ) from error
        except (ValueError, OSError, HTTPException, RecursionError) as error:
            raise AuditError(f"{self.url}{path} gave no proper answer: {error}") from error
        if not isinstance(answer, dict):
            raise AuditError(f"{self.url}{path} answered with JSON that is no object: {str(answer)[:100]}")
        return answer

    def _slow(self) -> AuditError:
        return AuditError(
            f"{self.url} did not answer within {self._seconds:g} seconds: allow more with --timeout, or lower "
            "--concurrency"
        )

    def _sample(self, choice: dict[str, Any], request: SampleRequest) -> Sample:
        reported = choice.get("logprobs") or {}
        stopped = choice.get("finish_reason") == "stop"
        lists = (choice.get("token_ids"), reported.get("token_ids"), reported.get("tokens"))
        ids = next((one for one in lists if one), None)  # an empty one may stand beside one that is filled
        if ids is None and not (stopped and any(one is not None for one in lists)):
            raise AuditError(
                f"{self.url} returns neither token ids nor logprobs with their tokens: a string's tokens are "
                "ambiguous; switch one of them on in the server"
            )
        tokens = [self._id(token) if isinstance(token, str) else int(token) for token in ids or ()]
        ended = stopped and len(tokens) < request.num_tokens
        if ended and self._ends and not (tokens and tokens[-1] in self._ends):
            tokens.append(self._end_of(choice))
        logprobs = None
        values = reported.get("token_logprobs")
        if request.logprobs is not None and values is not None and len(values) == len(tokens):
            logprobs = [{t: float(v)} if v is not None else {} for t, v in zip(tokens, values, strict=True)]
        return Sample(tokens, None, logprobs, ended)

    def _end_of(self, choice: dict[str, Any]) -> int:
        """The end token that the server left out of an output."""
        reason = choice.get("stop_reason")
        if isinstance(reason, int) and reason in self._ends:
            return reason
        if len(set(self._ends)) > 1:
            raise AuditError(
                f"{self.url} leaves out which of the end tokens {', '.join(map(str, self._ends))} ended an output: "
                "have it return token ids with the end token among them"
            )
        return self._ends[0]

    def _id(self, text: str) -> int:
        """The token that a server's string stands for."""
        if text.startswith("token_id:"):
            return int(text.removeprefix("token_id:"))
        if self._tokenizer is None:
            raise AuditError(
                f"{self.url} names tokens by their text ({text!r}) and not by id: give a tokenizer with --target or "
                "--world, or have the server return ids"
            )
        if self._ids is None:
            self._ids = {}
            for token in range(len(self._tokenizer)):
                for name in self._names(token):
                    self._ids.setdefault(name, []).append(token)
        found = self._ids.get(text, [])
        if len(found) != 1:
            raise AuditError(
                f"the tokenizer does not round-trip: {self.url} sampled a token with the text {text!r}, which "
                + (f"{len(found)} tokens have" if found else "no token has")
                + "; have the server return token ids"
            )
        return found[0]

    def _names(self, token: int) -> set[str]:
        """The strings that servers have for a token, beside its number."""
        return {str(self._tokenizer.decode([token])), str(self._tokenizer.convert_ids_to_tokens(token))}

    def reports_end(self, choice: Mapping[str, Any], ends: Sequence[int]) -> bool:
        """Whether the last logprobs of a choice are those of an end token.

        Args:
            choice: one of `choices`, with logprobs.
            ends: the end tokens; told from others by number or, with a tokenizer, by their text.
        """
        reported = choice.get("logprobs") or {}
        names = reported.get("tokens") or ()
        if not names:
            return False
        for ids in (choice.get("token_ids"), reported.get("token_ids")):
            if ids and len(ids) == len(names):
                return ids[-1] in ends
        known = {f"token_id:{token}" for token in ends}
        if self._tokenizer is not None:
            known |= {name for token in ends for name in self._names(token)}
        return str(names[-1]) in known

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def check_url(url: str) -> None:
    """Check that this is the address of a web server.

    Raises:
        AuditError: it is not.
    """
    example = "write it like http://127.0.0.1:8000/v1"
    if not url.startswith(("http://", "https://")):
        raise AuditError(f"{url!r} is no web address: it starts with http:// or https://")
    if not url.isprintable() or " " in url:
        raise AuditError(f"{url!r} has spaces or control characters: {example}")
    try:
        parts = urlsplit(url)
        if parts.port == 0:
            raise ValueError("port 0 is none")
    except ValueError as error:
        raise AuditError(f"{url!r} is no web address ({error}): {example}") from error
    if not parts.hostname:
        raise AuditError(f"{url!r} names no host: {example}")
    if parts.query or parts.fragment:
        raise AuditError(f"{url!r} has a query or a fragment, and paths are to follow it: {example}")


def reported_probs(choice: Mapping[str, Any], top: int, url: str) -> tuple[Floats, Ints]:
    """A server's own distribution of each token of one choice, as far as it returns it.

    Cells 0 … top - 1 are the most probable tokens in order; the last one is all others together.

    Returns:
        probabilities ``[T, top + 1]``, and the cell ``[T]`` of each token.

    Raises:
        AuditError: there are no logprobs, or they are not those of a distribution.
    """
    reported = choice.get("logprobs") or {}
    lists = [reported.get(name) for name in ("top_logprobs", "tokens", "token_logprobs")]
    tables, tokens, values = [one if isinstance(one, list) else [] for one in lists]
    ended = choice.get("finish_reason") == "stop" and None not in lists  # else there is a token at least
    if not len(tables) == len(tokens) == len(values) or not (tokens or ended):
        raise AuditError(
            f"{url} returns no logprobs: they are needed for its own distribution; switch them on in the server, "
            "or give --target or --reference"
        )
    probs, cells = np.zeros((len(tokens), top + 1)), np.zeros(len(tokens), dtype=np.int64)
    for position, (table, token, value) in enumerate(zip(tables, tokens, values, strict=True)):
        numbers = [value, *table.values()] if isinstance(table, dict) else [None]
        if not all(isinstance(one, int | float) and not math.isnan(one) for one in numbers):
            raise AuditError(
                f"{url} returns logprobs that are no numbers, of the token {token!r}: "
                f"{json.dumps([value, table])[:200]}"
            )
        best = sorted(table.items(), key=lambda item: -item[1])[:top]
        mass = [math.exp(min(value, 1.0)) for _, value in best]
        if sum(mass) > 1.001:
            raise AuditError(
                f"{url} returns logprobs of total probability {sum(mass):.3f}: they are not those of a distribution"
            )
        names = [name for name, _ in best]
        inside = token in names
        cells[position] = names.index(token) if inside else top
        probs[position, : len(mass)] = mass
        # Logprobs are rounded: what they leave for a token outside of the table may be less than its own.
        probs[position, top] = max(1.0 - sum(mass), 0.0 if inside else math.exp(min(value, 0.0)))
    return probs / probs.sum(axis=1, keepdims=True), cells


def plain(params: SamplingParams) -> bool:
    """Whether the sampled distribution is the model's own, unshaped."""
    return replace(params, seed=None, max_new_tokens=1, min_new_tokens=0, logprobs=None) == SamplingParams(
        max_new_tokens=1, stop=params.stop, stop_token_ids=params.stop_token_ids, ignore_eos=params.ignore_eos
    )


def prompts_of(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of texts.

    Raises:
        AuditError: the tokenizer does not give a text back.
    """
    result = []
    for text in texts:
        ids = list(tokenizer(text).input_ids)
        back = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        if back.strip() != text.strip():
            raise AuditError(
                f"the tokenizer does not round-trip: {text[:40]!r} comes back as {back[:40]!r}; use other prompts, or "
                "another tokenizer"
            )
        result.append(ids)
    return result
