"""Prometheus metrics of the frontend, under vLLM's names where they mean the same.

Labels have few values, and none that a client chooses: stages, error names, routes, finish reasons.
"""

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, disable_created_metrics

from triptych.observe.requests import ChoiceRecord, RequestRecord
from triptych.observe.timeline import Interval

PREFIX = "triptych:"
FINISH_REASONS = ("stop", "length", "tool_calls", "abort", "error")

_SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640,
)  # fmt: skip
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)

STAGES = {
    "fetch": "frontend", "plan": "frontend", "preprocess": "encode", "encode": "encode", "prefill": "prefill",
    "decode": "decode",
}  # fmt: skip
"""The stage that an interval belongs to, where its name decides that."""
TIMES = ("queue", "transfer", *STAGES)

disable_created_metrics()  # type: ignore[no-untyped-call]


def stage_of(interval: Interval) -> str:
    """Return the stage label of an interval. Queueing and transfers of an item belong to encode, those of the whole
    request to prefill."""
    return STAGES.get(interval.stage, "prefill" if interval.item is None else "encode")


class Metrics:
    """All metrics of a frontend. ``registry`` holds what is exposed; the router adds the instances' metrics."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        ProcessCollector(registry=self.registry)
        self._time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "from the HTTP request's arrival to its first token", _SECONDS
        )
        self._inter_token = self._histogram("inter_token_latency_seconds", "between two tokens of a choice", _SECONDS)
        self._per_token = self._histogram(
            "request_time_per_output_token_seconds", "a choice's mean time per token after the first", _SECONDS
        )
        self._end_to_end = self._histogram(
            "e2e_request_latency_seconds", "from the HTTP request's arrival to its last token", _SECONDS
        )
        self._prompt_length = self._histogram("request_prompt_tokens", "tokens of a prompt", _TOKENS)
        self._answer_length = self._histogram("request_generation_tokens", "tokens of a choice", _TOKENS)
        self._times = {
            name: self._histogram(
                f"request_{name}_time_seconds", f"one {name} interval of a request", _SECONDS, "stage"
            )
            for name in TIMES
        }
        self._prompt_tokens = self._counter("prompt_tokens", "prompt tokens of admitted requests")
        self._cached_tokens = self._counter("prompt_tokens_cached", "prompt tokens found in a prefix cache")
        self._generation_tokens = self._counter("generation_tokens", "tokens generated")
        self._items = self._counter("mm_items", "media items of admitted requests")
        self._success = self._counter("request_success", "choices that ended without an error", "finished_reason")
        self._failure = self._counter("request_failure", "choices that failed, by error name", "error")
        self._rejections = self._counter("admission_rejections", "requests rejected, by error name", "error")
        self._reencoded = self._counter("reencode", "items requested again, because their request was preempted")
        self._encode_waits = self._counter(
            "mm_single_flight_waits", "media items that waited for rows that were being encoded for another one"
        )
        self._recovered = self._counter(
            "recovered_requests", "requests continued on another instance, by the stage lost", "stage"
        )
        self._http = self._counter("http_requests", "HTTP requests answered", "handler", "status")
        for reason in FINISH_REASONS[:3]:
            self._success.labels(reason)

    # ── generations: called by the router ────────────────────────────────────────────────────────────────────

    def admitted(self, generation: ChoiceRecord) -> None:
        if generation.counted:
            self._prompt_tokens.inc(generation.num_prompt)
            self._items.inc(generation.num_items)
            self._prompt_length.observe(generation.num_prompt)

    def rejected(self, error: Exception) -> None:
        self._rejections.labels(type(error).__name__).inc()

    def received_tokens(self, generation: ChoiceRecord, count: int) -> None:
        """Count new tokens of a generation, also in its record."""
        now = generation.now()
        if generation.counted:
            self._generation_tokens.inc(count)
            if generation.first_token:
                self._inter_token.observe(now - generation.last_token)
            else:
                self._time_to_first_token.observe(now - generation.arrived)
        generation.first_token = generation.first_token or now
        generation.last_token = now
        generation.num_tokens += count

    def received_whole(self, generation: ChoiceRecord, count: int) -> None:
        """Count the tokens of an answer that came as a whole: when each was made isn't known."""
        generation.num_tokens += count
        if generation.counted:
            self._generation_tokens.inc(count)

    def ended(self, generation: ChoiceRecord) -> None:
        """Observe a generation that has its finish reason."""
        if not generation.counted:
            return
        if generation.finish_reason == "error":
            self._failure.labels(generation.error or "unknown").inc()
        else:
            self._success.labels(_known(generation.finish_reason, FINISH_REASONS)).inc()
        self._cached_tokens.inc(generation.num_reused)
        self._answer_length.observe(generation.num_tokens)
        self._observe_times(generation.intervals)
        if generation.finish_reason in ("abort", "error"):
            return
        self._end_to_end.observe(generation.now() - generation.arrived)
        if generation.num_tokens > 1 and generation.first_token:
            self._per_token.observe((generation.last_token - generation.first_token) / (generation.num_tokens - 1))

    def reencoded(self) -> None:
        """Count an item that is encoded again for the same request."""
        self._reencoded.inc()

    def waits_for_other(self) -> None:
        """Count an item that waits for rows that are being encoded for another one."""
        self._encode_waits.inc()

    def recovered(self, stage: str, count: int = 1) -> None:
        """Count requests that continue on another instance."""
        self._recovered.labels(stage).inc(count)

    # ── HTTP ─────────────────────────────────────────────────────────────────────────────────────────────────

    def answered(self, record: RequestRecord) -> None:
        """Observe an HTTP request that is over."""
        self._http.labels(record.handler, str(record.status)).inc()
        self._observe_times(record.intervals)

    def watch(self, name: str, meaning: str, value: Callable[[], float]) -> None:
        """Expose a gauge whose value is read at each scrape."""
        Gauge(PREFIX + name, meaning, registry=self.registry).set_function(value)

    # ── helpers ──────────────────────────────────────────────────────────────────────────────────────────────

    def _observe_times(self, intervals: Iterable[Interval]) -> None:
        for interval in intervals:
            if times := self._times.get(interval.stage):
                times.labels(stage_of(interval)).observe(max(0.0, interval.end - interval.start))

    def _histogram(self, name: str, meaning: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(PREFIX + name, meaning, labels, buckets=buckets, registry=self.registry)

    def _counter(self, name: str, meaning: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, meaning, labels, registry=self.registry)


def _known(value: str | None, known: tuple[str, ...]) -> str:
    return value if value in known else "other"
