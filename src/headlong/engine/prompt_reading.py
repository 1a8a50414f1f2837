"""What requests ask about their prompts besides an answer: log-probabilities of its tokens, and its hidden states.

Computed from the hidden states of the steps that read the prompt, as a decoding step computes them: the numbers depend
neither on how the prompt was cut nor on who was in the step. Decides nothing about tokens.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from headlong.models.decoder import DecoderModel
from headlong.params import Pooling
from headlong.sampling.sampler import best_of
from headlong.types import Plan, ReadPart, ReadToken, RowPlan, TokenLogprobs

SLICE_TOKENS = 64
"""The most tokens whose logits are computed at a time: those of a long prompt would take gigabytes."""


class PromptReading:
    """Gathers what steps find out about one prompt. A row that is put back reads it again from the beginning."""

    def __init__(self, pooling: Pooling | None) -> None:
        self._pooling = pooling
        self._parts: list[ReadPart] = []

    def take(self, part: ReadPart) -> None:
        self._parts = [one for one in self._parts if one.start < part.start] + [part]

    @property
    def tokens(self) -> tuple[ReadToken, ...]:
        return tuple(token for part in self._parts for token in part.tokens)

    def embedding(self) -> tuple[float, ...] | None:
        """What is made of the hidden states; None if nothing is."""
        if self._pooling is None:
            return None
        hidden_ND = torch.cat([part.hidden_ND for part in self._parts if part.hidden_ND is not None]).double()
        pooled_D = hidden_ND[-1] if self._pooling == "last" else hidden_ND.mean(0)
        return tuple(pooled_D.tolist())


def read_prompts(plan: Plan, hidden_NX: Tensor, model: DecoderModel) -> dict[str, ReadPart]:
    """What a step says about the prompts that it read, for the requests that ask; `hidden_NX` is what the model's pass
    gave."""
    found, first = {}, 0
    for row in plan.rows:
        # A row that was put back reads its own output again, of which nobody asks.
        count = min(row.query_len, len(row.request.prompt) - row.start)
        if row.known_tokens and row.request.params.reads_prompt and count > 0:
            found[row.request.id] = _read(row, model.finish(hidden_NX[first : first + count]), model.lm_head)
        first += row.query_len
    return found


def _read(row: RowPlan, hidden_ND: Tensor, logits: Callable[[Tensor], Tensor]) -> ReadPart:
    params, tokens = row.request.params, ()
    if params.prompt_logprobs is not None:
        following = row.request.prompt[row.start + 1 : row.start + 1 + len(hidden_ND)]
        tokens = _tokens(hidden_ND, following, params.prompt_logprobs, logits)
    asked_ND = hidden_ND[-1:] if params.pooling == "last" else hidden_ND
    return ReadPart(row.start, tokens, None if params.pooling is None else asked_ND.to("cpu", torch.float32))


def _tokens(
    hidden_ND: Tensor, following: tuple[int, ...], num_best: int, logits: Callable[[Tensor], Tensor]
) -> tuple[ReadToken, ...]:
    """Each of the `following` tokens as the hidden state before it foresaw it."""
    found: list[ReadToken] = []
    for start in range(0, len(following), SLICE_TOKENS):
        tokens = following[start : start + SLICE_TOKENS]
        logprobs_MV = torch.log_softmax(logits(hidden_ND[start : start + len(tokens)]), dim=-1)
        chosen_M1 = logprobs_MV.gather(1, torch.tensor(tokens, device=logprobs_MV.device)[:, None])
        ranks = (logprobs_MV > chosen_M1).sum(-1).tolist()
        best = best_of(logprobs_MV, num_best)
        for token, logprob, rank, top in zip(tokens, chosen_M1[:, 0].tolist(), ranks, best, strict=True):
            found.append(ReadToken(TokenLogprobs(token, logprob, tuple(top[:num_best])), 1 + rank))
    return tuple(found)
