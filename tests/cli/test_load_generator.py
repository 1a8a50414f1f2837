"""The parts of the load generator that need no server: events, percentiles, arrivals, ratios, the plot."""

import math
from io import StringIO
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from headlong.cli.load import acceptance, plot, report, stats
from headlong.cli.load.acceptance import Drafts
from headlong.cli.load.answer import Answer, Failure, Sample
from headlong.cli.load.client import server_root
from headlong.cli.load.drive import Block
from headlong.cli.load.sse import MAX_EVENT, Event, EventReader, MalformedStream
from headlong.cli.load.workload import Slot, Workload

LINES = (
    "data: a",
    "data:  b",
    "data",
    "data: ü🌊",
    ": note",
    "event: error",
    "id: 7",
    "",
    "",
    "other: x",
    "data: [DONE]",
)
numbers = st.floats(0, 1e6, allow_nan=False)


def read(parts: list[bytes]) -> list[Event]:
    reader = EventReader()
    return [event for part in parts for event in reader.feed(part)] + reader.finish()


@given(st.lists(numbers, min_size=1, max_size=50), st.floats(0, 100))
def test_percentiles_are_numpys(values: list[float], percent: float) -> None:
    own = stats.percentile(sorted(values), percent)
    assert own == pytest.approx(float(np.percentile(values, percent)), rel=1e-9, abs=1e-6)


@given(st.lists(numbers, min_size=1, max_size=300))
def test_spread(values: list[float]) -> None:
    spread = stats.Spread.of(values)
    assert spread is not None
    expected = [*np.percentile(values, [50, 90, 99]), np.mean(values), np.max(values)]
    assert list(spread) == pytest.approx([float(value) for value in expected], rel=1e-9, abs=1e-6)


@given(st.lists(st.sampled_from(LINES)), st.sampled_from(["\n", "\r\n", "\r"]), st.data())
def test_events_do_not_depend_on_how_the_bytes_were_cut(
    lines: list[str], end: str, data: st.DataObject
) -> None:
    whole = end.join([*lines, ""]).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=8)))
    parts = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    expected, name, held = [], "message", []
    for line in [*lines, ""]:
        field, _, value = line.partition(":")
        if not line:
            expected += [Event(name, "\n".join(held))] if held else []
            name, held = "message", []
        elif field == "data":
            held.append(value.removeprefix(" "))
        elif field == "event":
            name = value.removeprefix(" ")
    assert read(parts) == expected


def test_a_byte_order_mark_and_bytes_that_are_no_text() -> None:
    assert read([b"\xef\xbb\xbfdata: a\n\ndata: \xff\n\n"]) == [
        Event("message", "a"),
        Event("message", "\ufffd"),
    ]


def test_an_endless_event_is_refused() -> None:
    with pytest.raises(MalformedStream):
        read([b"data: " + b"x" * MAX_EVENT])
    with pytest.raises(MalformedStream):
        read([b"data: " + b"x" * (1 << 20) + b"\n"] * 9)


@pytest.mark.parametrize("data", ["{", "[]", "1", "null", '{"a":' * 100_000, "NaN"])
def test_events_that_are_no_chunks(data: str) -> None:
    answer = Answer()
    answer.take(Event("message", data), 0.1)
    failure = answer.sample(0.2).failure
    assert failure is not None and failure.kind == "not a stream" and len(failure.message) < 400


@pytest.mark.parametrize(
    "data",
    [
        '{"choices": null}',
        '{"choices": [null, 1, {"delta": []}]}',
        '{"usage": {"completion_tokens": -1, "prompt_tokens": "many"}, "timings": 7, "metrics": []}',
        '{"usage": {"completion_tokens": NaN}, "timings": {"draft_n": 1, "draft_n_accepted": 2, "predicted_n": true}}',
    ],
)
def test_odd_chunks_count_for_nothing(data: str) -> None:
    answer = Answer()
    for event in (data, '{"choices": [{"text": "a"}]}', "[DONE]", '{"error": "too late"}'):
        answer.take(Event("message", event), 0.1)
    sample = answer.sample(0.2)
    assert sample.failure is None and sample.drafts is None and sample.prompt_tokens is None
    assert (sample.output_tokens, sample.counted_by) == (1, "chunks")


