"""One trace from the front to the replicas, a lost one among them, found by the request's id."""

import asyncio

import pytest
from local_fleet import LocalFleet

from headlong import SamplingParams, tracing
from headlong.checkpoint.checkpoint import Checkpoint
from headlong.cluster.board import Board
from headlong.cluster.client import ClusterEngine
from headlong.cluster.replica import Replica
from headlong.config import EngineConfig
from headlong.engine.local import LocalEngine
from headlong.engine.texts import Texts

CONFIG = EngineConfig(max_rows=4, cache_tokens=2048, max_context=512, draft_tokens=0)


@pytest.fixture
def spans(monkeypatch):
    pytest.importorskip("opentelemetry.sdk", reason="needs headlong[otel]")
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    return exporter.get_finished_spans


def test_a_request_and_the_replicas_that_had_it(spans):
    engine = LocalEngine.load(None, CONFIG)
    replicas = [Replica(engine, name) for name in "ab"]
    fleet = LocalFleet(replicas)
    board = Board(fleet)
    board.poll()
    folder = engine.service.folder
    texts = Texts.read(Checkpoint.open(folder), CONFIG)
    front = ClusterEngine(fleet, board, replicas[0].facts, str(folder), texts)
    fleet.cuts.append(3)

    async def ask():
        params = SamplingParams(max_tokens=8, ignore_eos=True)
        requests = front.prepare([tuple(range(5, 30))], params, "r7")
        with tracing.span("POST /v1/completions", {}, kind="server"):
            return [chunk async for chunk in front.stream(requests)]

    chunks = asyncio.run(ask())
    asyncio.run(engine.close())
    assert sum(len(chunk.token_ids) for chunk in chunks) == 8
    by_name: dict[str, list] = {}
    for span in spans():
        by_name.setdefault(span.name, []).append(span)
    (whole,), calls, parts = (by_name[name] for name in ("POST /v1/completions", "call a replica", "replica"))
    assert {span.context.trace_id for span in spans()} == {whole.context.trace_id}
    assert [call.parent.span_id for call in calls] == [whole.context.span_id] * 2
    assert [part.parent.span_id for part in parts] == [call.context.span_id for call in calls]
    assert {span.attributes[tracing.REQUEST_ID] for span in (*calls, *parts)} == {"r7"}
    assert [call.attributes["headlong.replica"] for call in calls] == ["a", "b"]
    assert [call.attributes["headlong.resumed"] for call in calls] == [0, 1]
    assert [call.status.status_code.name for call in calls] == ["ERROR", "UNSET"]
    assert parts[1].attributes["gen_ai.usage.output_tokens"] == 5, "those that were left"
    assert parts[1].attributes["headlong.finish_reason"] == "length"
