"""Writes docs/fields.md, the tables of request fields, from the schemas and their rules.

`python -m headlong.cli.fields_table` writes it; nothing needs it while a server runs.
"""

from collections.abc import Iterable
from pathlib import Path

from headlong.server.schemas.base import Strict
from headlong.server.schemas.chat import ChatRequest
from headlong.server.schemas.completions import CompletionRequest
from headlong.server.schemas.embeddings import EmbeddingsRequest
from headlong.server.schemas.messages import MessagesRequest
from headlong.server.schemas.ollama import GenerateRequest, OllamaChatRequest
from headlong.server.schemas.responses import ResponsesRequest
from headlong.server.schemas.rules import Renamed, Rule, Unsupported, WithoutEffect
from headlong.server.schemas.tokens import DetokenizeRequest, TokenizeRequest
from headlong.server.sifting import fields_of, rules_of

BODIES: dict[str, type[Strict]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/api/chat": OllamaChatRequest,
    "/api/generate": GenerateRequest,
    "/v1/embeddings": EmbeddingsRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
HEAD = """\
# Request fields

What becomes of every field of a request's own object; this page is written from the code by
`python -m headlong.cli.fields_table`. A field is *honoured*, honoured *as another* that says the same, *without effect*
here (accepted, named in the header `x-headlong-ignored` and logged once for each client), or *refused* with a 400 that
gives the reason, unless its value asks for nothing. Other fields are accepted and named in `x-headlong-unknown`, except
those that look misspelt and, with `strict_fields`, all of them. Null asks for nothing, whatever the field.
"""
KINDS = {Renamed: "as another", WithoutEffect: "without effect", Unsupported: "refused"}


def page() -> str:
    return "\n".join([HEAD, *(_section(path, body) for path, body in BODIES.items())])


def _section(path: str, body: type[Strict]) -> str:
    lines = [f"## {path}\n", f"Honoured: {_names(fields_of(body))}.\n", "| fields | | |", "|---|---|---|"]
    groups: dict[tuple[type[Rule], str], list[str]] = {}
    for name, rule in rules_of(body).items():
        groups.setdefault((type(rule), rule.why), []).append(name)
    for kind, word in KINDS.items():
        lines += [
            f"| {_names(names)} | {word} | {why} |" for (own, why), names in groups.items() if own is kind
        ]
    return "\n".join(lines) + "\n"


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def main(path: Path) -> None:
    path.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main(Path("docs/fields.md"))
