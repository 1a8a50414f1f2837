"""Agents and libraries in their default settings: each calls its tool, reads the result, and answers."""

from pathlib import Path

import pytest
from installed import HERE, INSTALLED

FLOWS = HERE / "flows"
NEW, OLD = "openai-3", "openai-2"
CHAT, RESPONSES, MESSAGES = "chat.completions", "responses", "messages"
LOOKED = ("sea", "sky")


@pytest.fixture
def told(flow):
    return lambda environment, name: flow(INSTALLED / environment / "bin" / "python", FLOWS / f"{name}.py")


def check(facts, calls: int, texts: int, forms: int) -> None:
    assert len(facts["called"]) == calls and set(facts["called"]) <= set(LOOKED)
    assert len(facts["texts"]) == texts and all(len(text) > 10 for text in facts["texts"])
    assert len(facts["forms"]) == forms
    for form in facts["forms"]:
        assert form.keys() == {"mood", "degrees"}
        assert form["mood"] in ("calm", "rough") and form["degrees"] in (10, 20)


def paths(server) -> set[str]:
    return {path for path, _ in server.bodies}


def test_anthropic(told, server):
    facts = told(NEW, "anthropic_package")
    assert len(facts["called"]) == 2 and set(facts["called"]) <= set(LOOKED)
    assert len(facts["text"]) > 10 and facts["streamed"] == [["tool_use"], ["text"]]
    assert facts["read"][0] == facts["read"][1] and facts["prefilled"]
    assert paths(server) == {"/v1/messages"}


def test_openai_agents(told, server):
    facts = told(NEW, "openai_agents")
    check(facts, calls=6, texts=4, forms=2)
    assert facts["last"] == "Helper"
    assert paths(server) == {"/v1/responses", "/v1/chat/completions"}


def test_pydantic_ai(told, server):
    check(told(NEW, "pydantic_ai_agent"), calls=8, texts=4, forms=4)
    assert paths(server) == {"/v1/responses", "/v1/chat/completions"}


def test_langchain(told, server):
    check(told(NEW, "langchain_agent"), calls=8, texts=4, forms=4)
    assert paths(server) == {"/v1/responses", "/v1/chat/completions"}
    both = [
        body
        for _, body in server.bodies
        if body.get("tools") and (body.get("response_format") or body.get("text"))
    ]
    assert len(both) == 4, "its typed answers come with tools in the same request"


def test_smolagents(told):
    facts = told(NEW, "smolagents_agent")
    assert facts["steps"] == ["look", "final_answer"]
    assert len(facts["called"]) == 1 and facts["text"]


def test_llm(told):
    facts = told(NEW, "llm_command")
    assert facts["called"] == ["llm_version"] and all(facts["texts"])
    (form,) = facts["forms"]
    assert isinstance(form["age"], int) and isinstance(form["friendly"], bool)


def test_llama_index(told):
    check(told(OLD, "llama_index_agent"), calls=1, texts=2, forms=1)


def test_litellm(told, server):
    check(told(OLD, "litellm_loop"), calls=6, texts=6, forms=1)
    assert paths(server) == {"/v1/messages", "/v1/chat/completions"}


def test_instructor(told):
    facts = told(OLD, "instructor_modes") | {"called": [], "texts": []}
    check(facts, calls=0, texts=0, forms=3)
    check(facts | {"forms": facts["partial"]}, calls=0, texts=0, forms=3)


def test_vercel(flow, node: Path, server):
    """The program lies beside its packages, where Node looks for them."""
    facts = flow("node", node / "vercel.mjs")
    check(facts, calls=3, texts=2, forms=1)
    assert facts["usage"] > 0
    both = [body for _, body in server.bodies if body.get("tools") and body.get("response_format")]
    assert len(both) == 2, "a typed answer comes with tools in the same request"


def test_every_flow_is_tried():
    source = Path(__file__).read_text()
    names = {path.stem for path in FLOWS.glob("*.py")} - {"told"}
    assert names and all(f'"{name}"' in source for name in names)
