"""Contestants that run in turns, the check that ours agree, ratios with their goals, and the tables.

Knows no engine: a contestant is a function from the round's number to what was `Timed`. The first contestant that tells
its tokens says what is true (it should be our plain decoding); those that tell texts alone are compared, never refused.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from llama_cpp import Prompt, Timed

SETTLE = 0.05
"""Seconds before each run, in which the last one's threads fall asleep."""
Contestants = dict[str, Callable[[int], Timed]]
Figures = dict[str, list[float]]
"""By contestant, a figure a round."""
Quartiles = tuple[float, float, float]
"""The middle one is the median."""


@dataclass(frozen=True)
class Ratio:
    case: str
    what: str
    quartiles: Quartiles
    goal: float | None
    at_most: bool

    @property
    def met(self) -> bool | None:
        if self.goal is None:
            return None
        return self.quartiles[1] <= self.goal if self.at_most else self.quartiles[1] >= self.goal


@dataclass
class Contest:
    """All that was found so far."""

    rounds: int
    progress: Progress
    figures: dict[str, dict[str, Quartiles]] = field(default_factory=dict)
    """By case and contestant; the case's name ends in the unit."""
    ratios: list[Ratio] = field(default_factory=list)
    num_compared: int = 0
    same_texts: dict[str, str] = field(default_factory=dict)
    _truth: dict[tuple[str, Prompt], tuple[Prompt, str]] = field(default_factory=dict)

    def run(self, case: str, model: str, contestants: Contestants, prompts: Sequence[Prompt] = ()) -> Figures:
        """A round that only warms up and checks, then those that count, each in another order. `prompts` are those
        that every contestant continues, if it tells how."""
        names = list(contestants)
        task = self.progress.add_task(case, total=len(names) * (self.rounds + 1))
        speeds: Figures = {name: [] for name in names}
        for turn in range(self.rounds + 1):
            first, step = turn % len(names), -1 if turn % 2 else 1
            for name in [*names[first:], *names[:first]][::step] if turn else names:
                self.progress.update(task, description=f"{case}: {name}")
                time.sleep(SETTLE)
                timed = contestants[name](turn)
                self._check(model, case, name, prompts, timed)
                if turn:
                    speeds[name].append(timed.speed)
                self.progress.advance(task)
        self.progress.update(task, description=case)
        self.keep(case, speeds)
        return speeds

    def keep(self, case: str, figures: Figures) -> None:
        self.figures[case] = {name: quartiles(own) for name, own in figures.items()}

    def compare(
        self,
        case: str,
        what: str,
        own: list[float],
        other: list[float],
        goal: float | None,
        *,
        at_most: bool = False,
    ) -> None:
        found = [a / b for a, b in zip(own, other, strict=True)]
        self.ratios.append(Ratio(case, what, quartiles(found), goal, at_most))

    def _check(self, model: str, case: str, name: str, prompts: Sequence[Prompt], timed: Timed) -> None:
        for prompt, tokens, text in zip(prompts, timed.tokens, timed.texts, strict=bool(timed.tokens)):
            truth, _ = self._truth.setdefault((model, prompt), (tokens, text))
            if differing := sum(a != b for a, b in zip(tokens, truth, strict=True)):
                raise SystemExit(
                    f"{case}, {name}: {differing} of {len(tokens)} tokens differ from plain; no speed is reported"
                )
            self.num_compared += len(tokens)
        if timed.texts and not timed.tokens:
            pairs = zip(prompts, timed.texts, strict=True)
            same = [self._truth[model, prompt][1] == text for prompt, text in pairs]
            self.same_texts[f"{case}: {name}"] = f"{sum(same)}/{len(same)}"

    def show(self, title: str) -> None:
        console = Console(width=120)
        table = Table("case", "contestant", title=title)
        for column in ("median", "quartiles", "our text"):
            table.add_column(column, justify="right")
        for case, found in self.figures.items():
            table.add_section()
            for place, (name, (low, middle, high)) in enumerate(found.items()):
                same = self.same_texts.get(f"{case}: {name}", "")
                table.add_row("" if place else case, name, f"{middle:.4g}", f"{low:.4g}–{high:.4g}", same)
        console.print(table)
        table = Table("case", "ratio", title="ratios, within a round")
        for column in ("median (quartiles)", "goal", "met"):
            table.add_column(column, justify="right")
        for ratio in self.ratios:
            low, middle, high = ratio.quartiles
            goal = "" if ratio.goal is None else f"{'≤' if ratio.at_most else '≥'} {ratio.goal:.2f}"
            met = {True: "[green]met", False: "[red]missed", None: ""}[ratio.met]
            table.add_row(ratio.case, ratio.what, f"{middle:.3f} ({low:.2f}–{high:.2f})", goal, met)
        console.print(table)

    def as_json(self) -> dict[str, Any]:
        return {
            "figures": self.figures,
            "ratios": [asdict(ratio) | {"met": ratio.met} for ratio in self.ratios],
            "same_texts": self.same_texts,
            "tokens_compared": self.num_compared,
            "tokens_differing": 0,
        }


def quartiles(found: list[float]) -> Quartiles:
    if len(found) == 1:
        found = found * 2
    low, middle, high = (
        float(f"{value:.5g}") for value in statistics.quantiles(found, n=4, method="inclusive")
    )
    return low, middle, high


def best(figures: Figures, names: Sequence[str]) -> str:
    return max(names, key=lambda name: statistics.median(figures[name]))
