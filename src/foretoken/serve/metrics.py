"""Metrics in Prometheus' form, by vLLM's names where it has them."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import accumulate
from time import perf_counter, time

from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from foretoken.engine.outputs import DecodeStats, StreamEvent
from foretoken.serve.decoding import Decoding
from foretoken.serve.progress import PLAIN_ROUND

_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_BETWEEN_TOKENS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
_REQUEST = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
_LENGTHS = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 64, 128, 256)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_LABELS = ("model_name", "engine")


class _Count:
    """A counter that costs an addition; `Counts` tells it. The event loop's thread alone writes to it."""

    __slots__ = ("began", "value")

    def __init__(self) -> None:
        self.value, self.began = 0.0, time()

    def inc(self, amount: float = 1.0) -> None:
        """Count so much."""
        self.value += amount


class _Spread:
    """A histogram likewise.

    Args:
        bounds: upper bounds of the buckets, the last one without.
    """

    __slots__ = ("began", "bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds, self.counts = bounds, [0] * (len(bounds) + 1)
        self.sum, self.began = 0.0, time()

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value, or as many of it."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += times * value

    @property
    def buckets(self) -> list[tuple[str, float]]:
        """Upper bounds, and how many values are up to each."""
        names = [*map(floatToGoString, self.bounds), "+Inf"]
        return list(zip(names, map(float, accumulate(self.counts)), strict=True))


class Counts(Collector):
    """Tells Prometheus, when it asks, what was counted.

    The library's own counters take a lock and check their arguments at every call, which for every event of every
    stream is a good part of what an event costs.

    Args:
        labels: values of `_LABELS`.
    """

    def __init__(self, *labels: str) -> None:
        self._labels = labels
        self._counters: list[tuple[str, str, tuple[str, ...], dict[tuple[str, ...], _Count]]] = []
        self._histograms: list[tuple[str, str, _Spread]] = []

    def counters(self, name: str, help_text: str, *further: str) -> dict[tuple[str, ...], _Count]:
        """A counter for each value of further labels, which come with the first count."""
        counts: dict[tuple[str, ...], _Count] = defaultdict(_Count)
        self._counters.append((name, help_text, further, counts))
        return counts

    def counter(self, name: str, help_text: str) -> _Count:
        """A counter without further labels."""
        return self.counters(name, help_text)[()]

    def histogram(self, name: str, help_text: str, bounds: tuple[float, ...]) -> _Spread:
        """A histogram."""
        spread = _Spread(tuple(map(float, bounds)))
        self._histograms.append((name, help_text, spread))
        return spread

    def collect(self) -> Iterator[Metric]:
        """All of it, in the library's form."""
        for name, help_text, further, counts in self._counters:
            counter = CounterMetricFamily(name, help_text, labels=(*_LABELS, *further))
            for labels, count in list(counts.items()):
                counter.add_metric((*self._labels, *labels), count.value, created=count.began)
            yield counter
        for name, help_text, spread in self._histograms:
            histogram = HistogramMetricFamily(name, help_text, labels=_LABELS)
            histogram.add_metric(self._labels, spread.buckets, spread.sum)
            histogram.add_sample(f"{name}_created", dict(zip(_LABELS, self._labels, strict=True)), spread.began)
            yield histogram


class Metrics:
    """What a server counts.

    Args:
        model: the name that the target is served by; a label of every number.
        engine: what decodes.
    """

    def __init__(self, model: str, engine: Decoding) -> None:
        self._registry = CollectorRegistry()
        self._labels = model, "0"
        self._counts = Counts(*self._labels)
        self._registry.register(self._counts)
        for name, help_text, value in (
            ("vllm:num_requests_running", "Choices that are decoded.", lambda: engine.occupancy().running),
            ("vllm:num_requests_waiting", "Choices that wait for a row.", lambda: engine.occupancy().waiting),
            ("vllm:kv_cache_usage_perc", "KV cache in use; 1 is all of it.", lambda: engine.occupancy().cache_usage),
            (
                "foretoken:speedup_estimate",
                "Tokens in the time that plain decoding takes for one, as the policy estimates it.",
                lambda: engine.speedup,
            ),
        ):
            self._gauge(name, help_text).set_function(value)
        self.prompt_tokens = self._counts.counter("vllm:prompt_tokens", "Tokens of prompts.")
        self.generation_tokens = self._counts.counter("vllm:generation_tokens", "Tokens generated.")
        self.first_token = self._counts.histogram(
            "vllm:time_to_first_token_seconds", "Until a choice's first token.", _FIRST_TOKEN
        )
        self.between_tokens = self._counts.histogram(
            "vllm:inter_token_latency_seconds", "Seconds of a round / tokens it gave.", _BETWEEN_TOKENS
        )
        self.end_to_end = self._counts.histogram("vllm:e2e_request_latency_seconds", "A choice's whole time.", _REQUEST)
        self.prompt_lengths = self._counts.histogram("vllm:request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self.output_lengths = self._counts.histogram("vllm:request_generation_tokens", "Tokens of a choice.", _TOKENS)
        self.longest_outputs = self._counts.histogram(
            "vllm:request_max_num_generation_tokens", "Tokens of a request's longest choice.", _TOKENS
        )
        self.queueing = self._counts.histogram("vllm:request_queue_time_seconds", "Until a choice has a row.", _REQUEST)
        self.prefill = self._counts.histogram(
            "vllm:request_prefill_time_seconds", "From a choice's row to its first token.", _REQUEST
        )
        self.decoding = self._counts.histogram(
            "vllm:request_decode_time_seconds", "From a choice's first token to its last.", _REQUEST
        )
        self.drafts = self._counts.counter("vllm:spec_decode_num_drafts", "Drafts that were verified.")
        self.drafted = self._counts.counter("vllm:spec_decode_num_draft_tokens", "Draft tokens.")
        self.accepted = self._counts.counter("vllm:spec_decode_num_accepted_tokens", "Draft tokens accepted.")
        self.draft_length = self._counts.histogram("foretoken:draft_length", "Draft tokens of a round.", _LENGTHS)
        self._accepted_by_position = self._counts.counters(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted, by position in the draft.",
            "position",
        )
        self._ended = self._counts.counters("vllm:request_success", "Choices that ended.", "finished_reason")
        self._responses = self._counts.counters("foretoken:http_responses", "HTTP responses.", "status")

    def accepted_at(self, position: int, count: int) -> None:
        """Count accepted draft tokens at a position of the draft, from 0."""
        self._accepted_by_position[str(position),].inc(count)

    def ended(self, reason: str) -> None:
        """Count a choice that ended: ``stop``, ``length``, ``abort`` or ``error``."""
        self._ended[reason,].inc()

    def response(self, status: int) -> None:
        """Count an HTTP response."""
        self._responses[str(status),].inc()

    def text(self) -> bytes:
        """All of it, in Prometheus' text format; of what the engine knows, as it was when it was refreshed."""
        return generate_latest(self._registry)

    def _gauge(self, name: str, help_text: str) -> Gauge:
        return Gauge(name, help_text, _LABELS, registry=self._registry).labels(*self._labels)


class Watch:
    """Counts what one choice takes, event by event.

    Args:
        metrics: where it is counted.
        prompt_tokens: of its prompt.

    Attributes:
        begun_at: tells when the choice got a row, on the clock of `time.perf_counter`.
        tokens: that it has.
    """

    def __init__(self, metrics: Metrics, prompt_tokens: int) -> None:
        self._metrics = metrics
        self._began = self._last = perf_counter()
        self._reason = "abort"
        self._any = False
        self._tokens = self._rounds = self._drafted = 0  # that are not in the histograms yet
        self.tokens = 0
        self.begun_at: Callable[[], float | None] = lambda: None
        self._first = self._began
        self._ended = False
        metrics.prompt_tokens.inc(prompt_tokens)
        metrics.prompt_lengths.observe(prompt_tokens)

    def event(self, event: StreamEvent, added: DecodeStats) -> None:
        """Count an event, and what was added to the statistics since the one before."""
        self.rounds(added)
        if event.completion is not None:
            reason = event.completion.finish_reason
            self._reason = "abort" if reason == "cancelled" else reason

    def rounds(self, added: DecodeStats) -> None:
        """Count what rounds added to the statistics, which may have been read while one of them was being counted."""
        now, metrics, tokens = perf_counter(), self._metrics, added.emitted
        self._rounds += added.rounds
        if tokens:
            metrics.generation_tokens.inc(tokens)
            self.tokens += tokens
            self._tokens += tokens
        if self._tokens and self._rounds:
            if self._any:
                metrics.between_tokens.observe((now - self._last) / self._tokens, self._rounds)
            else:
                self._first_token(now)
            self._any, self._last, self._tokens, self._rounds = True, now, 0, 0
        if added is PLAIN_ROUND and not self._drafted:
            metrics.draft_length.observe(0)
        else:
            self._speculation(added)

    def failed(self) -> None:
        """The choice ended with an error."""
        self._reason = "error"

    def end(self) -> None:
        """Count the choice as ended, once; without its completion, as aborted."""
        if self._ended:
            return
        self._ended = True
        self._metrics.ended(self._reason)
        if self._any:
            self._metrics.output_lengths.observe(self.tokens)
            self._metrics.decoding.observe(self._last - self._first)
        self._metrics.end_to_end.observe(perf_counter() - self._began)

    def _first_token(self, now: float) -> None:
        metrics, begun = self._metrics, self.begun_at()
        metrics.first_token.observe(now - self._began)
        self._first = now
        if begun is not None:
            metrics.queueing.observe(begun - self._began)
            metrics.prefill.observe(now - begun)

    def _speculation(self, added: DecodeStats) -> None:
        metrics = self._metrics
        self._drafted += added.drafted
        if added.rounds > 0:
            metrics.draft_length.observe(self._drafted / added.rounds, added.rounds)
            self._drafted = 0
        metrics.drafts.inc(added.drafts)
        metrics.drafted.inc(added.drafted)
        metrics.accepted.inc(added.accepted)
        for position, count in enumerate(added.accepted_by_position):
            if count > 0:
                metrics.accepted_at(position, count)
