"""Predicted outputs: what they gain on copy-and-edit tasks, and how often a prediction's next token is right.

Speed: a target that was trained to copy and edit (recipes/copy_edit) writes a text again with a change, and ends. Its
prediction is the text before the change; a useless one is another task's text backwards. All settings continue the same
prompt in turns, each with an engine that is warmed up, as a server's is; what counts are ratios of tokens a second,
prompt included, to plain decoding in the same turn. `--widen` gives the target more parameters and the same scores.

    python benchmarks/prediction.py --target DIR [--widen 500M] [--limit 12] [--max-new-tokens 400]

Rates: `Cursor` follows edited texts, tasks of the workload and source code with lines inserted, deleted and moved and
names replaced, without a model. The shares of right tokens, by tokens that agree before them, are where the policy
starts from (`foretoken.policy.acceptance.PREDICTION`).

    python benchmarks/prediction.py --rates
"""

from __future__ import annotations

import argparse
import inspect
import random
import re
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from statistics import geometric_mean, median, quantiles
from tempfile import TemporaryDirectory
from time import perf_counter

from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from foretoken import Engine, SamplingParams, tiny_pair_path, workloads
from foretoken.bench.widening import widen
from foretoken.drafters.prediction import Cursor
from foretoken.workloads.copy_edit import task

SHOWN = (0, 1, 2, 3, 4, 5, 6, 8, 12, 16)  # agreeing tokens
PLAIN, USEFUL, USEFUL_ALONE, USELESS, USELESS_ALONE, NONE = (
    "plain",
    "prediction",
    "prediction, drafter none",
    "useless prediction",
    "useless prediction, drafter none",
    "no prediction",
)
SETTINGS = (NONE, USEFUL, USEFUL_ALONE, USELESS, USELESS_ALONE)
ALONE = (USEFUL_ALONE, USELESS_ALONE)


def speed(target: str, limit: int, tokens: int) -> None:
    """Print ratios to plain decoding by temperature."""
    plain = Engine(target, None, reuse_prefixes=False)
    # Engines of their own, since each learns from its requests.
    engines = {name: Engine(plain.target, None if name in ALONE else "auto", reuse_prefixes=False) for name in SETTINGS}
    for engine in (plain, *engines.values()):
        engine.warm_up()
    prompts = workloads.encode(workloads.load("copy_edit")[:limit], plain.target.tokenizer, 1_000)
    table = Table(
        "temperature", "setting", "× plain, median", "quartiles", "geometric mean", "tokens a pass", "accepted"
    )
    for temperature in (0.0, 1.0):
        rates: dict[str, list[float]] = defaultdict(list)
        stats = defaultdict(list)
        for number, prompt in enumerate(prompts):
            text, other = task(number).text, task(number + 1).text[::-1]
            predictions = {USEFUL: text, USEFUL_ALONE: text, USELESS: other, USELESS_ALONE: other}
            names = [PLAIN, *SETTINGS]
            for name in names[number % len(names) :] + names[: number % len(names)]:
                engine, prediction = engines.get(name, plain), predictions.get(name)
                params = SamplingParams(temperature=temperature, max_new_tokens=tokens)
                if not number:  # what is done for the first time is slow
                    engine.generate(list(prompt.tokens), params, prediction=prediction)
                start = perf_counter()
                completion = engine.generate(list(prompt.tokens), params, prediction=prediction)
                rates[name].append(len(completion.token_ids) / (perf_counter() - start))
                stats[name].append(completion.stats)
        for name, found in rates.items():
            ratios = [ours / theirs for ours, theirs in zip(found, rates[PLAIN], strict=True)]
            low, _, high = quantiles(ratios, n=4)
            drafted = sum(one.drafted_prediction for one in stats[name])
            accepted = sum(one.accepted_prediction for one in stats[name])
            table.add_row(
                f"{temperature:g}",
                name,
                f"{median(ratios):.2f}",
                f"{low:.2f} – {high:.2f}",
                f"{geometric_mean(ratios):.2f}",
                f"{sum(one.emitted for one in stats[name]) / sum(one.rounds for one in stats[name]):.2f}",
                f"{accepted / drafted:.0%}" if drafted else "–",
            )
    Console(width=120).print(table)


def edits() -> Iterator[tuple[str, str, str]]:
    """Kind, text before and text after."""
    for number in range(30):
        one = task(number)
        yield "copy_edit", one.text, one.answer
    draw = random.Random(5)
    for module in (argparse, inspect, random, textwrap):
        lines = inspect.getsource(module).split("\n")
        for first in range(0, len(lines) - 60, 60):
            block = lines[first : first + 60]
            for kind, edited in _edited(block, draw):
                yield kind, "\n".join(block), edited


def _edited(lines: list[str], draw: random.Random) -> Iterator[tuple[str, str]]:
    text = "\n".join(lines)
    name = draw.choice(re.findall(r"\b[a-z_]{4,}\b", text) or ["name"])
    yield "renamed", re.sub(rf"\b{name}\b", "customer_record", text)
    inserted, deleted, moved = list(lines), list(lines), list(lines)
    for _ in range(3):
        at = draw.randrange(len(lines) - 3)
        inserted[at:at] = ["    if verbose:", f'        print("step {draw.randrange(1000)}")']
        del deleted[at : at + draw.randint(1, 3)]
    yield "inserted", "\n".join(inserted)
    yield "deleted", "\n".join(deleted)
    at, to = draw.randrange(30), draw.randrange(40)
    block = moved[at : at + 12]
    del moved[at : at + 12]
    moved[to:to] = block
    yield "moved", "\n".join(moved)


def rates() -> None:
    """Print the shares of right tokens by agreeing tokens, and tokens a pass with drafts of 16."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_pair_path() / "target")
    tried: dict[str, dict[int, list[bool]]] = defaultdict(lambda: defaultdict(list))
    passes: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for kind, before, after in edits():
        prediction, output = (tokenizer(text, add_special_tokens=False).input_ids for text in (before, after))
        cursor, left = Cursor(prediction), 0
        for at, token in enumerate(output):
            expected = cursor.draft(1)
            if expected and at:
                tried[kind][min(cursor.match, SHOWN[-1])].append(expected == [token])
            if not left or expected != [token]:
                passes[kind][0] += 1
                left = 17
            left -= 1
            cursor.extend([token])
        passes[kind][1] += len(output)
    table = Table("edit", *map(str, SHOWN), "tokens a pass")
    for kind, found in tried.items():
        shares = [f"{sum(found[match]) / len(found[match]):.2f}" if found[match] else "–" for match in SHOWN]
        table.add_row(kind, *shares, f"{passes[kind][1] / passes[kind][0]:.1f}")
    every = {match: [right for found in tried.values() for right in found[match]] for match in SHOWN}
    table.add_row("all", *(f"{sum(one) / len(one):.2f}" if one else "–" for one in every.values()), "")
    Console(width=120).print(table)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="folder of a model that copies and edits")
    parser.add_argument("--limit", type=int, default=12, help="tasks")
    parser.add_argument("--max-new-tokens", type=int, default=400)
    parser.add_argument("--widen", metavar="SIZE", help="parameters that the target is to have, such as 500M")
    parser.add_argument("--rates", action="store_true")
    options = parser.parse_args()
    if options.rates:
        rates()
    elif options.target:
        with TemporaryDirectory() as folder:
            if options.widen:
                widen(options.target, options.widen, folder)
            speed(folder if options.widen else options.target, options.limit, options.max_new_tokens)
    else:
        parser.error("give --target or --rates")