@pytest.mark.parametrize("prefix", ["vllm:", "headlong:", "llamacpp:", "sglang_", ""])
def test_counters_by_any_prefix(prefix: str) -> None:
    page = (
        f"# HELP {prefix}spec_decode_num_draft_tokens_total 99\n"
        f'{prefix}spec_decode_num_draft_tokens_total{{a="x y",b="}} 5"}} 12.0 1700000000\n'
        f"{prefix}spec_decode_num_accepted_tokens_total 1e1\n"
        f'{prefix}spec_decode_num_accepted_tokens_per_pos_total{{position="0"}} 7\n'
        f"{prefix}spec_decode_num_draft_tokens_created 1.7e9\n"
    )
    assert acceptance.counters(page) == Drafts(acceptance.COUNTERS, 12, 10)
    assert acceptance.counters(page.replace("accepted", "other")) is None


def test_counters_that_went_back_say_nothing() -> None:
    before, after = Drafts("", 10, 5), Drafts("", 14, 8)
    assert acceptance.since(before, after) == Drafts(acceptance.COUNTERS, 4, 3)
    assert acceptance.since(after, before) is None
    assert acceptance.since(None, after) is None


def workload(**changes: object) -> Workload:
    usual = {
        "prompts": ["a", "b", "c"],
        "endpoint": "chat",
        "fields": {},
        "extra": {},
        "seed": None,
        "concurrencies": [1, 4],
        "mtp": ["off", 2, 3],
        "rounds": 3,
        "requests": None,
        "duration": 60.0,
        "rate": None,
    }
    return Workload(**(usual | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("requests", [None, 4, 7, 8, 23])
def test_every_setting_gets_the_same_requests(requests: int | None) -> None:
    work = workload(requests=requests)
    sent: dict[tuple[int, object], list[int]] = {}
    for slot in work.slots():
        assert slot.requests >= slot.concurrency, "a block must be able to keep its streams busy"
        sent.setdefault((slot.concurrency, slot.mtp), []).extend(
            range(slot.first, slot.first + slot.requests)
        )
    for concurrency in (1, 4):
        off, two, three = (sent[concurrency, mtp] for mtp in ("off", 2, 3))
        assert off == two == three == list(range(len(off)))
        assert requests is None or len(off) == requests
    assert [slot.mtp for slot in workload(concurrencies=[1]).slots()] == [
        "off",
        2,
        3,
        2,
        3,
        "off",
        3,
        "off",
        2,
    ]


def test_arrivals_are_a_poisson_process() -> None:
    work = workload(rate=8.0, seed=3)
    slot, other = (Slot(0, 1, mtp, 0, 5000, 600.0) for mtp in ("off", 3))
    times = list(work.arrivals(slot))
    assert times == list(work.arrivals(other)), "settings are compared on the same arrivals"
    assert times != list(workload(rate=8.0, seed=4).arrivals(slot))
    gaps = np.diff([0.0, *times])
    # An exponential distribution's mean and deviation are the same; 5000 of them are within 5% (3.5 sigma).
    assert np.mean(gaps) == pytest.approx(1 / 8, rel=0.05) and np.std(gaps) == pytest.approx(1 / 8, rel=0.07)


def block(mtp: str, turn: int, seconds: float, *samples: Sample, complete: bool = True) -> Block:
    slot = Slot(turn, 1, mtp, 0, len(samples), 60.0)
    return Block(slot, list(samples), seconds, complete=complete)


def test_ratios_are_taken_within_rounds() -> None:
    sample = Sample(ended=1.0, first=0.2, last=1.0, gaps=(0.4, 0.4), output_tokens=10)
    failed = Sample(ended=1.0, output_tokens=50, failure=Failure("timeout", ""))
    # The machine was twice as fast in the second round; the third was interrupted.
    blocks = [block("off", 0, 2.0, sample), block("on", 0, 1.0, sample, failed)]
    blocks += [block("on", 1, 0.5, sample), block("off", 1, 1.5, sample)]
    blocks += [block("off", 2, 1.0, sample), block("on", 2, 9.0, sample, complete=False)]
    off, on = stats.summarise(blocks, with_rate=False)
    assert off.ratio is None and on.ratio is not None
    assert on.ratio.rounds == pytest.approx([2.0, 3.0]) and on.ratio.as_json()["median"] == 2.5
    assert (on.requests, on.completed, on.output_tokens, on.errors) == (4, 3, 30, {"timeout": 1})
    assert on.itl is not None and on.itl.p50 == pytest.approx(0.8 / 9)
    assert off.complete and not on.complete
    assert all(cell.ratio is None for cell in stats.summarise(blocks, with_rate=True))
    assert stats.summarise([], with_rate=False) == []


@pytest.mark.parametrize(("width", "count"), [(80, 2), (200, 1)])
def test_tables_fit_the_terminal(width: int, count: int) -> None:
    sample = Sample(
        ended=1.0, first=0.25, last=1.0, gaps=(0.75,), output_tokens=5000, drafts=Drafts("", 10, 10)
    )
    blocks = [block("off", 0, 2.0, *[sample] * 999), block("auto", 0, 1.0, *[sample] * 999)]
    screen = Console(width=width, file=StringIO(), color_system=None)
    tables = report.tables(stats.summarise(blocks, with_rate=False), "a title", screen)
    assert len(tables) == count
    for table in tables:
        screen.print(table)
    assert isinstance(screen.file, StringIO)
    text = screen.file.getvalue()
    assert "…" not in text and max(len(line) for line in text.splitlines()) <= width
    for number in ("2.00x", "(2.00-2.00)", "250.00 / 250.00", "750.00", "4995000.0", "5000.0", "100%", "999"):
        assert number in text


@given(st.floats(1e-6, 1e9))
def test_steps_of_an_axis(largest: float) -> None:
    step = plot.nice_step(largest)
    assert largest <= plot.NUM_TICKS * step * (1 + 1e-9) and step * plot.NUM_TICKS <= 2.5 * largest * (
        1 + 1e-9
    )
    assert step / 10 ** math.floor(math.log10(step) + 1e-9) == pytest.approx(1, rel=1e-6) or round(
        step / 10 ** math.floor(math.log10(step) + 1e-9)
    ) in (2, 5)


def test_points_lie_where_the_axis_says() -> None:
    sample = Sample(ended=1.0, first=0.25, last=1.0, gaps=(0.75,), output_tokens=50)
    (cell,) = stats.summarise([block("off", 0, 2.0, sample)], with_rate=False)
    tree = ElementTree.fromstring(plot.svg([cell], "a <b> & c"))
    space = "{http://www.w3.org/2000/svg}"
    assert tree.findtext(f"{space}title") == "a <b> & c"
    circle = next(tree.iter(f"{space}circle"))
    ticks = {
        float(text.text or ""): float(text.attrib["y"]) - 4
        for text in tree.iter(f"{space}text")
        if text.attrib["text-anchor"] == "end"
        and (text.text or "").isdigit()
        and float(text.attrib["x"]) < 100
    }
    # 25 tokens/s, between the axis' own labels.
    assert cell.tokens_per_second == 25.0
    heights = np.interp(25.0, sorted(ticks), [ticks[value] for value in sorted(ticks)])
    assert float(circle.attrib["cy"]) == pytest.approx(float(heights), abs=0.2)


@pytest.mark.parametrize(
    ("given_url", "root"),
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://localhost:8000/", "http://localhost:8000"),
        ("https://host/openai/v1/", "https://host/openai"),
        ("http://[::1]:8000/v1", "http://[::1]:8000"),
    ],
)
def test_addresses(given_url: str, root: str) -> None:
    assert server_root(given_url) == root
