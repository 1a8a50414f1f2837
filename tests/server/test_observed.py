"""What the server says of itself: timings, metrics, statistics, history. Figures must agree with each other."""

import io
import json

import pytest
from prometheus_client.parser import text_string_to_metric_families

from headlong.server import logs
from support.serving import RunningServer

BODY = {
    "messages": [{"role": "user", "content": "Write a short story about a shy dragon who learns to share."}],
    "temperature": 0,
    "max_tokens": 80,
    "ignore_eos": True,
}


def scrape(http) -> dict[tuple[str, str], float]:
    """Samples by name and position (or finish reason)."""
    samples = {}
    for family in text_string_to_metric_families(http.get("/metrics").text):
        for sample in family.samples:
            label = sample.labels.get("position") or sample.labels.get("finished_reason") or ""
            samples[sample.name, label] = sample.value
    return samples


def test_three_vocabularies_agree():
    with RunningServer() as running, running.client() as http:
        answer = http.post("/v1/chat/completions", json=BODY | {"speculative": {"mtp": 4}}).json()
        timings, usage = answer["timings"], answer["usage"]
        drafting = answer["metrics"]["speculative_decoding"]
        assert timings["predicted_n"] == usage["completion_tokens"] == 80
        assert timings["prompt_n"] == usage["prompt_tokens"]
        assert timings["draft_n"] == drafting["num_draft_tokens"]
        details = usage["completion_tokens_details"]
        assert timings["draft_n_accepted"] == drafting["num_accepted_draft_tokens"]
        assert details["accepted_prediction_tokens"] == timings["draft_n_accepted"]
        histogram = drafting["acceptance_histogram"]
        assert sum(histogram) == drafting["num_spec_steps"]
        assert sum(n * steps for n, steps in enumerate(histogram)) == timings["draft_n_accepted"]
        mean = 1 + timings["draft_n_accepted"] / drafting["num_spec_steps"]
        assert abs(drafting["mean_acceptance_length"] - mean) < 1e-9
        assert timings["predicted_ms"] > 0 and timings["predicted_per_second"] > 0

        samples = scrape(http)
        assert samples["headlong:spec_decode_num_drafts_total", ""] == drafting["num_spec_steps"]
        assert samples["headlong:spec_decode_num_draft_tokens_total", ""] == timings["draft_n"]
        assert samples["headlong:spec_decode_num_accepted_tokens_total", ""] == timings["draft_n_accepted"]
        per_position = [
            value for (name, _), value in samples.items() if name.endswith("accepted_tokens_per_pos_total")
        ]
        assert len(per_position) == 4 and sum(per_position) == timings["draft_n_accepted"]
        assert samples["headlong:generation_tokens_total", ""] == 80
        assert samples["headlong:request_success_total", "length"] == 1
        assert samples["headlong:time_to_first_token_seconds_count", ""] == 1
        assert samples["headlong:inter_token_latency_seconds_count", ""] == 79
        assert samples["headlong:num_requests_running", ""] == 0
        assert samples["headlong:kv_cache_usage_perc", ""] == 0


def test_why_nothing_was_drafted(server):
    with server.client() as http:
        off = http.post("/v1/chat/completions", json=BODY | {"speculative": {"mtp": "off"}}).json()
    assert off["metrics"] == {"speculative_decoding": None, "reason": "draft_tokens is 0 for this request"}
    assert off["timings"]["draft_n"] == 0


def test_a_model_without_drafting_says_why():
    with RunningServer(mtp="off") as running, running.client() as http:
        card = http.get("/v1/models").json()["data"][0]
        assert card["native_mtp"] is None
        assert "turned off" in card["headlong"]["mtp"]["reason"]
        refused = http.post("/v1/chat/completions", json=BODY | {"speculative": {"mtp": "on"}})
        assert refused.status_code == 400 and "turned off" in refused.json()["error"]["message"]
        served = http.post("/v1/chat/completions", json=BODY | {"speculative": {"mtp": 3}}).json()
        assert "turned off" in served["metrics"]["reason"]


def test_snapshot():
    with RunningServer() as running, running.client() as http:
        before = http.get("/v1/stats").json()
        assert before["plain_tokens_per_second"] > 0
        assert before["totals"]["completion_tokens"] == 0, "the warm-up does not count"
        http.post("/v1/chat/completions", json=BODY)
        with http.stream("GET", "/v1/stats/stream") as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            lines = (line for line in answer.iter_lines() if line.startswith("data: "))
            first, second = (json.loads(next(lines)[6:]) for _ in range(2))
        assert second["time"] > first["time"]
        assert second["totals"]["completion_tokens"] == 80 and second["totals"]["requests"] == 1
        assert second["positions"][0]["tried"] >= second["positions"][0]["accepted"] > 0
        request = second["requests"][0]
        assert request["completion_tokens"] == 80 and request["mtp"] and request["ttft_ms"] > 0
        assert request["drafted"] == second["totals"]["drafted"]
        assert request["accepted"] == second["totals"]["accepted"]
        assert second["rows"] == {"running": 0, "waiting": 0, "max": 16, "queue_limit": 256}


def test_health_and_version(server):
    with server.client() as http:
        assert http.get("/health").json() == {"status": "ok", "model": "tale-20m"}
        assert set(http.get("/version").json()) == {"version"}
        card = http.get("/v1/models/tale-20m").json()
        assert card["native_mtp"] == {"default_k": 3, "max_k": 8}


@pytest.mark.usefixtures("loggers_as_before")
@pytest.mark.parametrize("wanted", [False, True])
def test_the_log_holds_peoples_text_only_if_asked(wanted):
    told = io.StringIO()
    with RunningServer(log_prompts=wanted) as running, running.client() as http:
        logs.setup(format="json", prompts=wanted, stream=told)
        answer = http.post("/v1/chat/completions", json=BODY | {"max_tokens": 8}).json()
    entry = next(json.loads(line) for line in told.getvalue().splitlines() if '"endpoint"' in line)
    assert entry["completion_tokens"] == 8 and entry["request_id"] in answer["id"]
    text = answer["choices"][0]["message"]["content"]
    assert ("shy dragon" in told.getvalue()) == wanted
    assert (entry.get("output") == [text]) == wanted


def test_a_prompt_asked_again_is_not_read_again():
    """As it is by default: the cache on, and drafts where they pay."""
    body = {
        "model": "tale-20m",
        "prompt": "Once upon a time there was a fox. " * 30,
        "max_tokens": 8,
        "temperature": 0,
    }
    with RunningServer() as running, running.client() as http:
        first, second = (http.post("/v1/completions", json=body).json() for _ in range(2))
        assert second["choices"][0]["text"] == first["choices"][0]["text"]
        cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in (first, second)]
        asked = first["usage"]["prompt_tokens"]
        assert cached[0] == 0 and asked / 2 < cached[1] < asked
        assert (
            second["timings"]["cache_n"] == cached[1] and second["timings"]["prompt_n"] == asked - cached[1]
        )
        metrics = http.get("/metrics").text
        assert f'headlong:prefix_cache_hits_total{{model_name="tale-20m"}} {float(cached[1])}' in metrics
        message = {
            "model": "tale-20m",
            "max_tokens": 4,
            "messages": [{"role": "user", "content": body["prompt"]}],
        }
        answers = [http.post("/v1/messages", json=message).json()["usage"] for _ in range(2)]
        assert answers[1]["cache_read_input_tokens"] > 0
        totals = [usage["input_tokens"] + usage["cache_read_input_tokens"] for usage in answers]
        assert totals[0] == totals[1]
