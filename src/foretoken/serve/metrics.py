"""Metrics in Prometheus' form, by vLLM's names where it has them."""

from __future__ import annotations

from time import perf_counter

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from foretoken.engine.async_engine import AsyncEngine
from foretoken.engine.outputs import DecodeStats, StreamEvent

_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_BETWEEN_TOKENS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
_REQUEST = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
_LENGTHS = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 64, 128, 256)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_LABELS = ("model_name", "engine")


class Metrics:
    """What a server counts.

    Args:
        model: the name that the target is served by; a label of every number.
        engine: what decodes.
    """

    def __init__(self, model: str, engine: AsyncEngine) -> None:
        self._registry = CollectorRegistry()
        self._model = model
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
        self.prompt_tokens = self._counter("vllm:prompt_tokens", "Tokens of prompts.")
        self.generation_tokens = self._counter("vllm:generation_tokens", "Tokens generated.")
        self.first_token = self._histogram(
            "vllm:time_to_first_token_seconds", "Until a choice's first token.", _FIRST_TOKEN
        )
        self.between_tokens = self._histogram(
            "vllm:inter_token_latency_seconds", "Seconds of a round / tokens it gave.", _BETWEEN_TOKENS
        )
        self.end_to_end = self._histogram("vllm:e2e_request_latency_seconds", "A choice's whole time.", _REQUEST)
        self.prompt_lengths = self._histogram("vllm:request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self.output_lengths = self._histogram("vllm:request_generation_tokens", "Tokens of a choice.", _TOKENS)
        self.decoding = self._histogram(
            "vllm:request_decode_time_seconds", "From a choice's first token to its last.", _REQUEST
        )
        self.drafts = self._counter("vllm:spec_decode_num_drafts", "Drafts that were verified.")
        self.drafted = self._counter("vllm:spec_decode_num_draft_tokens", "Draft tokens.")
        self.accepted = self._counter("vllm:spec_decode_num_accepted_tokens", "Draft tokens accepted.")
        self.draft_length = self._histogram("foretoken:draft_length", "Draft tokens of an event's rounds.", _LENGTHS)
        self._accepted_by_position = Counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted, by position in the draft.",
            (*_LABELS, "position"),
            registry=self._registry,
        )
        self._ended = Counter(
            "vllm:request_success", "Choices that ended.", (*_LABELS, "finished_reason"), registry=self._registry
        )
        self._responses = Counter(
            "foretoken:http_responses", "HTTP responses.", (*_LABELS, "status"), registry=self._registry
        )

    def accepted_at(self, position: int, count: int) -> None:
        """Count accepted draft tokens at a position of the draft, from 0."""
        self._accepted_by_position.labels(self._model, "0", str(position)).inc(count)

    def ended(self, reason: str) -> None:
        """Count a choice that ended: ``stop``, ``length``, ``abort`` or ``error``."""
        self._ended.labels(self._model, "0", reason).inc()

    def response(self, status: int) -> None:
        """Count an HTTP response."""
        self._responses.labels(self._model, "0", str(status)).inc()

    def text(self) -> bytes:
        """All of it, in Prometheus' text format."""
        return generate_latest(self._registry)

    def _counter(self, name: str, help_text: str) -> Counter:
        return Counter(name, help_text, _LABELS, registry=self._registry).labels(self._model, "0")

    def _gauge(self, name: str, help_text: str) -> Gauge:
        return Gauge(name, help_text, _LABELS, registry=self._registry).labels(self._model, "0")

    def _histogram(self, name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, help_text, _LABELS, registry=self._registry, buckets=buckets).labels(self._model, "0")


class Watch:
    """Counts what one choice takes, event by event.

    An event's statistics are those of the moment when it is read, so that what is counted is the difference to the last
    event's.

    Args:
        metrics: where it is counted.
        prompt_tokens: of its prompt.
    """

    def __init__(self, metrics: Metrics, prompt_tokens: int) -> None:
        self._metrics = metrics
        self._began = self._last = perf_counter()
        self._reason = "abort"
        self._any = False
        self._tokens = 0
        self._seen = DecodeStats()
        self._first = self._began
        metrics.prompt_tokens.inc(prompt_tokens)
        metrics.prompt_lengths.observe(prompt_tokens)

    def event(self, event: StreamEvent) -> None:
        """Count what a round gave."""
        now, metrics = perf_counter(), self._metrics
        if event.pieces:
            metrics.generation_tokens.inc(len(event.pieces))
            self._tokens += len(event.pieces)
            if self._any:
                metrics.between_tokens.observe((now - self._last) / len(event.pieces))
            else:
                metrics.first_token.observe(now - self._began)
                self._first = now
            self._any, self._last = True, now
        self._speculation(event.stats)
        if event.completion is not None:
            reason = event.completion.finish_reason
            self._reason = "abort" if reason == "cancelled" else reason

    def failed(self) -> None:
        """The choice ended with an error."""
        self._reason = "error"

    def end(self) -> None:
        """Count the choice as ended; without its completion, as aborted."""
        self._metrics.ended(self._reason)
        if self._any:
            self._metrics.output_lengths.observe(self._tokens)
            self._metrics.decoding.observe(self._last - self._first)
        self._metrics.end_to_end.observe(perf_counter() - self._began)

    def _speculation(self, stats: DecodeStats) -> None:
        metrics, seen = self._metrics, self._seen
        drafts, drafted, accepted = stats.drafts, stats.drafted, stats.accepted
        by_position = list(stats.accepted_by_position)
        if drafts > seen.drafts or stats.rounds > seen.rounds:
            metrics.draft_length.observe(drafted - seen.drafted)
        metrics.drafts.inc(drafts - seen.drafts)
        metrics.drafted.inc(drafted - seen.drafted)
        metrics.accepted.inc(accepted - seen.accepted)
        seen.accepted_by_position += [0] * (len(by_position) - len(seen.accepted_by_position))
        for position, count in enumerate(by_position):
            if count > seen.accepted_by_position[position]:
                metrics.accepted_at(position, count - seen.accepted_by_position[position])
        seen.rounds, seen.drafts, seen.drafted, seen.accepted = stats.rounds, drafts, drafted, accepted
        seen.accepted_by_position = by_position
