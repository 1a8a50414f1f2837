"""LlamaIndex: an agent with a function, and typed answers."""

import asyncio
from typing import Literal

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.prompts import PromptTemplate
from llama_index.llms.openai_like import OpenAILike
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


llm = OpenAILike(
    model=MODEL,
    api_base=OPENAI_URL,
    api_key="none",
    is_chat_model=True,
    is_function_calling_model=True,
    max_retries=0,
)


async def main() -> None:
    agent = FunctionAgent(tools=[look], llm=llm, system_prompt="You tell stories.")
    text = str(await agent.run(ASK))
    form = llm.structured_predict(Weather, PromptTemplate(ASK))
    tell(called=called, texts=[text, llm.complete(ASK).text], forms=[form.model_dump()])


asyncio.run(main())
