"""Draws docs/drafts.svg: an answer of the embedded model, the drafted and accepted tokens tinted.

python benchmarks/picture.py [--prompt TEXT] [--max-tokens 110] [--draft-tokens 4]
"""

import argparse
from html import escape
from pathlib import Path

from headlong import LLM, SamplingParams
from headlong.cli.drafts import Provenance

WIDTH, CHARACTER, LINE, MARGIN = 92, 8.4, 21, 18
PLAIN, DRAFTED, BACKGROUND, QUIET = "#c9d1d9", "#3fb950", "#0d1117", "#8b949e"
TARGET = Path(__file__).parent.parent / "docs" / "drafts.svg"


def coloured_lines(pieces: list[tuple[str, bool]]) -> list[list[tuple[str, bool]]]:
    """Breaks the text at spaces, keeping each character's colour."""
    characters = [(character, drafted) for text, drafted in pieces for character in text]
    lines: list[list[tuple[str, bool]]] = [[]]
    word: list[tuple[str, bool]] = []
    for character, drafted in [*characters, (" ", False)]:
        if character not in " \n":
            word.append((character, drafted))
            continue
        if lines[-1] and len(lines[-1]) + len(word) > WIDTH:
            lines.append([])
        lines[-1].extend([*word, (" ", drafted)])
        word = []
        if character == "\n":
            lines.append([])
    return lines


def svg(lines: list[list[tuple[str, bool]]], caption: str) -> str:
    width, height = WIDTH * CHARACTER + 2 * MARGIN, (len(lines) + 2) * LINE + 2 * MARGIN
    style = "font-family:ui-monospace,Menlo,Consolas,monospace;font-size:14px;white-space:pre"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" role="img">',
        f'<rect width="100%" height="100%" rx="8" fill="{BACKGROUND}"/><g style="{style}">',
    ]
    for number, line in enumerate(lines):
        y, x = MARGIN + (number + 1) * LINE, MARGIN
        start = 0
        while start < len(line):
            end = start
            while end < len(line) and line[end][1] == line[start][1]:
                end += 1
            text = escape("".join(character for character, _ in line[start:end]))
            fill = DRAFTED if line[start][1] else PLAIN
            length = (end - start) * CHARACTER
            parts.append(
                f'<text x="{x + start * CHARACTER:.1f}" y="{y}" fill="{fill}" xml:space="preserve" '
                f'textLength="{length:.1f}">{text}</text>'
            )
            start = end
    y = MARGIN + (len(lines) + 2) * LINE
    parts.append(f'<text x="{MARGIN}" y="{y}" fill="{QUIET}">{escape(caption)}</text></g></svg>')
    return "\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompt", default="Explain rain to a child.")
    parser.add_argument("--max-tokens", type=int, default=110)
    parser.add_argument("--draft-tokens", type=int, default=4)
    args = parser.parse_args()
    llm = LLM(mtp="on")
    assert llm.service.text.tokenizer is not None
    provenance, pieces, last = Provenance(llm.service.text.tokenizer), [], None
    params = SamplingParams(max_tokens=args.max_tokens, draft_tokens=args.draft_tokens)
    for last in llm.stream([{"role": "user", "content": args.prompt}], params):
        pieces.extend(provenance.pieces(last))
    assert last is not None and last.completion is not None
    stats = last.completion.stats
    caption = (
        f"green: drafted and accepted · K = {args.draft_tokens} · {stats.tokens_per_step:.2f} tokens per step"
    )
    TARGET.write_text(svg(coloured_lines(pieces), caption))
    print(f"{TARGET}: {caption}")


if __name__ == "__main__":
    main()
