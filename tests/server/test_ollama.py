"""Ollama's chat and generate over real sockets: its own Python package, unmodified, and requests as Open WebUI and the
command line send them."""

import json
import time

import ollama
import pytest

from support.scripted import ScriptedEngine, ScriptedEngines
from support.serving import RunningServer

MODEL = "tale-20m"
USER = [{"role": "user", "content": "Tell me a story about a shy dragon."}]
SAMPLED = {"temperature": 0.8, "top_k": 30, "top_p": 0.9, "min_p": 0.02, "seed": 7}
MORE = {"repeat_penalty": 1.1, "repeat_last_n": -1, "presence_penalty": 0.2, "frequency_penalty": 0.1}
OPENAI = {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.1}
DURATIONS = ("total_duration", "prompt_eval_duration", "eval_duration")
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "days": [1, 2]}}\n</tool_call>'


def get_weather(city: str, days: list[int] | None = None) -> str:
    """Weather of a city.

    Args:
        city: The city.
        days: Which days.
    """
    return f"{city}: sunny on {days}"


def client_of(running, **options):
    return ollama.Client(running.url, **options)


@pytest.fixture(scope="module")
def client(server):
    return client_of(server)


@pytest.fixture(scope="module")
def http(server):
    with server.client() as one:
        yield one


def scripted(answer, **options):
    return RunningServer(loader=ScriptedEngines(ScriptedEngine(answer)), **options)


def lines(answer):
    return [json.loads(line) for line in answer.text.split("\n") if line]


class TestChat:
    def test_the_text_is_that_of_the_other_dialects(self, client, http):
        """With the same settings, streamed or whole, drafted or not, under either of its names."""
        body = {"messages": USER, "max_tokens": 40} | SAMPLED | OPENAI
        wanted = http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
        options = SAMPLED | MORE | {"num_predict": 40}
        whole = client.chat(MODEL, USER, options=options)
        streamed = list(client.chat(f"{MODEL}:latest", USER, options=options, stream=True))
        assert whole.message.content == "".join(one.message.content for one in streamed) == wanted
        plain = {"model": MODEL, "messages": USER, "options": options, "stream": False}
        plain = http.post("/api/chat", json=plain | {"speculative": {"mtp": "off"}}).json()
        assert plain["message"]["content"] == wanted and plain["timings"]["draft_n"] == 0

    def test_figures(self, client):
        *pieces, last = client.chat(MODEL, USER, options={"num_predict": 12, "temperature": 0}, stream=True)
        assert len(pieces) > 1 and not any(one.done for one in pieces)
        assert last.done and last.done_reason == "length" and last.message.content == ""
        assert last.eval_count == 12 and last.prompt_eval_count > 5
        assert all(getattr(last, name) > 0 for name in (*DURATIONS, "load_duration"))
        assert last.prompt_eval_duration + last.eval_duration <= last.total_duration < 60e9

    def test_streams_are_lines_of_json(self, http):
        answer = http.post(
            "/api/chat", json={"model": MODEL, "messages": USER, "options": {"num_predict": 8}}
        )
        assert answer.headers["content-type"] == "application/x-ndjson"
        assert answer.text.endswith("}\n") and answer.text.isascii()
        first, last = lines(answer)[0], lines(answer)[-1]
        assert first["model"] == MODEL and first["created_at"].endswith("Z")
        assert last["timings"]["predicted_n"] == 8 and "speculative_decoding" in last["metrics"]

    def test_a_text_with_other_line_ends(self):
        """Characters that some clients take for the end of a line do not cut one."""
        text = "one\u2028two\x85three\r\nfour"
        with scripted(text) as running:
            said = client_of(running).chat(MODEL, USER, stream=True)
            assert "".join(one.message.content for one in said) == text

    def test_json_and_schemas(self, client):
        options = {"temperature": 0.9, "seed": 5, "num_predict": 200}
        schema = {
            "type": "object",
            "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}},
            "required": ["age"],
            "additionalProperties": False,
        }
        form = json.loads(client.chat(MODEL, USER, format=schema, options=options).message.content)
        assert set(form) == {"age"} and 0 <= form["age"] <= 99
        said = client.generate(MODEL, "A dragon as JSON.", format="json", options=options)
        assert said.done_reason == "length" or isinstance(json.loads(said.response), dict)
        assert said.response.lstrip().startswith("{")

    def test_stop(self, client):
        whole = client.chat(MODEL, USER, options={"temperature": 0, "num_predict": 40})
        word = whole.message.content.split()[3]
        cut = client.chat(MODEL, USER, options={"temperature": 0, "num_predict": 40, "stop": [word]})
        assert cut.done_reason == "stop" and cut.message.content == whole.message.content.partition(word)[0]

    def test_logprobs(self, client, http):
        given = {"options": {"num_predict": 6, "temperature": 0}, "logprobs": True, "top_logprobs": 2}
        whole = client.chat(MODEL, USER, **given)
        streamed = client.chat(MODEL, USER, **given, stream=True)
        listed = [entry for one in streamed for entry in one.logprobs or ()]
        assert [one.token for one in listed] == [one.token for one in whole.logprobs] and len(listed) == 6
        body = {"messages": USER, "max_tokens": 6, "temperature": 0, "logprobs": True, "top_logprobs": 2}
        others = http.post("/v1/chat/completions", json=body).json()["choices"][0]["logprobs"]["content"]
        assert [one.logprob for one in whole.logprobs] == [one["logprob"] for one in others]
        assert all(len(one.top_logprobs) == 2 for one in listed)

    def test_leaving_frees_the_row(self, server, client):
        history = server.server.observer.history
        history.clear()
        stream = client.chat(MODEL, USER, options={"num_predict": 3000}, stream=True)
        next(stream)
        stream.close()
        engine, deadline = server.server.pool.current.client, time.monotonic() + 20
        while (not history or engine.stats().usage.running) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert history[0]["finish_reason"] == "cancelled" and history[0]["endpoint"] == "api/chat"
        assert engine.stats().usage.running == 0


