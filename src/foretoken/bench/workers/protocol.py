"""JSON lines on standard input and output: what a worker must speak. Standard library only.

The worker is started with one argument, a JSON object::

    {"target": folder, "drafter": folder or null, "dtype": name, "device": "cpu", "threads": n, "max_length": tokens,
     "max_batch": n, "options": {...}, "modes": [...], "cache": folder for converted checkpoints}

and writes ``{"ready": true, "versions": {...}}`` once its libraries are imported. Then it reads requests, one a line::

    {"mode": ..., "k": ..., "prompts": [[...], ...], "num_tokens": n, "temperature": t, "seed": s}

and answers each with ``{"tokens": [[...], ...], "seconds": wall clock of generating them, ...}``, where further keys of
`Result` are present if the engine tells; or with ``{"error": reason, "unsupported": true or false}``. Every text has
exactly `num_tokens` tokens: end tokens don't end it.

The end of the input ends it.
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any


class Unsupported(Exception):
    """The engine has no way to do this; the message says why."""


Result = dict[str, Any]
"""tokens, seconds; rounds (target passes after the prompt's), drafted, accepted (tokens, all prompts together),
drafted_by_position, accepted_by_position (lists), parts (seconds by name), note."""

Runner = Callable[[dict[str, Any]], Result]


def cache_gib(options: dict[str, Any]) -> int:
    """GiB that hold the keys and values of the largest batch of the longest texts, and of a drafter's beside it."""
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


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    """What a function returns, and the seconds it took."""
    start = time.perf_counter()
    value = function()
    return value, time.perf_counter() - start


def serve(make: Callable[[dict[str, Any]], tuple[dict[str, str], Runner]]) -> None:
    """Speak the protocol.

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
