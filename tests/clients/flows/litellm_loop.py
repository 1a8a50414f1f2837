"""LiteLLM: its loop of tools as its documentation writes it, by three of its providers, and a typed answer."""

import json
from typing import Literal

import litellm
from pydantic import BaseModel
from told import ASK, MODEL, OPENAI_URL, URL, tell

litellm.telemetry = False
called, texts = [], []
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look at something.",
        "parameters": {
            "type": "object",
            "properties": {"at": {"type": "string", "enum": ["sea", "sky"]}},
            "required": ["at"],
        },
    },
}


class Weather(BaseModel):
    mood: Literal["calm", "rough"]
    degrees: Literal[10, 20]


def loop(stream: bool, **to) -> None:
    messages = [{"role": "user", "content": ASK}]
    for _ in range(3):
        answer = litellm.completion(
            messages=messages, tools=[TOOL], api_key="none", stream=stream, max_tokens=400, **to
        )
        if stream:
            answer = litellm.stream_chunk_builder(list(answer), messages=messages)
        message = answer.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            texts.append(message.content)
            return
        for call in message.tool_calls:
            called.append(json.loads(call.function.arguments)["at"])
            messages.append(
                {
                    "role": "tool",
                    "tool_call_id": call.id,
                    "name": call.function.name,
                    "content": "It is blue.",
                }
            )


for stream in (False, True):
    loop(stream, model=f"openai/{MODEL}", api_base=OPENAI_URL)
    loop(stream, model=f"hosted_vllm/{MODEL}", api_base=OPENAI_URL)
    loop(stream, model=f"anthropic/{MODEL}", api_base=URL)
typed = litellm.completion(
    model=f"openai/{MODEL}",
    api_base=OPENAI_URL,
    api_key="none",
    messages=[{"role": "user", "content": ASK}],
    tools=[TOOL],
    tool_choice="none",
    response_format=Weather,
)
forms = [Weather.model_validate_json(typed.choices[0].message.content).model_dump()]
tell(called=called, texts=texts, forms=forms)
