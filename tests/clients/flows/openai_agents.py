"""openai-agents: a runner that calls a function, by responses and by chat completions, whole and streamed."""

import asyncio
from typing import Literal

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel
from told import ASK, MODEL, OPENAI_URL, tell

set_tracing_disabled(True)
client = AsyncOpenAI(base_url=OPENAI_URL, api_key="none", max_retries=0)
called = []


class Weather(BaseModel):
    mood: Literal["calm", "rough"]
    degrees: Literal[10, 20]


@function_tool
def look(at: Literal["sea", "sky"]) -> str:
    """Look at something."""
    called.append(at)
    return "It is blue."


async def main() -> None:
    texts, forms = [], []
    for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
        model = kind(MODEL, client)
        agent = Agent(name="Poet", instructions="You tell stories.", tools=[look], model=model)
        texts.append((await Runner.run(agent, ASK, max_turns=4)).final_output)
        stream = Runner.run_streamed(agent, ASK, max_turns=4)
        async for _ in stream.stream_events():
            pass
        texts.append(stream.final_output)
        typed = Agent(name="Watcher", tools=[look], output_type=Weather, model=model)
        forms.append((await Runner.run(typed, ASK, max_turns=4)).final_output.model_dump())
    helper = Agent(name="Helper", handoff_description="Tells stories.", model=model)
    triage = Agent(name="Triage", handoffs=[helper], model=model)
    handed = await Runner.run(triage, ASK, max_turns=4)
    tell(called=called, texts=texts, forms=forms, last=handed.last_agent.name)


asyncio.run(main())
