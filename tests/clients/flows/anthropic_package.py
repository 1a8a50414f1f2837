"""anthropic: the tool runner over a stream, prompts that are cached, thoughts sent back, prefill, counting."""

from typing import Literal

from anthropic import Anthropic, beta_tool
from told import MODEL, URL, tell

client = Anthropic(base_url=URL, api_key="none", max_retries=0)
called = []


@beta_tool
def look(at: Literal["sea", "sky"]) -> str:
    """Look at something.

    Args:
        at: What to look at.
    """
    called.append(at)
    return "It is blue."


asked = [
    {
        "role": "user",
        "content": [{"type": "text", "text": "Look at the sea.", "cache_control": {"type": "ephemeral"}}],
    }
]
runner = client.beta.messages.tool_runner(
    model=MODEL, max_tokens=200, tools=[look], messages=asked, stream=True
)
streamed = [stream.get_final_message() for stream in runner]
whole = client.beta.messages.tool_runner(
    model=MODEL, max_tokens=200, tools=[look], messages=asked
).until_done()
system = [{"type": "text", "text": "You tell stories.", "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
budget = {"type": "enabled", "budget_tokens": 1024}
first = client.messages.create(model=MODEL, max_tokens=1100, system=system, messages=asked, thinking=budget)
again = [*asked, {"role": "assistant", "content": first.content}, {"role": "user", "content": "Go on."}]
second = client.messages.create(model=MODEL, max_tokens=1100, system=system, messages=again, thinking=budget)
prefilled = client.messages.create(
    model=MODEL, max_tokens=8, messages=[*asked, {"role": "assistant", "content": "The sea"}]
)
counted = client.messages.count_tokens(model=MODEL, system=system, messages=again)
tell(
    called=called,
    text=whole.content[-1].text,
    streamed=[[block.type for block in message.content] for message in streamed],
    read=[second.usage.input_tokens, counted.input_tokens],
    prefilled=prefilled.content[0].text,
)