class TestToolsAndThinking:
    def test_calls_are_objects(self):
        with scripted(CALL + CALL) as running:
            client = client_of(running)
            whole = client.chat(MODEL, USER, tools=[get_weather])
            pieces = list(client.chat(MODEL, USER, tools=[get_weather], stream=True))
            with running.client() as http:
                tools = [{"function": {"name": "get_weather", "parameters": {"type": "object"}}}]
                body = {"model": MODEL, "messages": USER, "tools": tools, "stream": False}
                raw = http.post("/api/chat", json=body).json()["message"]["tool_calls"]
        assert [call.function.arguments for call in whole.message.tool_calls] == [
            {"city": "Rome", "days": [1, 2]}
        ] * 2
        assert [call for one in pieces for call in one.message.tool_calls or ()] == whole.message.tool_calls
        assert get_weather(**whole.message.tool_calls[0].function.arguments) == "Rome: sunny on [1, 2]"
        assert whole.message.content == "" and pieces[-1].done_reason == "stop"
        assert [call["function"]["index"] for call in raw] == [0, 1] and raw[0]["id"] != raw[1]["id"]

    def test_a_call_that_was_cut_off_is_none(self):
        with scripted(CALL) as running:
            client = client_of(running)
            cut = {"tools": [get_weather], "options": {"num_predict": 24}}
            assert client.chat(MODEL, USER, **cut).message.tool_calls is None
            assert not any(one.message.tool_calls for one in client.chat(MODEL, USER, **cut, stream=True))

    def test_results_go_back(self, hermes_server):
        """What the model reads is what it reads through OpenAI's dialect."""
        call = {"name": "get_weather", "arguments": {"city": "Rome"}}
        theirs = [
            *USER,
            {"role": "assistant", "content": None, "tool_calls": [
                {"id": "x", "type": "function", "function": call | {"arguments": '{"city": "Rome"}'}}
            ]},
            {"role": "tool", "tool_call_id": "x", "content": "18 degrees"},
        ]  # fmt: skip
        ours = [
            *USER,
            {"role": "assistant", "content": "", "tool_calls": [{"function": call}]},
            {"role": "tool", "tool_name": "get_weather", "content": "18 degrees"},
        ]
        name = hermes_server.server.pool.current.id
        with hermes_server.client() as http:
            body = {"messages": theirs, "temperature": 0, "max_tokens": 12}
            answer = http.post("/v1/chat/completions", json=body).json()
        said = client_of(hermes_server).chat(name, ours, options={"temperature": 0, "num_predict": 12})
        assert said.prompt_eval_count == answer["usage"]["prompt_tokens"]
        assert said.message.content == answer["choices"][0]["message"]["content"]

    def test_thinking(self, tool_server):
        """The template is told, and what is thought is kept apart."""
        name, client = tool_server.server.pool.current.id, client_of(tool_server)
        given = {"options": {"temperature": 0, "num_predict": 16}}
        thought, said = (client.chat(name, USER, think=think, **given) for think in (True, False))
        assert thought.message.thinking and not thought.message.content
        assert said.message.content and not said.message.thinking
        streamed = client.generate(name, USER[0]["content"], think="high", stream=True, **given)
        assert "".join(one.thinking or "" for one in streamed) == thought.message.thinking

    def test_thoughts_and_answer(self):
        with scripted("<think>A plan.</think>An answer.", reasoning_format="think") as running:
            client = client_of(running)
            said = client.chat(MODEL, USER, think=True)
            assert (said.message.thinking, said.message.content) == ("A plan.", "An answer.")
            made = client.generate(MODEL, "Hi")
            assert (made.thinking, made.response) == ("A plan.", "An answer.")


