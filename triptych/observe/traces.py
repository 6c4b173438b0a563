"""Exports requests as OpenTelemetry traces: one trace each, with a span for every interval of its timeline.

The client's W3C ``traceparent`` is continued. Spans are sent in the background, and dropped if the collector is slow or
unreachable, so that no request waits for it. Needs the extra ``otel``.
"""

from typing import Any

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from triptych.observe.perfetto import FRONTEND
from triptych.observe.requests import RequestRecord

SEND_TIMEOUT = 5
"""Timeout in seconds of one batch of spans; shutdown waits for the last one."""
MAX_INSTANCES = 256
"""Tracers kept. Instances with further names share one, so that new names can't grow the table without limit."""


class Traces:
    """Sends the spans of generation requests to an OTLP collector over HTTP."""

    def __init__(self, endpoint: str) -> None:
        """``endpoint`` is the URL that spans are posted to, such as http://collector:4318/v1/traces."""
        self._processor = BatchSpanProcessor(OTLPSpanExporter(endpoint, timeout=SEND_TIMEOUT))
        self._tracers: dict[str, Tracer] = {}

    def __call__(self, record: RequestRecord) -> None:
        if not record.generates:
            return
        parent = TraceContextTextMapPropagator().extract({"traceparent": record.traceparent})
        root = self._tracer(FRONTEND).start_span(
            f"POST {record.handler}",
            parent,
            kind=SpanKind.SERVER,
            start_time=_nanoseconds(record.began),
            attributes=_attributes(record),
        )
        record.trace_id = trace.format_trace_id(root.get_span_context().trace_id)
        if record.error or record.status >= 500:
            root.set_status(trace.StatusCode.ERROR, record.error)
        inside = trace.set_span_in_context(root)
        for interval in record.timeline():
            span = self._tracer(interval.instance or FRONTEND).start_span(
                interval.stage,
                inside,
                start_time=_nanoseconds(interval.start),
                attributes={} if interval.item is None else {"triptych.item": interval.item},
            )
            span.end(_nanoseconds(interval.end))
        root.end(_nanoseconds(record.ended))

    def close(self) -> None:
        """Send the remaining spans."""
        self._processor.shutdown()  # type: ignore[no-untyped-call]

    def _tracer(self, instance: str) -> Tracer:
        """Return the tracer of a process; each is a service instance of its own."""
        if instance not in self._tracers and len(self._tracers) >= MAX_INSTANCES:
            instance = "others"
        if instance not in self._tracers:
            resource = Resource.create({"service.name": f"triptych {instance}", "service.instance.id": instance})
            provider = TracerProvider(resource=resource, shutdown_on_exit=False)
            provider.add_span_processor(self._processor)
            self._tracers[instance] = provider.get_tracer("triptych")
        return self._tracers[instance]


def _attributes(record: RequestRecord) -> dict[str, Any]:
    """Return the span's attributes, under vLLM's names."""
    generations = record.generations
    times: dict[str, float] = {}
    for interval in record.timeline():
        if interval.item is None:
            times[interval.stage] = times.get(interval.stage, 0.0) + interval.end - interval.start
    first = min((one.first_token for one in generations if one.first_token), default=None)
    return {
        "gen_ai.request.id": record.id,
        **({"triptych.correlation_id": record.correlation} if record.correlation else {}),
        "http.response.status_code": record.status,
        "gen_ai.usage.num_sequences": len(generations),
        "gen_ai.usage.prompt_tokens": max((one.num_prompt for one in generations), default=0),
        "gen_ai.usage.completion_tokens": sum(one.num_tokens for one in generations),
        "gen_ai.latency.e2e": record.ended - record.began,
        "gen_ai.latency.time_in_queue": times.get("queue", 0.0),
        "gen_ai.latency.time_in_model_prefill": times.get("prefill", 0.0),
        "gen_ai.latency.time_in_model_decode": times.get("decode", 0.0),
        **({} if first is None else {"gen_ai.latency.time_to_first_token": first - record.began}),
    }


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
