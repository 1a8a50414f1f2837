"""A tool that the model calls: its arguments follow the schema, its result goes back, and the model answers."""

import json
import os

import openai

URL = os.environ.get("HEADLONG_URL", "http://127.0.0.1:8000")
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Rome", "Oslo", "Lima"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 7},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}


def get_weather(city: str, days: int) -> str:
    return f"In {city} the sun will shine for {days} more days."


def main() -> None:
    client = openai.OpenAI(base_url=f"{URL}/v1", api_key=os.environ.get("HEADLONG_KEY", "none"))
    model = client.models.list().data[0].id
    messages = [{"role": "user", "content": "How will the weather be in Rome?"}]
    # `required` because the embedded model is too small to decide well; larger ones are left to themselves ("auto").
    first = client.chat.completions.create(
        model=model,
        messages=messages,
        tools=[TOOL],
        tool_choice="required",
        parallel_tool_calls=False,
        seed=1,
        max_tokens=200,
    )
    message = first.choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    for call in message.tool_calls:
        arguments = json.loads(call.function.arguments)
        result = get_weather(**arguments)
        print(f"{call.function.name}({arguments}) -> {result}")
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    second = client.chat.completions.create(
        model=model, messages=messages, tools=[TOOL], tool_choice="none", seed=1, max_tokens=80
    )
    print(second.choices[0].message.content)


if __name__ == "__main__":
    main()
