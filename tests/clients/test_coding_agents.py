"""Claude Code and Codex from npm: each is told by a scripted model to write a file, does so, and ends.

The model is scripted because their prompts are longer than the embedded one's context. tests/server replays what they
send on the real engine.
"""

import json
from pathlib import Path

from support.scripted import ScriptedEngine, ScriptedEngines
from support.serving import RunningServer

DONE = "It is written."


def scripted(tool: str, arguments: dict[str, str]) -> RunningServer:
    """A server whose model calls the tool, and is done once it has seen a result."""
    call = f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>"
    engine = ScriptedEngine(lambda prompt: DONE if "<tool_response>" in prompt else call, max_len=1 << 17)
    return RunningServer(loader=ScriptedEngines(engine))


def check(server: RunningServer, endpoint: str) -> None:
    history = list(server.server.observer.history)
    assert len(history) >= 2 and {facts["endpoint"] for facts in history} == {endpoint}


def test_claude_code(run, node: Path, tmp_path: Path):
    made = tmp_path / "made.txt"
    with scripted("Write", {"file_path": str(made), "content": "42\n"}) as server:
        told = run(
            *(node / "node_modules" / ".bin" / "claude", "-p", "Write 42 into made.txt."),
            *("--permission-mode", "acceptEdits", "--model", "tale-20m"),
            ANTHROPIC_BASE_URL=server.url,
            ANTHROPIC_API_KEY="none",
            CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        )
        check(server, "messages")
    assert told.strip() == DONE and made.read_text() == "42\n"


def test_codex(run, node: Path, tmp_path: Path):
    made = tmp_path / "made.txt"
    with scripted("exec_command", {"cmd": f"echo 42 > {made}"}) as server:
        provider = {"name": "Headlong", "base_url": f"{server.url}/v1", "wire_api": "responses"}
        settings = [f'model_providers.headlong.{name}="{value}"' for name, value in provider.items()]
        told = run(
            *(
                node / "node_modules" / ".bin" / "codex",
                "exec",
                "--skip-git-repo-check",
                "--model",
                "tale-20m",
            ),
            *("--sandbox", "danger-full-access", "-c", 'model_provider="headlong"'),
            *(part for setting in settings for part in ("-c", setting)),
            "Write 42 into made.txt.",
        )
        check(server, "responses")
    assert DONE in told and made.read_text() == "42\n"
