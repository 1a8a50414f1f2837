"""smolagents: an agent that calls tools, which demands a call in every step and ends by one."""

from smolagents import OpenAIServerModel, ToolCallingAgent, tool
from told import MODEL, OPENAI_URL, tell

called = []


@tool
def look(far: bool) -> str:
    """Look up.

    Args:
        far: Whether to look far.
    """
    called.append(far)
    return "It is blue."


model = OpenAIServerModel(model_id=MODEL, api_base=OPENAI_URL, api_key="none", max_tokens=200)
agent = ToolCallingAgent(tools=[look], model=model, max_steps=3, verbosity_level=0)
text = agent.run("Look up, then say what you see.")
steps = [step for step in agent.memory.steps if hasattr(step, "tool_calls") and step.tool_calls]
tell(called=called, text=str(text), steps=[call.name for step in steps for call in step.tool_calls])
