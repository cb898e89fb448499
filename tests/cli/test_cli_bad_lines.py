"""A table of bad command lines: each ends with status 1 or 2, a message and no traceback, and none waits for ever."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

NUMBERS = ("", "x", "nan", "inf", "-inf", "1e999", "-1", "9" * 400, "0x", "٣x", "1,5", "\udcff")
INTEGERS = ("", "x", "1.5", "nan", "1e3", "-99999999999999999999999", "\u202e7x")
ODD_TARGETS = (
    "",
    " ",
    "/no/such/folder",
    "./no",
    "~nobody/model",
    "no-such-model",
    "a/b/c",
    "a b",
    "\u202emodel",
    "\udcff",
    "x" * 300,
    "x" * 5000,
    "/dev/null",
    "{file}",
    "{empty}",
    "{fifo}",
    "{binary}",
    "--",
    "https://example.org/model",
)
ODD_DRAFTERS = (
    *ODD_TARGETS[:15],
    "telepathy",
    "promt-lookup",
    ",",
    "prompt-lookup,",
    ",prompt-lookup",
    "prompt-lookup,,suffix",
    "telepathy,prompt-lookup",
    "suffix:",
    "suffix:x",
    "suffix:-1",
    "prompt-lookup:5",
    "retrieval",
    "retrieval:",
    "retrieval:{file}",
    "retrieval:{fifo}",
    "retrieval:{empty}",
    "early-exit:99",
    "early-exit:x",
    "eagle3",
    "eagle3:{empty}",
    "medusa:{file}",
    "cascade",
    "none:5",
    "draft-model",
)
ODD_FILES = ("/no/such/file", "{empty}", "{binary}", "/dev/null", "", "\udcff", "x" * 300, "{unreadable}")


def table() -> Iterator[list[str]]:
    hello = ["generate", "hello"]
    for target in ODD_TARGETS:
        yield [*hello, f"--target={target}"]
        yield ["chat", f"--target={target}"]
    for drafter in ODD_DRAFTERS:
        yield [*hello, f"--drafter={drafter}"]
    for option in ("temperature", "top-p", "min-p", "repetition-penalty", "presence-penalty", "frequency-penalty"):
        for value in NUMBERS:
            if (option, value) not in (("presence-penalty", "-1"), ("frequency-penalty", "-1")):  # which are in range
                yield [*hello, f"--{option}={value}"]
    for option in ("top-k", "seed", "max-new-tokens", "min-new-tokens", "stop-token-id", "logprobs"):
        for value in INTEGERS:
            yield [*hello, f"--{option}={value}"]
    for option, values in {
        "seed": ("-1", str(2**64)),
        "max-tokens": ("0", "-1"),
        "min-new-tokens": ("-1", "10000"),
        "top-k": ("-2",),
        "logprobs": ("-1",),
        "stop-token-id": ("-1", "99999"),
        "stop": ("",),
        "logit-bias": ("", "x", "1", "1=", "=1", "1=x", "-1=1", "1=nan", "1=inf", "9999999=1", f"{'9' * 400}=1"),
        "num-speculative-tokens": ("", "x", "-1", "257", "1.5", "9" * 400, "Auto!", "\u202e5x"),
        "verifier": (
            "",
            "tokn",
            "token:1",
            "lenient:",
            "lenient:x",
            "lenient:nan",
            "lenient:1,2,3",
            "\udcff",
            "x" * 999,
        ),
        "tree": ("", "statc", "/no/such/file", "{empty}", "{binary}", "{file}", "x" * 5000),
        "vocab": ("", "both"),
        "dtype": ("", "int3", "float8", "\udcff"),
        "device": ("toaster", "cuda:99", "cpu:x"),
        "runner": ("", "legs"),
        "quantize": ("", "int3", "yes"),
        "quantize-drafter": ("int3",),
        "profile": ODD_FILES,
        "chat-template": ODD_FILES,
        "no-such-option": ("",),
    }.items():
        for value in values:
            yield [*hello, f"--{option}={value}"]
    for file in ODD_FILES:
        yield ["generate", f"--prompt-file={file}"]
        yield ["generate", "--prompt-file", f"{file}.jsonl"]
        yield ["index", file, "--tokenizer={target}", "-o", "{out}"]
        yield ["bench", "report", file]
        yield ["tune", "--prompts", file, "-o", "{out}", "--target={target}"]
        yield ["index", "{file}", "--tokenizer", file, "-o", "{out}"]
    yield from (
        ["generate"],
        ["generate", ""],
        ["generate", " ", "--chat"],
        ["generate", "a\udcff"],
        ["generate", "a", "b"],
        ["generate", "-"],
        ["generate", "a", "--prompt-file", "{file}"],
        ["generate", "a", "--chat", "--target={untemplated}"],
        ["generate", "x" * 3000],
        ["chat", "--target={untemplated}"],
        ["chat", "hello"],
        ["chat", "--temperature=-1"],
        ["index"],
        ["index", "{file}"],
        ["index", "{fifo}", "-o", "{out}", "--tokenizer={target}"],
        ["index", "{file}", "-o", "{fifo}", "--tokenizer={target}"],
        ["index", "{file}", "-o", "{empty}", "--tokenizer={target}"],
        ["index", "{file}", "-o", "/no/such/folder/i", "--tokenizer={target}"],
        ["index", "{file}", "-o", "", "--tokenizer={target}"],
        ["demo", "--svg", "/no/such/folder/a.svg"],
        ["demo", "--svg", "{empty}"],
        ["drafters", "x"],
        ["verifiers", "--no-such-option"],
        ["tune"],
        ["tune", "-o", "/no/such/folder/p"],
        ["tune", "-o", "{empty}"],
        *(["tune", "-o", "{out}", f"--budget={time}"] for time in ("", "0", "-5m", "soon", "nan", "1e999h", "9" * 400)),
        ["tune", "-o", "{out}", "--target=/no/such/folder"],
        ["tune", "-o", "{out}", "--temperature=-1"],
        ["tune", "-o", "{out}", "-n=0"],
        *(["bench", "run", f"--engines={names}"] for names in ("", "x", "foretoken:x", "vllm", "foretoken+x", ",,")),
        *(["bench", "run", f"--batch={sizes}"] for sizes in ("", "0", "x", "-1", "1e9", "9" * 400)),
        *(["bench", "run", f"--temperature={value}"] for value in ("", "x", "-1", "nan", "inf")),
        *(["bench", "run", f"-k={value}"] for value in ("x", "-1", "9" * 400)),
        *(["bench", "run", f"--target={value}"] for value in ("/no/such/folder", "{file}", "{empty}", "\udcff")),
        *(["bench", "run", f"--{name}=0"] for name in ("repeats", "limit", "threads")),
        ["bench", "run", "--workload=x"],
        ["bench", "run", "--workload=file"],
        ["bench", "run", "--workload=file", "--data=/no/such/file"],
        ["bench", "run", "--workload=file", "--data={binary}"],
        ["bench", "run", "--json=/no/such/folder/x"],
        ["bench", "run", "--html={empty}"],
        ["bench", "run", "--dtype=int3"],
        ["bench", "peers", "--install=x"],
        ["bench", "widen", "/no/such/folder", "{out}", "--to=1M"],
        ["bench", "widen", "{target}", "{out}", "--to=x"],
        ["bench", "widen", "{target}", "{out}", "--to=-5M"],
        *(["audit", "callable", name] for name in ("", "x", "x:", ":x", "no.such:f", "os:nothing", "os:name")),
        ["audit", "engine", "--verifier=tokn"],
        *(
            ["audit", "engine", f"--{name}"]
            for name in ("tv=0", "tv=2", "level=0", "power=2", "max-samples=0", "tv=nan")
        ),
        ["audit", "engine", "--temperature=-1"],
        ["audit", "engine", "--html=/no/such/folder/x"],
        ["audit", "vllm"],
        ["audit", "vllm", "--python=/no/such/file"],
        ["audit", "openvino", "--python={file}"],
        *(
            ["audit", "endpoint", url]
            for url in ("", "x", "ftp://x", "http://127.0.0.1:x", "http://[::1", "http://a b")
        ),
        ["audit", "endpoint", "http://127.0.0.1:9", "--timeout=1e400"],
        ["audit", "endpoint", "http://127.0.0.1:9", "--api-key-variable=NO_SUCH_VARIABLE"],
        ["audit", "endpoint", "http://127.0.0.1:9", "--world=/no/such/folder"],
        ["audit", "endpoint", "http://127.0.0.1:9", "--target=/no/such/folder"],
        ["audit", "endpoint", "http://127.0.0.1:9", f"--field=a={'[' * 100_000}"],
        ["audit", "make-world", "{file}"],
        ["audit", "make-world", "{out}", "--seed=-1"],
        ["audit", "make-world", "{out}", "--kind=brother"],
        ["audit", "make-world", "/dev/null/world"],
        *(["train", kind] for kind in ("eagle3", "medusa", "draft")),
        *(["train", kind, "--target=/no/such/folder", "-o", "{out}"] for kind in ("eagle3", "medusa", "draft")),
        ["train", "draft", "--target={target}", "-o", "{file}"],
        ["train", "draft", "--target={target}", "-o", "{out}", "--steps=-1"],
        ["train", "draft", "--target={target}", "-o", "{out}", "--lr=nan"],
        ["train", "draft", "--target={target}", "-o", "{out}", "--prompts=/no/such/file"],
        ["train", "draft", "--target={target}", "-o", "{out}", "--optimizer=x"],
        ["train", "eagle3", "--target={target}", "-o", "{out}", "--target-layers=x"],
        ["train", "eagle3", "--target={target}", "-o", "{out}", "--target-layers=99"],
        ["train", "medusa", "--target={target}", "-o", "{out}", "--num-heads=0"],
        ["no-such-command"],
        ["genrate", "hello"],
        ["--no-such-option"],
        ["audit"],
        ["bench"],
        ["train"],
    )


LINES = list(table())


@pytest.fixture(scope="module")
def places(models, tmp_path_factory) -> dict[str, Path]:
    """What the lines name: ``{file}`` (text), ``{binary}``, ``{empty}`` (a folder), ``{fifo}``, and so on."""
    folder = tmp_path_factory.mktemp("places")
    made = {name: folder / name for name in ("file", "binary", "empty", "fifo", "unreadable", "out")}
    made["file"].write_text("some text\n")
    made["binary"].write_bytes(bytes(range(256)) * 9)
    made["empty"].mkdir()
    os.mkfifo(made["fifo"])
    made["unreadable"].write_text("x")
    made["unreadable"].chmod(0)
    return {**made, "target": models.target, "untemplated": models.untemplated}


@pytest.fixture
def limit():
    """Ends a line that waits for ever."""

    def too_long(*_: object) -> None:
        pytest.fail("it waited for a minute")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def name(words: list[str]) -> str:
    return ascii(" ".join(words))[1:-1][:60]


@pytest.mark.parametrize("words", LINES, ids=map(name, LINES))
def test_a_bad_line(call, places, limit, words):
    filled = []
    for word in words:
        # Two words, as `call` wants them; the target's and the drafter's own are put in where none is given.
        filled += word.split("=", 1) if word.startswith("--") and "=" in word else [word]
    for (number, word), (key, value) in itertools.product(enumerate(filled), places.items()):
        if f"{{{key}}}" in word:
            filled[number] = filled[number].replace(f"{{{key}}}", str(value))
    if "{unreadable}" in "".join(words) and os.geteuid() == 0:
        pytest.skip("nothing is unreadable for root")
    result = call(*filled, stdin="")
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code in (1, 2), result.output
    assert "Traceback" not in result.output
    assert len(result.output.strip()) > 20
    assert len(result.output) < 6000
