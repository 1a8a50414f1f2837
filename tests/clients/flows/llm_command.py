"""llm: its command, with a tool that comes with it, a schema, a conversation that goes on, and no stream."""

import json
import os
import subprocess
import sys
from pathlib import Path

from told import MODEL, OPENAI_URL, tell

folder = Path(os.environ["LLM_USER_PATH"])
(folder / "extra-openai-models.yaml").write_text(
    json.dumps(
        [
            {
                "model_id": MODEL,
                "model_name": MODEL,
                "api_base": OPENAI_URL,
                "api_key_name": "none",
                "supports_tools": True,
                "supports_schema": True,
            }
        ]
    )
)


def llm(*arguments: str) -> str:
    command = [str(Path(sys.executable).with_name("llm")), *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=60).stdout.strip()


llm("keys", "set", "none", "--value", "none")
told = llm("-m", MODEL, "Which version is it?", "-T", "llm_version")
more = llm("-c", "Tell me a story.", "--no-stream")
form = json.loads(llm("-m", MODEL, "A dog.", "--schema", "age int, friendly bool"))
logged = json.loads(llm("logs", "list", "-n", "0", "--json"))
tell(texts=[told, more], forms=[form], called=[call["name"] for one in logged for call in one["tool_calls"]])