class TestGenerate:
    def test_it_is_a_chat_of_one_message(self, client):
        options = SAMPLED | {"num_predict": 20}
        told = [{"role": "system", "content": "Be brief."}, *USER]
        chat = client.chat(MODEL, told, options=options)
        made = client.generate(MODEL, USER[0]["content"], system="Be brief.", options=options)
        assert made.response == chat.message.content and made.prompt_eval_count == chat.prompt_eval_count

    def test_raw(self, client, http):
        made = client.generate(MODEL, "Once upon a time", raw=True, options=SAMPLED | {"num_predict": 20})
        body = {"prompt": "Once upon a time", "max_tokens": 20} | SAMPLED
        assert made.response == http.post("/v1/completions", json=body).json()["choices"][0]["text"]

    def test_context_goes_on(self, server, client):
        options = {"temperature": 0, "num_predict": 10}
        first = client.generate(MODEL, "Name a dragon.", options=options)
        second = client.generate(MODEL, "And its colour?", context=first.context, options=options)
        text = server.server.pool.current.client.text.tokenizer.decode(
            second.context, skip_special_tokens=False
        )
        assert list(second.context[: len(first.context)]) == list(first.context)
        assert text.index("Name a dragon.") < text.index(first.response) < text.index("And its colour?")
        assert text.endswith(second.response)


REFUSED = [
    ({"options": {"repeat_last_n": 64, "repeat_penalty": 1.1}}, "options.repeat_last_n: ", "-1"),
    ({"options": {"mirostat": 1}}, "options.mirostat: ", "top_p"),
    ({"options": {"temprature": 1}}, "options.temprature: ", "temperature"),
    ({"options": {"temperature": -1}}, "options.temperature: ", "greater"),
    ({"options": {"stop": [""]}}, "options.stop", "at least 1"),
    ({"messages": [USER[0] | {"images": ["aGk="]}]}, "messages[0].images: ", "text alone"),
    ({"messages": [{"role": "wizard", "content": "Hi"}]}, "messages[0].role: ", "assistant"),
    ({"temperature": 0.5}, "temperature: ", "options"),
    ({"think": True}, "think: ", "does not support thinking"),
    ({"format": "yaml"}, "format", "json"),
    ({"keep_alive": "soon"}, "keep_alive", "5m"),
    ({"template": "{{ .Prompt }}"}, "template: ", "own template"),
    ({"format": {"type": "nonsense"}}, "format", ""),
    ({"speculative": {"mtp": "sideways"}}, "speculative.mtp", ""),
]  # fmt: skip


