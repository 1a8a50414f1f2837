"""Spans of requests: what a server and a trace of several processes show; and nothing where OpenTelemetry is not."""

import json
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from headlong import tracing
from headlong.errors import ConfigError
from support.scripted import ScriptedEngine, ScriptedEngines
from support.serving import RunningServer

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "Tell me a story."}]}
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01"}


@pytest.fixture(scope="module")
def exported():
    """The spans that have ended; one provider for the process, as OpenTelemetry wants it."""
    pytest.importorskip("opentelemetry.sdk", reason="needs headlong[otel]")
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    return exporter


@pytest.fixture
def spans(exported):
    """Waits for the first span, which ends after its answer was read, and gives all there are."""
    exported.clear()

    def ended():
        deadline = time.monotonic() + 10
        while not exported.get_finished_spans():
            assert time.monotonic() < deadline, "no span ended"
            time.sleep(0.01)
        return exported.get_finished_spans()

    return ended


@pytest.fixture(scope="module")
def server():
    engine = ScriptedEngine("A dragon slept.")
    with RunningServer(
        loader=ScriptedEngines(engine), generation_config="auto", max_body_bytes=4000
    ) as server:
        yield server


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_a_span_of_its_callers_trace(server, spans, stream):
    with server.client() as http:
        answer = http.post(CHAT, json=BODY | {"stream": stream}, headers=HEADERS)
        http.get("/metrics")
        http.get("/v1/stats")
    (span,) = spans()
    assert span.name == f"POST {CHAT}" and span.kind.name == "SERVER"
    assert f"{span.context.trace_id:032x}" == TRACE
    assert f"{span.parent.span_id:016x}" == PARENT
    told = dict(span.attributes)
    assert told[tracing.REQUEST_ID] == answer.headers["x-request-id"]
    assert told["http.response.status_code"] == 200
    assert told["gen_ai.request.model"] == server.server.pool.current.id
    assert told["gen_ai.usage.input_tokens"] > 0 < told["gen_ai.usage.output_tokens"]
    assert told["headlong.finish_reason"] == "stop" and told["headlong.ttft_ms"] >= 0
    assert "dragon" not in str(told) and "story" not in str(told), "texts are nobody's business"


def test_a_refusal_is_no_failure_of_the_server(server, spans):
    with server.client() as http:
        assert http.post(CHAT, json=BODY | {"temperature": -1}).status_code == 400
    (span,) = spans()
    assert span.attributes["http.response.status_code"] == 400
    assert span.parent is None and span.status.status_code.name == "UNSET" and not span.events


@pytest.mark.parametrize("header", ["nonsense", "00-0-0-00", ""])
def test_a_header_that_is_none_begins_a_trace(server, spans, header):
    with server.client() as http:
        assert http.post(CHAT, json=BODY, headers={"traceparent": header}).status_code == 200
    assert spans()[0].parent is None


def test_what_is_carried_joins_another_process(spans):
    with tracing.span("front", {tracing.REQUEST_ID: "r"}):
        carried = tracing.carried()
    code = """
import json, sys
from headlong import tracing
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
trace.set_tracer_provider(TracerProvider())
with tracing.span("replica", {tracing.REQUEST_ID: "r", "nothing": None}, parent=json.loads(sys.argv[1])):
    span = trace.get_current_span()
    print(f"{span.context.trace_id:032x} {span.parent.span_id:016x} {sorted(span.attributes)}")
"""
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(carried)], capture_output=True, text=True, check=True
    )
    (front,) = spans()
    assert done.stdout.split()[:2] == [f"{front.context.trace_id:032x}", f"{front.context.span_id:016x}"]
    assert "nothing" not in done.stdout


def test_a_failure_marks_the_span(spans):
    with pytest.raises(RuntimeError), tracing.span("replica", {}):
        raise RuntimeError("it broke")
    assert spans()[0].status.status_code.name == "ERROR"


def test_without_opentelemetry_nothing_happens(monkeypatch):
    monkeypatch.setattr(tracing, "trace", None)
    with tracing.span("front", {"a": 1}, kind="server", parent=HEADERS):
        tracing.annotate({"b": 2})
        assert tracing.carried() == {}


def test_an_endpoint_without_the_packages_is_an_error(monkeypatch):
    tracing.start("headlong")  # no endpoint, no packages needed
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(
        ConfigError, match=r"OTEL_EXPORTER_OTLP_ENDPOINT is set, but .* not installed; pip install"
    ):
        tracing.start("headlong")


def test_spans_reach_the_collector_that_the_environment_names(monkeypatch):
    """A process of its own, with everything as a user would have it."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs headlong[otel]")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    got: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self):
            got.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    collector = HTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.server_port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    monkeypatch.delenv("OTEL_SERVICE_NAME", raising=False)
    code = (
        "from headlong import tracing\ntracing.start('headlong-replica')\n"
        "with tracing.span('replica', {tracing.REQUEST_ID: 'r7'}): pass"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    collector.shutdown()
    collector.server_close()
    ((path, body),) = got
    (resource,) = ExportTraceServiceRequest.FromString(body).resource_spans
    named = {one.key: one.value.string_value for one in resource.resource.attributes}
    (span,) = resource.scope_spans[0].spans
    assert path == "/v1/traces" and named["service.name"] == "headlong-replica"
    assert span.name == "replica" and span.attributes[0].value.string_value == "r7"
