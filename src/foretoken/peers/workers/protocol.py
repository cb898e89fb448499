"""JSON lines on standard input and output: what a worker must speak. Standard library only.

The worker is started with one argument, a JSON object::

    {"target": folder, "drafter": folder or null, "dtype": name, "device": "cpu", "threads": n, "max_length": tokens,
     "max_batch": n, "mode": ..., "k": ..., "options": {...}, "cache": folder for converted checkpoints}

and writes ``{"ready": true, "versions": {...}}`` once its libraries are imported. Then it reads requests, one a line::

    {"mode": ..., "k": ..., "prompts": [[...], ...], "num_tokens": n, "params": {"temperature": t, "top_k": ..., ...},
     "seeds": [s, ...] or null, "logprobs": n or null, "ends": true or false}

The prompts (token ids) are decoded as one batch. Of "params" (fields of `foretoken.SamplingParams`) those that are
missing shape nothing; "seeds" has one for each prompt, null leaves them to the engine; "logprobs" asks for so many
log-probabilities at each position, of engines that report them; "ends", of audits, forbids to rule end tokens out,
which engines may do otherwise to fill `num_tokens`. A worker that can't change its mode may ignore "mode" and "k" here.

It answers each request with ``{"tokens": [[...], ...], "seconds": wall clock of generating them, ...}``, where further
keys of `Result` are present if the engine reports them; or with ``{"error": reason, "unsupported": true or false}``.
Every output has exactly `num_tokens` tokens: end tokens don't end it, except with "ends", of engines that can't go on
behind one.

The end of the input ends the worker.
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any


class Unsupported(Exception):
    """The engine does not support this."""


Result = dict[str, Any]
"""tokens, seconds; rounds (target passes; the prompt's counts as one), drafted, accepted (tokens of all prompts
together), drafted_by_position, accepted_by_position (lists), parts (seconds by name), round_lengths (for each output,
the tokens that each round added), top_logprobs (for each output and position, ``{token id: log-probability}``),
end_tokens (for each output, its last token if that is an end token, null otherwise), and drafter_quantize."""

Runner = Callable[[dict[str, Any]], Result]

NEUTRAL = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logit_bias": None,
}
"""Sampling parameters that shape nothing."""


def shaping(request: dict[str, Any], supported: tuple[str, ...]) -> dict[str, Any]:
    """The sampling parameters of a request, those that it leaves out included.

    Args:
        request: see above.
        supported: names of the parameters that the engine has.

    Raises:
        Unsupported: the request needs another one.
    """
    params = {**NEUTRAL, **{name: request["params"].get(name) for name in NEUTRAL if name in request["params"]}}
    for name, value in params.items():
        if name not in supported and (value or NEUTRAL[name]) != NEUTRAL[name]:
            raise Unsupported(f"{name}={value}: this engine has no such parameter; leave it out")
    return params


def cache_gib(options: dict[str, Any]) -> int:
    """GiB that hold the keys and values of the largest batch of the longest sequences, and of a drafter's beside it."""
    total = 0
    for folder in (options["target"], options["drafter"]):
        if folder is None:
            continue
        with open(os.path.join(folder, "config.json"), encoding="utf-8") as file:
            config = json.load(file)
        heads = config["num_attention_heads"]
        width = config.get("head_dim") or config["hidden_size"] // heads
        total += 8 * config["num_hidden_layers"] * (config.get("num_key_value_heads") or heads) * width
    return 1 + (total * options["max_length"] * options["max_batch"] >> 30)


def clipped(sizes: list[int], total: int) -> "list[int] | None":
    """Tokens of each round, without those behind the end of the output.

    Args:
        sizes: tokens that each round added.
        total: length of the output.

    Returns:
        Lengths that add up to `total`; None if the rounds have fewer tokens.
    """
    rounds: list[int] = []
    for size in sizes:
        rounds.append(min(size, total - sum(rounds)))
        if sum(rounds) == total:
            return rounds
    return None


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    """What a function returns, and the seconds it took."""
    start = time.perf_counter()
    value = function()
    return value, time.perf_counter() - start


def serve(make: Callable[[dict[str, Any]], tuple[dict[str, str], Runner]]) -> None:
    """Answer requests on standard input, one a line, until it ends.

    Args:
        make: called with the options; returns versions of what runs, and a function from a request to a result.
    """
    # Whatever libraries print must not end up between the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    def complain(error: BaseException) -> None:
        traceback.print_exc()
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        unsupported = isinstance(error, Unsupported)
        say({"error": first if unsupported else f"{type(error).__name__}: {first}", "unsupported": unsupported})

    try:
        versions, run = make(json.loads(sys.argv[1]))
    except Exception as error:
        complain(error)
        return
    say({"ready": True, "versions": versions})
    for line in sys.stdin:
        try:
            say(run(json.loads(line)))
        except Exception as error:
            complain(error)
