"""Foretoken's own server as a subject: ``foretoken serve`` in a process of its own, asked over HTTP."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import torch

from foretoken.audit.endpoint import EndpointSubject
from foretoken.audit.errors import AuditError
from foretoken.audit.reference import ReferenceModel
from foretoken.audit.statistics import Floats
from foretoken.audit.subjects import Sample, SampleRequest, Speculation
from foretoken.audit.world_models import LETTERS
from foretoken.audit.worlds import World

PREDICTIONS = ("right", "half", "wrong")
"""What is predicted: the most probable output, every second token of it, or other tokens."""

START_SECONDS = 120.0
_ADDRESS = re.compile(r"at (http://\S+?)/v1")
_COUNTERS = {
    "drafted": "vllm:spec_decode_num_draft_tokens_total",
    "accepted": "vllm:spec_decode_num_accepted_tokens_total",
}
_PREDICTED = 64  # tokens of a prediction: more than any output has
_BANNED = -1e9  # a score that no temperature makes possible


class AlternatingReference(ReferenceModel):
    """A small world's target under the grammar `alternating`: its distribution without what the grammar forbids."""

    def scores(self, prompt: Sequence[int], outputs: Sequence[Sequence[int]]) -> list[Floats]:
        """See `ReferenceModel.scores`."""
        half = self.vocab_size // 2
        found = []
        for scores in super().scores(prompt, outputs):
            scores = scores.copy()
            scores[::2, half:] = _BANNED
            scores[1::2, :half] = _BANNED
            found.append(scores)
        return found


def alternating(world: World) -> str:
    """A regular expression: a letter of the first half of the vocabulary, one of the second half, and so on."""
    half = world.vocab_size // 2
    return f"([{LETTERS[:half]}][{LETTERS[half : world.vocab_size]}])*"


def claim_alternating(world: World) -> None:
    """Make the target under the grammar `alternating` the world's claim.

    Its saved tokenizer then tells the letters' bytes, which grammars are about.
    """
    from tokenizers import decoders
    from transformers import AutoTokenizer

    world.__dict__["target_reference"] = AlternatingReference(world.target, torch.float64)
    tokenizer = AutoTokenizer.from_pretrained(world.target_path)
    tokenizer.backend_tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save_pretrained(world.target_path)


def predictions(world: World, kind: str) -> dict[tuple[int, ...], str]:
    """A prediction for each of a world's prompts, as text.

    Raises:
        AuditError: an unknown kind.
    """
    if kind not in PREDICTIONS:
        raise AuditError(f"unknown prediction {kind!r}: choose one of {', '.join(PREDICTIONS)}")
    found = {}
    for prompt in world.prompts:
        tokens = torch.tensor([prompt])
        with torch.inference_mode():
            output = world.target.generate(
                tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=_PREDICTED
            )
        right = output[0, len(prompt) :].tolist()
        other = np.random.default_rng(0).integers(0, world.vocab_size, len(right)).tolist()
        chosen = {
            "right": right,
            "half": [a if i % 2 else b for i, (a, b) in enumerate(zip(right, other, strict=True))],
            "wrong": other,
        }[kind]
        found[prompt] = " ".join(LETTERS[token] for token in chosen)
    return found


class ServedSubject(EndpointSubject):
    """``foretoken serve`` in a process of its own.

    Args:
        options: of ``foretoken serve``; a free port is added.
        concurrency: requests under way at once.
        samples_per_request: the ``n`` of a request.
        extra: further fields of every request.
        predicted: the field ``prediction``, by prompt.

    Raises:
        AuditError: it does not start.
    """

    def __init__(
        self,
        options: Sequence[str],
        *,
        concurrency: int = 16,
        samples_per_request: int = 4,
        extra: dict[str, Any] | None = None,
        predicted: dict[tuple[int, ...], str] | None = None,
    ) -> None:
        from foretoken import __version__

        command = [sys.executable, "-m", "foretoken", "serve", *options, "--port", "0", "--no-color"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        self._said: deque[str] = deque(maxlen=20)
        self._url = ""
        self._listens = Event()
        # What the server says is read as long as it runs: a full pipe would hold it up.
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()
        self._listens.wait(START_SECONDS)
        try:
            if not self._url:
                raise AuditError(f"foretoken serve does not start: {' '.join(self._said)[-400:] or 'it says nothing'}")
            super().__init__(self._url, concurrency=concurrency, samples_per_request=samples_per_request, extra=extra)
        except AuditError:
            self.close()
            raise
        self.name = "Foretoken's server"
        self.details = {"foretoken": __version__, "options": " ".join(_without_paths(options))}
        self._predicted = predicted or {}
        self.speculation = Speculation()

    def sample(self, request: SampleRequest) -> list[Sample]:
        """See `EndpointSubject.sample`; the server's own counters tell what was drafted."""
        samples = super().sample(request)
        counts = self._counts()
        self.speculation = Speculation(int(counts["drafted"]), int(counts["accepted"]))
        return samples

    def fields(self, request: SampleRequest) -> dict[str, Any]:
        """The prediction for the request's prompt."""
        if not self._predicted:
            return {}
        return {"prediction": {"type": "content", "content": self._predicted.get(tuple(request.prompt), "")}}

    def close(self) -> None:
        """End the server."""
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._said.append(line.strip())
            found = _ADDRESS.search(line)
            if found is not None and not self._url:
                self._url = found[1]
                self._listens.set()
        self._listens.set()

    def _counts(self) -> dict[str, float]:
        text = self.text("/metrics")
        return {
            name: sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(metric + "{"))
            for name, metric in _COUNTERS.items()
        }


def _without_paths(options: Sequence[str]) -> list[str]:
    return [Path(one).name if "/" in one else one for one in options]
