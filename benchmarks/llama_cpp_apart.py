"""llama.cpp in a process of its own, with another interpreter: for a second build of the package `xllamacpp`.

PyPI's wheel is built for instructions that most machines have. Built from source it takes what this machine has:

    python -m venv native
    CMAKE_ARGS="-DLLAMA_BUILD_BORINGSSL=OFF -DLLAMA_LLGUIDANCE=OFF" \\
        native/bin/pip install --no-binary xllamacpp xllamacpp

`LlamaCppApart` looks like `LlamaCpp`. The process is this file, run by that interpreter; requests and answers are lines
of JSON. Knows nothing of Headlong.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Prompt = tuple[int, ...]


class LlamaCppApart:
    """A model opened by llama.cpp in another process, which ends with this object."""

    def __init__(
        self,
        python: Path,
        model: Path,
        *,
        threads: int,
        drafts: int = 0,
        rows: int = 1,
        context: int = 1024,
    ) -> None:
        self._process = subprocess.Popen(
            [python, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        options = {"threads": threads, "drafts": drafts, "rows": rows, "context": context}
        self.features: str = self._ask(model=str(model), options=options)

    def __del__(self) -> None:
        self._process.kill()
        self._process.wait()

    def decode(self, prompts: Sequence[Prompt], max_tokens: int) -> Any:
        return self._timed("decode", prompts, max_tokens)

    def together(self, prompts: Sequence[Prompt], max_tokens: int) -> Any:
        return self._timed("together", prompts, max_tokens)

    def read(self, prompts: Sequence[Prompt]) -> Any:
        return self._timed("read", prompts)

    def _timed(self, method: str, prompts: Sequence[Prompt], *more: int) -> Any:
        from llama_cpp import Timed

        num_tokens, seconds, texts = self._ask(method=method, given=[[list(p) for p in prompts], *more])
        return Timed(num_tokens, seconds, texts=tuple(texts))

    def _ask(self, **request: Any) -> Any:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        stdin.write(json.dumps(request) + "\n")
        stdin.flush()
        while (line := stdout.readline()) and not line.startswith("{"):
            pass  # what llama.cpp itself prints
        if not line:
            raise SystemExit("llama.cpp's other process ended; its message is above")
        return json.loads(line)["answer"]


def serve() -> None:
    from llama_cpp import LlamaCpp, features

    opened = None
    for line in sys.stdin:
        request = json.loads(line)
        if opened is None:
            opened = LlamaCpp(Path(request["model"]), **request["options"])
            answer: Any = features()
        else:
            prompts, *more = request["given"]
            timed = getattr(opened, request["method"])([tuple(prompt) for prompt in prompts], *more)
            answer = [timed.num_tokens, timed.seconds, timed.texts]
        print(json.dumps({"answer": answer}), flush=True)


if __name__ == "__main__":
    serve()
