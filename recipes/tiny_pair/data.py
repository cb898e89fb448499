"""Text to token rows: where the documents come from, what is held out, and how they are packed.

Everything here is a function of the files and of one seed, so that a stopped run goes on with the very rows it would
have seen. A *document* is a list of token ids that ends with the end-of-text token; a *row* holds whole documents.
"""

from __future__ import annotations

import json
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import numpy as np

IGNORE = -100
"""Label of positions that no loss is taken at (cross entropy's own default)."""

ORIGINS = {
    "gsm8k_train.jsonl": "github.com/openai/grade-school-math, grade_school_math/data/train.jsonl (MIT)",
    "shakespeare.txt": "github.com/karpathy/char-rnn, data/tinyshakespeare/input.txt (public domain text)",
    "speeches.txt": "github.com/nltk/nltk_data, corpora inaugural and state_union, texts joined (public domain)",
}
PACKAGES = ("click", "rich", "typer", "jinja2", "packaging", "filelock", "anyio", "h11", "huggingface_hub")
"""Distributions whose Python sources are read where they are installed; each licence is checked first."""
PERMISSIVE = re.compile(r"\b(MIT|BSD|Apache|PSF|ISC)\b", re.IGNORECASE)
SKIPPED_FOLDERS = {
    "test",
    "tests",
    "idle_test",
    "idlelib",
    "lib2to3",
    "encodings",
    "pydoc_data",
    "turtledemo",
    "__pycache__",
    "ensurepip",
    "_vendor",
}
HELD_OUT = 0.02
"""Share of each source that is never trained on."""


@dataclass
class Source:
    """One kind of text: `train` and `held_out` are documents, chat documents being (question, answer) pairs."""

    name: str
    weight: float
    train: list[str | tuple[str, str]] = field(default_factory=list)
    held_out: list[str | tuple[str, str]] = field(default_factory=list)


def load_sources(data: Path, python_chars: int = 14_000_000) -> list[Source]:
    """Read all sources; `python_chars` bounds the Python text, standard library first."""
    missing = [name for name in ORIGINS if not (data / name).is_file()]
    if missing:
        listing = "\n".join(f"  {data / name}: from {ORIGINS[name]}" for name in missing)
        raise FileNotFoundError(f"training text is missing; put it there, or pass another --data:\n{listing}")
    questions = read_gsm8k(data / "gsm8k_train.jsonl")
    kept = int(len(questions) * (1 - HELD_OUT))
    sources = [Source("gsm8k", 0.40, list(questions[:kept]), list(questions[kept:]))]
    files = read_python(python_chars)
    # Files spread over the list: neighbours are of one package, so that the held-out files resemble the others.
    every = round(1 / HELD_OUT)
    sources.append(Source("python", 0.30, [t for i, t in enumerate(files) if i % every], list(files[::every])))
    for name, weight in (("speeches", 0.17), ("shakespeare", 0.13)):
        text = (data / f"{name}.txt").read_text(encoding="utf-8")
        cut = text.rfind("\n", 0, int(len(text) * (1 - HELD_OUT))) + 1
        sources.append(Source(name, weight, pieces(text[:cut]), pieces(text[cut:])))
    return sources


def read_gsm8k(path: Path) -> list[tuple[str, str]]:
    """Questions and answers, the calculator marks `<<48/2=24>>` left out and `#### 24` written as a sentence."""
    pairs = []
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        answer = re.sub(r"<<.*?>>", "", record["answer"])
        answer = re.sub(r"\n#### *(.*)$", r"\nThe answer is \1.", answer.strip())
        pairs.append((record["question"].strip(), answer))
    return pairs


def read_python(max_chars: int) -> list[str]:
    """Sources of the standard library and of `PACKAGES`, in a fixed order, `max_chars` characters at most."""
    library = Path(sysconfig.get_paths()["stdlib"])
    # Installed packages may lie inside the library's folder: those are read by name alone, their licence checked.
    paths = [p for p in sorted(library.rglob("*.py")) if "site-packages" not in p.relative_to(library).parts]
    for package in PACKAGES:
        paths += package_files(package)
    texts: list[str] = []
    seen: set[str] = set()
    total = 0
    for path in paths:
        # Files far from ordinary code (tables, generated lists) teach a small model nothing but digits.
        if SKIPPED_FOLDERS & set(path.parts[-4:-1]) or not 400 < path.stat().st_size < 200_000:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if text in seen:
            continue
        seen.add(text)
        texts.append(text)
        total += len(text)
        if total > max_chars:
            break
    return texts


