"""pydantic-ai: an agent with a function and a typed answer, asked for by a tool, by a schema and in the prompt."""

from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from told import ASK, MODEL, OPENAI_URL, tell

called = []


class Weather(BaseModel):
    mood: Literal["calm", "rough"]
    degrees: Literal[10, 20]


def look(at: Literal["sea", "sky"]) -> str:
    """Look at something."""
    called.append(at)
    return "It is blue."


provider = OpenAIProvider(base_url=OPENAI_URL, api_key="none")
texts, forms = [], []
for kind in (OpenAIChatModel, OpenAIResponsesModel):
    model = kind(MODEL, provider=provider)
    agent = Agent(model, instructions="You tell stories.", tools=[look])
    texts.append(agent.run_sync(ASK).output)
    streamed = agent.run_stream_sync(ASK)
    texts.append("".join(streamed.stream_text(delta=True)))
    for output in (ToolOutput(Weather), NativeOutput(Weather)):
        forms.append(Agent(model, tools=[look], output_type=output).run_sync(ASK).output.model_dump())
tell(called=called, texts=texts, forms=forms)
