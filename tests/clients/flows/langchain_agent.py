"""LangChain: `create_agent` with a tool, alone and with a typed answer by both of its strategies."""

from typing import Literal

from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_openai import ChatOpenAI
from pydantic import BaseModel
from told import ASK, MODEL, OPENAI_URL, tell

called = []


class Weather(BaseModel):
    """What the weather is like."""

    mood: Literal["calm", "rough"]
    degrees: Literal[10, 20]


def look(at: Literal["sea", "sky"]) -> str:
    """Look at something."""
    called.append(at)
    return "It is blue."


asked = {"messages": [{"role": "user", "content": ASK}]}
limit = {"recursion_limit": 8}
texts, forms = [], []
for responses in (False, True):
    model = ChatOpenAI(
        model=MODEL, base_url=OPENAI_URL, api_key="none", max_retries=0, use_responses_api=responses
    )
    agent = create_agent(model, tools=[look], system_prompt="You tell stories.")
    texts.append(agent.invoke(asked, limit)["messages"][-1].text)
    chunks = [
        one for one, _ in agent.stream(asked, limit, stream_mode="messages") if one.type == "AIMessageChunk"
    ]
    texts.append("".join(chunk.text for chunk in chunks))
    for strategy in (ProviderStrategy(Weather), ToolStrategy(Weather)):
        typed = create_agent(model, tools=[look], response_format=strategy)
        forms.append(typed.invoke(asked, limit)["structured_response"].model_dump())
tell(called=called, texts=texts, forms=forms)
