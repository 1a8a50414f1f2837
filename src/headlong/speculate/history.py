"""Every row's text so far, on the host: prompt and output, learnt from plans and verdicts alone.

For drafters that read tokens instead of hidden states. Knows rows and tokens, no model and no schedule.
"""

from array import array

from headlong.state.state import State
from headlong.types import Plan, Request, RowPlan, Verdict

UNKNOWN = -1
"""Stands for a token nobody told: of a row that came back so late that its text had been dropped."""


class Text:
    """One row's committed tokens, the one that was sampled last included."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.tokens = array("i", request.prompt)
        self.version = 0
        """Goes up when tokens that were there are gone or others; growing leaves it."""
        self.complete = True
        """Whether every token is known."""

    def follow(self, row: RowPlan) -> None:
        """Makes the text what the row has now. A row that was put back reads its own output again, as a prompt."""
        total = len(self.request.prompt) + row.num_generated
        if len(self.tokens) > total:
            del self.tokens[total:]
            self.version += 1
        elif len(self.tokens) < total:
            self.tokens.extend([UNKNOWN] * (total - len(self.tokens)))
            self.complete = False
        end = row.start + len(row.known_tokens)
        if row.known_tokens and end > len(self.request.prompt):
            known = array("i", row.known_tokens)
            if self.tokens[row.start : end] != known:
                self.tokens[row.start : end] = known
                self.version += 1
                self.complete = UNKNOWN not in self.tokens

    def commit(self, first: int, tokens: tuple[int, ...]) -> None:
        """Makes these the row's tokens from place `first` on, and no others."""
        self.tokens[first:] = array("i", tokens)


class Texts:
    """The texts of the rows that draft; a row that leaves takes its own along. Those of the last few are kept,
    as many as rows can run: a row that was put back may resume in the middle of its output."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._texts: dict[str, Text] = {}
        self._away: dict[str, Text] = {}
        """Longest gone first."""

    def __getitem__(self, row_id: str) -> Text:
        return self._texts[row_id]

    def __contains__(self, row_id: str) -> bool:
        return row_id in self._texts

    def follow(self, plan: Plan) -> None:
        """Before a step is drafted: what its rows consist of."""
        for row_id in [row_id for row_id in self._texts if row_id not in self._state.rows]:
            self._away[row_id] = self._texts.pop(row_id)
        while len(self._away) > self._state.slots.size:
            del self._away[next(iter(self._away))]
        for row in plan.rows:
            if row.request.draft_tokens:
                self._find(row.request).follow(row)

    def observe(self, plan: Plan, verdict: Verdict) -> None:
        """After a step: what its rows gained."""
        for row, tokens in zip(plan.rows, verdict.tokens, strict=True):
            if row.samples and row.request.draft_tokens:
                self._find(row.request).commit(row.start + row.num_certain, tokens)

    def _find(self, request: Request) -> Text:
        text = self._texts.get(request.id) or self._away.pop(request.id, None)
        if text is None or text.request is not request:
            text = Text(request)  # an id may be used again once its row has ended
        self._texts[request.id] = text
        return text
