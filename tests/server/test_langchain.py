"""LangChain's ordinary flows, unmodified: `ChatOpenAI` with another base URL."""

from typing import Literal

from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field

PROMPT = "Write a short story about a shy dragon who learns to share."


def model(running, **options):
    name = options.pop("model", "tale-20m")
    given = {"temperature": 0.7, "seed": 4, "max_tokens": 40, "max_retries": 0} | options
    return ChatOpenAI(base_url=f"{running.url}/v1", api_key="none", model=name, **given)


class Dragon(BaseModel):
    """A dragon."""

    name: str = Field(max_length=16)
    age: int = Field(ge=0, le=999)


@tool
def get_weather(city: Literal["Rome", "Paris"], days: Literal[1, 2, 3]) -> str:
    """Weather of a city."""
    return f"{city}: {days} days of sun"


def test_invoke_stream_and_batch_agree(server):
    llm = model(server)
    whole = llm.invoke(PROMPT)
    assert whole.usage_metadata["output_tokens"] == 40
    assert "".join(chunk.content for chunk in llm.stream(PROMPT)) == whole.content
    assert [answer.content for answer in llm.batch([PROMPT, PROMPT])] == [whole.content] * 2


def test_completion_llm(server):
    llm = OpenAI(base_url=f"{server.url}/v1", api_key="none", model="tale-20m", temperature=0, max_tokens=12)
    assert llm.invoke("Once upon a time")


def test_structured_output(server):
    llm = model(server, max_tokens=300, temperature=0)
    dragon = llm.with_structured_output(Dragon, method="json_schema").invoke(PROMPT)
    assert isinstance(dragon, Dragon)


def test_tools(tool_server):
    name = tool_server.server.pool.current.id
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    llm = model(tool_server, model=name, max_tokens=300, extra_body=off)
    call = llm.bind_tools([get_weather], tool_choice="get_weather", parallel_tool_calls=False).invoke(
        "Weather in Rome?"
    )
    assert [one["name"] for one in call.tool_calls] == ["get_weather"]
    assert set(call.tool_calls[0]["args"]) == {"city", "days"}
    result = get_weather.invoke(call.tool_calls[0])
    assert isinstance(call, AIMessage) and isinstance(result, ToolMessage)
    answers = [ToolMessage(content=result.content, tool_call_id=one["id"]) for one in call.tool_calls]
    final = llm.invoke([HumanMessage("Weather in Rome?"), call, *answers])
    assert final.usage_metadata["output_tokens"] > 0