@pytest.mark.parametrize(("extra", "begins", "fix"), REFUSED)
def test_refusals(http, extra, begins, fix):
    answer = http.post("/api/chat", json={"model": MODEL, "messages": USER} | extra)
    assert answer.status_code == 400, answer.text
    assert list(answer.json()) == ["error"]
    assert answer.json()["error"].startswith(begins) and fix in answer.json()["error"]


@pytest.mark.parametrize(
    "extra",
    [
        {"suffix": "x"},
        {"images": ["aGk="]},
        {"raw": True, "system": "x"},
        {"context": [10**6]},
        {"messages": USER},
    ],
)
def test_refusals_of_generate(http, extra):
    answer = http.post("/api/generate", json={"model": MODEL, "prompt": "Hi"} | extra)
    assert answer.status_code == 400 and answer.json()["error"].startswith(list(extra)[-1])


def test_errors_have_ollama_s_form(client, http):
    with pytest.raises(ollama.ResponseError, match="'nobody'") as caught:
        client.chat("nobody", USER)
    assert caught.value.status_code == 404
    for answer in (http.post("/api/chat", content="{"), http.get("/api/nowhere"), http.get("/api/chat")):
        assert isinstance(answer.json()["error"], str)


def test_a_fault_in_a_stream_is_a_line():
    with scripted("A dragon slept.") as running:
        running.server.pool.current.client.failure = "the engine has stopped"
        with pytest.raises(ollama.ResponseError, match="the engine has stopped"):
            list(client_of(running).chat(MODEL, USER, stream=True))


def test_without_effect(http):
    """What clients send by default and what concerns loading alone is taken, and named."""
    options = {
        "num_ctx": 2048,
        "num_keep": 24,
        "typical_p": 1.0,
        "mirostat": 0,
        "use_mmap": True,
        "seed": 3.0,
    }
    body = {"model": MODEL, "messages": USER, "options": options | {"num_predict": 2}, "keep_alive": "5m"}
    answer = http.post("/api/chat", json=body | {"shift": True, "format": "", "tools": []})
    assert answer.status_code == 200, answer.text
    named = "options.num_ctx, options.num_keep, options.typical_p, options.mirostat, options.use_mmap, shift"
    assert answer.headers["x-headlong-ignored"] == named


RECORDED = [
    # Open WebUI: model from /api/tags, options by cast, results of tools by id.
    {
        "model": "tale-20m:latest",
        "messages": [
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": "Weather?", "images": []},
            {"role": "assistant", "content": "", "tool_calls": [
                {"index": 0, "id": "call_1", "function": {"name": "get_weather", "arguments": {"city": "Rome"}}}
            ]},
            {"role": "tool", "content": "sunny", "tool_call_id": "call_1"},
        ],
        "stream": True,
        "options": {"temperature": 0.8, "num_predict": 4, "num_ctx": 4096, "stop": ["<|end|>"], "use_mlock": False},
        "keep_alive": "5m",
        "think": False,
    },
    # The command line.
    {
        "model": "tale-20m",
        "messages": [{"role": "user", "content": "hello"}],
        "format": "",
        "keep_alive": None,
        "options": {"num_predict": 4},
        "think": None,
    },
    # LangChain.
    {
        "model": "tale-20m",
        "messages": [{"role": "user", "content": "hello", "images": []}],
        "tools": [],
        "stream": True,
        "options": {"num_predict": 4, "repeat_penalty": 1.1, "seed": 42, "temperature": 0.0, "num_gpu": 1},
    },
]  # fmt: skip


@pytest.mark.parametrize("body", RECORDED)
def test_recorded_requests(http, body):
    answer = http.post("/api/chat", json=body)
    assert answer.status_code == 200, answer.text
    assert lines(answer)[-1]["done"] and lines(answer)[-1]["model"] == body["model"]
