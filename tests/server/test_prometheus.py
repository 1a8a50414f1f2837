"""`/metrics` of a running server, read as Prometheus reads it: times of requests, lengths, errors, the process."""

import itertools
import math
import os
import sys
import threading
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

from headlong.server.request_metrics import time_buckets, token_buckets
from support.scripted import ScriptedEngine, ScriptedEngines
from support.serving import RunningServer

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "Tell me a story."}], "temperature": 0, "ignore_eos": True}
PARTS = ("queue", "prefill", "decode", "inference")


def scrape(http) -> dict[str, list]:
    """Samples by name."""
    found: dict[str, list] = {}
    for family in text_string_to_metric_families(http.get("/metrics").text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample)
    return found


def total(samples, name) -> float:
    return sum(sample.value for sample in samples.get(f"headlong:{name}", ()))


def errors(http) -> dict[tuple[str, str], float]:
    listed = scrape(http)["headlong:http_errors_total"]
    return {(one.labels["status"], one.labels["reason"]): one.value for one in listed if one.value}


def test_where_the_time_of_requests_went():
    with RunningServer(max_rows=1, draft_tokens=0) as running, running.client() as http:
        lengths = (60, 10)
        threads = [
            threading.Thread(target=http.post, args=(CHAT,), kwargs={"json": BODY | {"max_tokens": length}})
            for length in lengths
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        samples = scrape(http)
    sums = {part: total(samples, f"request_{part}_time_seconds_sum") for part in PARTS}
    assert all(total(samples, f"request_{part}_time_seconds_count") == 2 for part in PARTS)
    assert all(value > 0 for value in sums.values())
    assert math.isclose(sums["inference"], sums["prefill"] + sums["decode"], rel_tol=1e-6)
    # One row at a time: whoever came second waited for the other's steps, and waiting is no prefill.
    assert sums["queue"] > sums["prefill"]
    whole = total(samples, "e2e_request_latency_seconds_sum")
    assert sums["queue"] + sums["inference"] <= whole * 1.001
    assert total(samples, "request_generation_tokens_sum") == sum(lengths)
    assert total(samples, "request_generation_tokens_sum") == total(samples, "generation_tokens_total")
    assert total(samples, "request_prompt_tokens_sum") == total(samples, "prefix_cache_queries_total")
    assert total(samples, "request_time_per_output_token_seconds_count") == 2


@pytest.mark.parametrize("timeout", [0.5, 45, 600, 7200])
def test_buckets_reach_the_time_limit(timeout):
    bounds = time_buckets(timeout)
    assert bounds == sorted(set(bounds)) and bounds[-1] == timeout and bounds[0] == 0.001
    assert all(later / earlier <= 2.6 for earlier, later in itertools.pairwise(bounds))


def test_buckets_of_a_server():
    engines = ScriptedEngines(ScriptedEngine("A dragon slept."))
    with RunningServer(loader=engines, request_timeout=90) as running, running.client() as http:
        http.post(CHAT, json=BODY)
        samples = scrape(http)
    for name, last in (("e2e_request_latency_seconds", 90), ("request_prompt_tokens", token_buckets()[-1])):
        bounds = [float(one.labels["le"]) for one in samples[f"headlong:{name}_bucket"]]
        assert bounds[-2:] == [last, math.inf]


def test_errors_by_status_and_reason():
    engine = ScriptedEngine("A dragon slept. " * 40, pause=0.1)
    with RunningServer(loader=ScriptedEngines(engine), max_queue=1) as running, running.client() as http:
        assert "http_errors_total" in http.get("/metrics").text, "a rate needs a beginning"
        http.post(CHAT, json=BODY | {"temprature": 1})
        http.post(CHAT, content="{")
        http.get("/nowhere/a-name-of-the-client's")
        http.post(CHAT, json=BODY | {"model": "nobody"})
        http.post("/api/chat", json={"model": "nobody", "messages": BODY["messages"]})
        http.get("/" + "x" * 9000)
        with http.stream("POST", CHAT, json=BODY | {"stream": True, "n": 5}) as answer:
            next(answer.iter_lines())
            assert http.post(CHAT, json=BODY).status_code == 429
        deadline = time.monotonic() + 20
        while ("499", "client_closed") not in errors(http) and time.monotonic() < deadline:
            time.sleep(0.01)
        engine.failure = "the engine has stopped"
        with http.stream("POST", CHAT, json=BODY | {"stream": True}) as answer:
            assert answer.status_code == 200 and "the engine has stopped" in answer.read().decode()
        engine.failure = None
        assert http.post(CHAT, json=BODY | {"max_tokens": 4}).status_code == 200
        assert errors(http) == {
            ("400", "unknown_parameter"): 1,
            ("400", "invalid_json"): 1,
            ("404", "invalid_request_error"): 1,
            ("404", "model_not_found"): 2,
            ("414", "target_too_long"): 1,
            ("429", "queue_full"): 1,
            ("499", "client_closed"): 1,
            ("503", "engine_unavailable"): 1,
        }


@pytest.mark.skipif(sys.platform != "linux", reason="the library reads /proc")
def test_process():
    with RunningServer(loader=ScriptedEngines(ScriptedEngine(""))) as running, running.client() as http:
        samples = {name: listed[0].value for name, listed in scrape(http).items()}
    assert samples["process_cpu_seconds_total"] > 0
    assert samples["process_resident_memory_bytes"] > 50e6
    assert (
        3
        < samples["process_open_fds"]
        <= len(os.listdir("/proc/self/fd")) + 50
        <= samples["process_max_fds"] + 50
    )
