"""`headlong chat` as a person sees it: several turns on a pseudo-terminal, compared with the screen line by line."""

import re

import pytest

from headlong.checkpoint import packages
from headlong.cli.chat import HELP, PROMPT
from headlong.llm import LLM
from support.pseudo_terminal import PseudoTerminal, rendered

FLAGS = ("--draft-tokens", "3", "--temperature", "0.7", "--seed", "5", "--max-tokens", "70", "--top-p", "0.9")
SAYS = (
    "Tell me a story about a lighthouse keeper who found a letter from the sea.",
    "And then?",
    "What did the letter say? " * 30,
    "Thank you.",
)
STATISTICS = r"^\d+ tokens? · .*MTP (on|off)"


def expected(model: str | None) -> list[str]:
    """The answers of the same turns, from the library."""
    llm = LLM(model, max_rows=1, draft_tokens=3, device="cpu")
    params = llm.recommended_params(temperature=0.7, seed=5, max_tokens=70, top_p=0.9)
    messages, answers = [], []
    for turn in SAYS:
        messages.append({"role": "user", "content": turn.strip()})
        answers.append(llm.chat(messages, params).text)
        messages.append({"role": "assistant", "content": answers[-1]})
    return answers


def converse(model: str | None) -> None:
    answers = expected(model)
    words = ["chat", *([model] if model else []), "--device", "cpu", "--show-drafts", *FLAGS]
    with PseudoTerminal(*words) as terminal:
        terminal.wait_for(f"^{PROMPT.strip()}$")
        for number, turn in enumerate(SAYS, 1):
            terminal.type(turn + "\n")
            terminal.wait_for(STATISTICS, count=number)
            terminal.wait_for(rf"MTP (on|off)\n(.*\n)?{PROMPT.strip()}$")
        terminal.type("/exit\n")
        assert terminal.wait_for_the_end() == 0
    shown = "\n".join(re.sub(STATISTICS + ".*", "STATISTICS", line) for line in terminal.lines)
    transcript = "".join(
        f"{PROMPT}{turn}\n{answer}{'' if answer.endswith(chr(10)) else chr(10)}STATISTICS\n"
        for turn, answer in zip(SAYS, answers, strict=True)
    )
    assert shown == "\n".join(rendered(f"{HELP}\n{transcript}{PROMPT}/exit\n"))
    assert not terminal.screen.cursor.hidden and b"\x1b[32m" in terminal.raw


def test_turns_on_a_terminal() -> None:
    converse(None)


@pytest.mark.slow
def test_turns_with_smollm2_on_a_terminal() -> None:
    """Fetched by pip where it is not in the cache; see `headlong pull`."""
    packages.fetch("smollm2")
    converse("smollm2")
