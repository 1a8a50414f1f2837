"""Formats of other families over the wire: forced with a real template, and read from what a script says."""

import json
import shutil
from pathlib import Path

import pytest

from headlong.checkpoint.source import EMBEDDED
from headlong.server.logprobs import TextLogprobs
from headlong.text.output import ChatFormat
from headlong.text.tokenizer import Tokenizer
from headlong.types import TokenLogprobs
from support import deepseek_v4_files
from support.scripted import ScriptedEngine, ScriptedEngines
from support.serving import RunningServer, model_with_template

TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {"days": {"type": "integer", "maximum": 9}, "unit": {"enum": ["C", "F"]}},
            "required": ["days", "unit"],
        },
    },
}
ASK = {"messages": [{"role": "user", "content": "Weather?"}], "tools": [TOOL], "seed": 3, "max_tokens": 200}


def chat(http, **body):
    answer = http.post("/v1/chat/completions", json=ASK | body)
    assert answer.status_code == 200, answer.text
    return answer


def streamed(answer):
    """(reasoning, content, calls) of a stream."""
    reasoning, content, calls = "", "", {}
    for line in answer.text.split("\n"):
        if not line.startswith("data: {"):
            continue
        for choice in json.loads(line[6:])["choices"]:
            delta = choice["delta"]
            reasoning += delta.get("reasoning_content") or ""
            content += delta.get("content") or ""
            for call in delta.get("tool_calls") or []:
                name, arguments = calls.get(call["index"], ("", ""))
                told = call["function"]
                calls[call["index"]] = (
                    name + (told.get("name") or ""),
                    arguments + (told.get("arguments") or ""),
                )
    return reasoning, content, list(calls.values())


def whole(answer):
    message = answer.json()["choices"][0]["message"]
    calls = [
        (call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or []
    ]
    return message.get("reasoning_content") or "", message.get("content") or "", calls


def test_a_template_decides(tmp_path):
    """GLM's own template: the call is forced in its format, the same with drafting on and off, and goes back."""
    source = (Path(__file__).parents[1] / "data" / "templates" / "GLM-4.7-Flash.jinja").read_text()
    model = model_with_template(tmp_path / "glm", source)
    quiet = {"chat_template_kwargs": {"enable_thinking": False}}
    with (
        RunningServer(model=str(model), draft_tokens=3, prefix_cache=False) as running,
        running.client() as http,
    ):
        card = http.get("/v1/models").json()["data"][0]["headlong"]["formats"]
        assert (card["tools"], card["reasoning"]) == ("glm47", "think")
        told = [
            whole(
                chat(
                    http, tool_choice="required", parallel_tool_calls=False, speculative={"mtp": mtp}, **quiet
                )
            )
            for mtp in ("off", "on")
        ]
        told.append(
            streamed(chat(http, tool_choice="required", parallel_tool_calls=False, stream=True, **quiet))
        )
        assert told[0] == told[1] == told[2]
        assert told[0][2][0][0] == "look" and json.loads(told[0][2][0][1])["unit"] in ("C", "F")
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [7]}}}
        _, content, calls = whole(chat(http, response_format=form, **quiet))
        assert calls or content == "7"


def test_log_probabilities_of_two_messages():
    """The empty line between them is no token's, and a header's tokens are not the answer's."""
    script = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>final<|message|>A final word."
    tokenizer = Tokenizer.from_folder(Path(EMBEDDED))
    assert tokenizer is not None
    text = TextLogprobs(
        tokenizer, ChatFormat.detect(None, reasoning="harmony").parser("<|start|>assistant", None)
    )
    text.push(TokenLogprobs(token, -1.0, ()) for token in tokenizer.encode(script))
    text.finish()
    said = "".join(one["token"] for one in text.all(0))
    assert "I look." in said and "A final word." in said and "<|start|>" not in said


SCRIPTS = {
    "harmony": "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look."
    '<|end|><|start|>assistant<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"days": 3}',
    "mistral_args": '[THINK]Hm.[/THINK]I look.[TOOL_CALLS]look[ARGS]{"days": 3}',
    "kimi_k2": "<think>Hm.</think>I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0"
    '<|tool_call_argument_begin|>{"days": 3}<|tool_call_end|><|tool_calls_section_end|>',
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_settings_decide(name):
    thinks = {"harmony": "harmony", "mistral_args": "mistral"}.get(name, "think")
    engines = ScriptedEngines(ScriptedEngine(SCRIPTS[name]))
    with (
        RunningServer(loader=engines, tool_format=name, reasoning_format=thinks) as running,
        running.client() as http,
    ):
        wanted = ("Hm.", "I look.", [("look", '{"days": 3}')])
        assert whole(chat(http)) == wanted and streamed(chat(http, stream=True)) == wanted


@pytest.mark.slow
def test_deepseek_v4_thinks_and_calls(tmp_path):
    """A folder of DeepSeek-V4 with its own template: formats are told, both modes are streamed, a call is forced."""
    model = deepseek_v4_files.make(
        deepseek_v4_files.packs("mxfp4_deepseek"), vocab_size=8192, max_position_embeddings=1024
    ).write(tmp_path / "v4")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED / name, model)
    source = (Path(__file__).parents[1] / "data" / "templates" / "DeepSeek-V4.jinja").read_text()
    (model / "chat_template.jinja").write_text(source)
    config = json.loads((model / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    short = {"max_tokens": 12, "tools": []}
    with (
        RunningServer(model=str(model), draft_tokens=2, max_context=1024) as running,
        running.client() as http,
    ):
        card = http.get("/v1/models").json()["data"][0]["headlong"]["formats"]
        assert (card["tools"], card["reasoning"]) == ("deepseek_v4", "think")
        for thinks in (True, False):
            asked = short | {"chat_template_kwargs": {"thinking": thinks}}
            told, live = whole(chat(http, **asked)), streamed(chat(http, stream=True, **asked))
            assert told == live and bool(told[0]) == thinks and bool(told[1]) != thinks
        efforts = [
            chat(http, **short, reasoning_effort=effort, chat_template_kwargs={"thinking": True}).json()[
                "usage"
            ]
            for effort in ("low", "max")
        ]
        assert efforts[1]["prompt_tokens"] > efforts[0]["prompt_tokens"] + 50
        forced = {"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 300}
        calls = [whole(chat(http, **forced, speculative={"mtp": mtp}))[2] for mtp in ("off", "on")]
        assert calls[0] == calls[1] and calls[0][0][0] == "look"
        assert json.loads(calls[0][0][1])["unit"] in ("C", "F")
