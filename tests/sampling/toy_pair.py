"""A target and a drafter small enough to write down every probability, run through the real sampler and verdict."""

import itertools

import numpy as np
import torch
from sampling_tables import request, table_of
from scipy import stats

from headlong.params import SamplingParams
from headlong.sampling.entries import Entries, Entry
from headlong.sampling.sampler import Sampler
from headlong.speculate.verify import verify
from headlong.types import Draft, Plan, RowPlan

PROMPT = (0,)
BATCH = 512


class ToyPair:
    """Logits that depend on the last two tokens; the drafter's differ from the target's by `distance`."""

    def __init__(self, vocab: int, distance: float, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        shape = (vocab, vocab, vocab)
        self.vocab = vocab
        self.target = torch.randn(shape, generator=generator, dtype=torch.float64)
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        self.draft = self.target + distance * noise

    @staticmethod
    def look_up(table: torch.Tensor, histories: list[list[int]]) -> torch.Tensor:
        first = [h[-2] if len(h) > 1 else 0 for h in histories]
        return table[first, [h[-1] for h in histories]]

    def law(self, length: int, temperature: float = 1.0) -> np.ndarray:
        """The probability of every sequence of `length` tokens, by the target alone."""
        law = []
        for sequence in itertools.product(range(self.vocab), repeat=length):
            history, chance = list(PROMPT), 1.0
            for token in sequence:
                p = torch.softmax(self.look_up(self.target, [history])[0] / temperature, 0)
                chance *= float(p[token])
                history.append(token)
            law.append(chance)
        return np.array(law)

    def generate(
        self, params: SamplingParams, depth: int, length: int, rows: int, seed: int = 0, rule=verify
    ) -> tuple[np.ndarray, float]:
        """Counts of each sequence of the first `length` tokens, step after step as the engine does it, and
        the mean number of drafts accepted in the first step."""
        counts = np.zeros(self.vocab**length, dtype=np.int64)
        accepted = 0
        for start in range(0, rows, BATCH):
            requests = [
                request(i, params, PROMPT, choice=(start + i) % 256) for i in range(min(BATCH, rows - start))
            ]
            sampler = Sampler(table_of(requests, self.vocab))
            sampler.table.seed[1:] = seed * 1_000_003 + (start + torch.arange(len(requests))) // 256
            histories = [list(PROMPT) for _ in requests]
            accepted += sum(self.step(sampler, requests, histories, range(len(requests)), depth, rule))
            while unfinished := [i for i, h in enumerate(histories) if len(h) <= length]:
                self.step(sampler, requests, histories, unfinished, depth, rule)
            for history in histories:
                code = 0
                for token in history[len(PROMPT) : len(PROMPT) + length]:
                    code = code * self.vocab + token
                counts[code] += 1
        return counts, accepted / rows

    def step(self, sampler, requests, histories, who, depth, rule) -> list[int]:
        """One engine step of the rows `who`: draft `depth` tokens, verify, append."""
        who = list(who)
        drafts = torch.zeros(len(who), depth, dtype=torch.long)
        q_steps = []
        for place in range(depth):
            longer = [histories[i] + drafts[n, :place].tolist() for n, i in enumerate(who)]
            places = [Entry(i + 1, len(histories[i]) + place, place) for i in who]
            entries = Entries(places, sampler.table, drafts)
            drafts[:, place], q = sampler.propose(self.look_up(self.draft, longer), entries)
            q_steps.append(q)
        plan = Plan(
            tuple(
                RowPlan(
                    request=requests[i],
                    slot=i + 1,
                    start=len(histories[i]) - 1,
                    query_len=1 + depth,
                    num_drafts=depth,
                    num_replay=0,
                    pages=(),
                    samples=True,
                    num_generated=len(histories[i]) - 1,
                    known_tokens=(),
                )
                for i in who
            ),
            depth,
        )
        prefixes = [
            histories[i] + drafts[n, :place].tolist() for n, i in enumerate(who) for place in range(depth + 1)
        ]
        q = None if not depth or q_steps[0] is None else torch.stack(q_steps, 1)
        draft = Draft(drafts, q) if depth else None
        verdict = rule(plan, draft, self.look_up(self.target, prefixes), sampler)
        for number, i in enumerate(who):
            assert len(verdict.tokens[number]) == verdict.accepted[number] + 1
            assert verdict.tokens[number][:-1] == tuple(drafts[number, : verdict.accepted[number]].tolist())
            histories[i].extend(verdict.tokens[number])
        return list(verdict.accepted)


def p_value(counts: np.ndarray, law: np.ndarray) -> float:
    """Chi-square, with the rarest sequences put together until each cell expects five."""
    expected = law * counts.sum()
    order = np.argsort(expected)
    together = int(np.searchsorted(np.cumsum(expected[order]), 5.0)) + 1
    while together < len(order) and expected[order[together]] < 5.0:
        together += 1
    rare, common = order[:together], order[together:]
    seen = np.append(counts[common], counts[rare].sum())
    return float(stats.chisquare(seen, np.append(expected[common], expected[rare].sum())).pvalue)
