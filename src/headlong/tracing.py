"""Spans of requests by OpenTelemetry, where its packages are installed (`headlong[otel]`); nothing at all elsewhere.

What is called with W3C's `traceparent` becomes part of the caller's trace, and passes it on. Spans go wherever the
process's tracer provider sends them; `start` makes one that exports over OTLP where the environment names an endpoint.
Knows no request and no server.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

from headlong import env
from headlong.errors import ConfigError

trace: Any = None
"""OpenTelemetry's module, or None where it is not installed."""
_propagator: Any = None
try:
    from opentelemetry import trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    _propagator = TraceContextTextMapPropagator()
except ImportError:
    pass

NAME = "headlong"
TRACEPARENT = "traceparent"
REQUEST_ID = "headlong.request_id"
"""The attribute by which one request's spans are found in every process."""
Kind = Literal["server", "client", "internal"]
Attribute = str | int | float | bool
Attributes = Mapping[str, Attribute | None]
"""What is told of a span, under OpenTelemetry's names where it has one; what is None is left out."""


def start(service: str) -> None:
    """Exports this process's spans from here on, where the environment says where to; once for each process. Raises a
    ConfigError where it does and the packages are missing."""
    endpoint = env.traces_endpoint()
    if endpoint is None:
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # type: ignore[import-not-found]
            OTLPSpanExporter,
        )
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(
            f"{endpoint} is set, but {error.name} is not installed; pip install 'headlong[otel]', or unset it"
        ) from error
    if isinstance(trace.get_tracer_provider(), TracerProvider):
        return  # somebody set up tracing for the whole process
    resource = Resource.create()  # reads the environment, as the exporter and the sampler do
    if str(resource.attributes["service.name"]).startswith("unknown_service"):
        resource = resource.merge(Resource({"service.name": service}))
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)


@contextmanager
def span(
    name: str, attributes: Attributes, *, kind: Kind = "internal", parent: Mapping[str, str] | None = None
) -> Iterator[None]:
    """A span around the block, which is where `annotate` and `carried` belong to. Its parent is the one whose
    `traceparent` is among the given headers, or the present one. An exception marks it as failed."""
    if trace is None:
        yield
        return
    context = None if parent is None else _propagator.extract(dict(parent))
    with trace.get_tracer(NAME).start_as_current_span(
        name, context=context, kind=trace.SpanKind[kind.upper()], attributes=_known(attributes)
    ):
        yield


class Apart:
    """A span that is nobody's present one: generators are stepped in whatever context asks them."""

    def __init__(self, span: Any = None) -> None:
        self._span = span

    def annotate(self, attributes: Attributes) -> None:
        if self._span is not None:
            self._span.set_attributes(_known(attributes))

    def carried(self) -> dict[str, str]:
        """The headers that make this span the parent of what they are sent along with."""
        headers: dict[str, str] = {}
        if self._span is not None:
            _propagator.inject(headers, trace.set_span_in_context(self._span))
        return headers


@contextmanager
def apart(
    name: str, attributes: Attributes, *, kind: Kind = "internal", parent: Mapping[str, str] | None = None
) -> Iterator[Apart]:
    """Makes a span as `span` does, for a block of a generator that gives values in between."""
    if trace is None:
        yield Apart()
        return
    context = None if parent is None else _propagator.extract(dict(parent))
    made = trace.get_tracer(NAME).start_span(
        name, context=context, kind=trace.SpanKind[kind.upper()], attributes=_known(attributes)
    )
    try:
        yield Apart(made)
    except Exception as error:
        made.set_status(trace.StatusCode.ERROR, f"{type(error).__name__}: {error}")
        raise
    finally:
        made.end()


def annotate(attributes: Attributes) -> None:
    """Adds attributes to the present span."""
    if trace is not None:
        trace.get_current_span().set_attributes(_known(attributes))


def request_id(sequence_id: str) -> str:
    """The id of the request that a sequence is one of: engines' ids add the prompt's number and the choice's."""
    return sequence_id.partition("/")[0]


def carried() -> dict[str, str]:
    """The headers that make the present span the parent of what they are sent along with; none where there is none."""
    headers: dict[str, str] = {}
    if trace is not None:
        _propagator.inject(headers)
    return headers


def _known(attributes: Attributes) -> dict[str, Attribute]:
    return {name: value for name, value in attributes.items() if value is not None}
