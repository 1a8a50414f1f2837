"""Builds sampling tables and entries by hand, without an engine."""

import torch

from headlong.params import SamplingParams
from headlong.sampling.entries import Entries, Entry
from headlong.sampling.table import SamplingTable
from headlong.types import Request

CPU = torch.device("cpu")


def request(number: int, params: SamplingParams, prompt: tuple[int, ...] = (0,), stops=(), choice: int = 0):
    return Request(
        id=str(number),
        prompt=tuple(prompt),
        params=params,
        seed=params.seed if params.seed is not None else number,
        choice=choice,
        stop_ids=frozenset(stops),
    )


def table_of(requests: list[Request], vocab: int, outputs: list[list[int]] | None = None) -> SamplingTable:
    """Request i lies in slot i + 1."""
    table = SamplingTable(len(requests), vocab, CPU)
    for number, one in enumerate(requests):
        table.set(number + 1, one, outputs[number] if outputs else [])
    return table


def entries_of(table: SamplingTable, entries: list[Entry], prefixes: list[list[int]] | None) -> Entries:
    return Entries(entries, table, None if prefixes is None else torch.tensor(prefixes))
