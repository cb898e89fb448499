"""JSON lines on standard input and output: what a worker must speak. Standard library only.

The worker writes ``{"ready": true, "name": ..., "details": {...}}`` once it can sample. Then it reads requests, one a
line::

    {"prompt": [...], "count": n, "num_tokens": T, "seed": s, "seeds": [...], "params": {...}, "logprobs": null}

("seeds" has one for each text) and answers each with ``{"samples": [...], "speculation": ...}`` or
``{"error": "..."}``, a sample being::

    {"tokens": [...], "rounds": [...] or null, "top_logprobs": [{"id": logprob}, ...] or null}

and "speculation" ``{"drafted": n or null, "accepted": m}``, tokens since the worker began, or null if it can't tell.

An empty line, or the end of the input, ends it.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

Sampler = Callable[[dict[str, Any]], list[dict[str, Any]]]
Speculation = Callable[[], "dict[str, int | None] | None"]


def serve(make: Callable[[dict[str, Any]], tuple[str, dict[str, str], Sampler, Speculation]]) -> None:
    """Speak the protocol.

    Args:
        make: called with the options (a dict, from the first argument of the command line, as JSON); returns a name, a
            dict of details, a function from a request to a list of samples, and one that says what was drafted and
            accepted so far.
    """
    # Whatever libraries print must not end up between the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    try:
        name, details, sample, speculation = make(json.loads(sys.argv[1]))
    except Exception as error:
        traceback.print_exc()
        say({"error": f"{type(error).__name__}: {error}"})
        return
    say({"ready": True, "name": name, "details": details})
    for line in sys.stdin:
        if not line.strip():
            break
        try:
            samples = sample(json.loads(line))
            say({"samples": samples, "speculation": speculation()})
        except Exception as error:
            traceback.print_exc()
            say({"error": f"{type(error).__name__}: {error}"})