def package_files(package: str) -> list[Path]:
    """Python files of an installed distribution; none where it is absent or its licence is not permissive."""
    try:
        distribution = metadata.distribution(package)
    except metadata.PackageNotFoundError:
        return []
    facts = distribution.metadata
    licence = " ".join(
        [facts.get("License-Expression") or facts.get("License") or ""]
        + [c for c in facts.get_all("Classifier") or [] if c.startswith("License")]
    )
    if not PERMISSIVE.search(licence):
        return []
    return sorted(Path(str(f.locate())) for f in distribution.files or [] if f.suffix == ".py")


def pieces(text: str, size: int = 6000) -> list[str]:
    """A long text in pieces of about `size` characters, cut at paragraphs: the documents that are shuffled."""
    parts, current, length = [], [], 0
    for paragraph in text.split("\n\n"):
        current.append(paragraph)
        length += len(paragraph) + 2
        if length >= size:
            parts.append("\n\n".join(current))
            current, length = [], 0
    if current:
        parts.append("\n\n".join(current))
    return [part for part in parts if part.strip()]


def encode(tokenizer, documents: list) -> list[np.ndarray]:
    """Documents as uint16 token ids, each closed by the end-of-text token."""
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": d[0]}, {"role": "assistant", "content": d[1]}], tokenize=False
        )
        if isinstance(d, tuple)
        else d + tokenizer.eos_token
        for d in documents
    ]
    ids = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []
    return [np.asarray(x, dtype=np.uint16) for x in ids]


def pack(documents: list[np.ndarray], length: int, rng: np.random.Generator, look: int = 128) -> list[list[np.ndarray]]:
    """Rows of at most `length` tokens made of whole pieces: best fit among the next `look` pieces of a shuffled list.

    Documents longer than a row are cut into row-sized pieces, at a random phase so that cuts move between epochs.
    """
    parts: list[np.ndarray] = []
    for document in documents:
        start = 0
        if len(document) > length:
            start = int(rng.integers(1, length))
            parts.append(document[:start])
        parts += [document[i : i + length] for i in range(start, len(document), length)]
    order = rng.permutation(len(parts))
    pool = [parts[i] for i in order[:look]]
    rest = iter(order[look:])
    rows = []
    while pool:
        row = [pool.pop(0)]
        room = length - len(row[0])
        _refill(pool, parts, rest)
        while room > 0:
            fitting = [i for i, part in enumerate(pool) if len(part) <= room]
            if not fitting:
                break
            best = max(fitting, key=lambda i: len(pool[i]))
            part = pool.pop(best)
            row.append(part)
            room -= len(part)
            _refill(pool, parts, rest)
        rows.append(row)
    return rows


def _refill(pool: list, parts: list, rest: Iterator) -> None:
    index = next(rest, None)
    if index is not None:
        pool.append(parts[index])


class Rows:
    """An endless, seeded stream of batches over several sources, by weight; `state` is all that a restart needs."""

    def __init__(self, documents: dict[str, list[np.ndarray]], weights: dict[str, float], seed: int):
        self.documents, self.seed = documents, seed
        self.names = [name for name in documents if documents[name]]
        total = sum(weights[name] for name in self.names)
        self.weights = {name: weights[name] / total for name in self.names}
        self.state: dict[str, list[float]] = {name: [0, 0, 0.0] for name in self.names}  # epoch, cursor, owed rows
        self._packed: dict[tuple[str, int, int], list[list[np.ndarray]]] = {}

    def batch(self, rows: int, length: int, pad: int) -> tuple[np.ndarray, np.ndarray]:
        """Token ids and labels [rows, length]; labels are not shifted, padding is `IGNORE`."""
        ids = np.full((rows, length), pad, dtype=np.int64)
        labels = np.full((rows, length), IGNORE, dtype=np.int64)
        for r in range(rows):
            for name in self.names:
                self.state[name][2] += self.weights[name]
            name = max(self.names, key=lambda n: self.state[n][2])  # the source that is furthest behind its share
            self.state[name][2] -= 1
            tokens = np.concatenate(self._next(name, length))
            ids[r, : len(tokens)] = tokens
            labels[r, : len(tokens)] = tokens
        return ids, labels

    def _next(self, name: str, length: int) -> list[np.ndarray]:
        epoch, cursor, _ = self.state[name]
        rows = self._epoch(name, int(epoch), length)
        if cursor >= len(rows):
            self.state[name][0], self.state[name][1] = epoch + 1, 0
            return self._next(name, length)
        self.state[name][1] = cursor + 1
        return rows[int(cursor)]

    def _epoch(self, name: str, epoch: int, length: int) -> list[list[np.ndarray]]:
        key = (name, epoch, length)
        if key not in self._packed:
            for old in [k for k in self._packed if k[0] == name]:
                del self._packed[old]
            rng = np.random.default_rng([self.seed, epoch, length, *name.encode()])
            self._packed[key] = pack(self.documents[name], length, rng)
        return self._packed[key]
