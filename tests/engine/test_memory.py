"""The plan of an engine's memory: its bytes are those of the tensors, it never takes more than it may, and what a
refusal says would fit does fit, and no more than that."""

import errno
import random
import re
from dataclasses import replace

import pytest
import torch
from engine_cases import quiet

from headlong import LLM, SamplingParams
from headlong.config import EngineConfig
from headlong.engine import accounting
from headlong.engine import assemble as engine_module
from headlong.engine.accounting import device_memory, refusing_oom, tensor_bytes
from headlong.engine.memory import Costs, Device, make_plan, sized
from headlong.errors import ConfigError
from headlong.sampling.table import BYTES_PER_TOKEN, SamplingTable
from headlong.speculate.draft_model import DraftModelProposer
from headlong.types import Request

GIB = 1 << 30
COSTS = Costs(
    target=50 * GIB,
    head=1 * GIB,
    page=4 << 20,
    slot=160 << 20,
    checkpoint=150 << 20,
    reserve=GIB,
    reserve_per_row=50 << 20,
)
H200 = Device(name="cuda:0", total=140 * GIB, free=88 * GIB)
POSITIONS = 262_144
NO_WAY = "a smaller or narrower model, or another device"


def plan(device=H200, costs=COSTS, positions=POSITIONS, **options):
    return make_plan(EngineConfig(**options), positions, costs, device)


def refusal(device=H200, costs=COSTS, positions=POSITIONS, **options) -> str:
    with pytest.raises(ConfigError) as caught:
        plan(device, costs, positions, **options)
    return str(caught.value)


class TestSizing:
    def test_pages_take_what_is_left(self):
        found = plan()
        assert found.limit_bytes == 126 * GIB
        assert found.checkpoint_bytes == 2 * 16 * COSTS.checkpoint
        assert found.limit_bytes - COSTS.page < found.total_bytes <= found.limit_bytes
        assert found.max_len == POSITIONS

    def test_but_no_more_than_all_rows_need(self):
        found = plan(max_context=1000, max_rows=4)
        assert found.num_pages == 4 * 16  # 1000 tokens are 16 pages of 64
        assert found.total_bytes < found.limit_bytes

    def test_a_smaller_fraction_leaves_fewer(self):
        assert plan(gpu_memory_fraction=0.8).num_pages < plan(gpu_memory_fraction=0.85).num_pages

    def test_what_others_hold_is_not_there(self):
        found = plan(replace(H200, free=30 * GIB))
        assert found.limit_bytes == 81 * GIB
        assert found.total_bytes <= found.limit_bytes

    def test_the_context_shrinks_where_nobody_asked_for_it(self):
        found = plan(replace(H200, free=14 * GIB))
        assert found.max_len == found.num_pages * 64 < POSITIONS

    def test_a_cache_asked_for_by_number_is_that_large(self):
        found = plan(cache_tokens=100_000, max_context=2000)
        assert (found.num_pages, found.max_len) == (1563, 2000)

    def test_checkpoints_make_room_for_what_was_asked_for(self):
        device = replace(H200, free=24 * GIB)
        assert plan(device).checkpoint_bytes == 2 * 16 * COSTS.checkpoint
        asked = plan(device, max_context=POSITIONS)
        assert asked.num_pages >= POSITIONS // 64
        assert 0 < asked.checkpoint_bytes < 2 * 16 * COSTS.checkpoint

    def test_checkpoints_by_number_and_none(self):
        assert plan(prefix_device_bytes=12345).checkpoint_bytes == 12345
        assert plan(prefix_cache=False).checkpoint_bytes == 0
        assert plan(prefix_cache=False, prefix_device_bytes=12345).checkpoint_bytes == 0

    def test_where_nobody_counts_nothing_changes(self):
        cpu = Device(name="cpu", total=GIB)
        for options in ({}, {"cache_tokens": 5000}, {"max_context": 300, "max_rows": 3}):
            found = plan(cpu, **options)
            expected = EngineConfig(**options).resolve_context(POSITIONS)
            assert (found.max_len, found.num_pages) == expected
            assert (found.limit_bytes, found.reserve_bytes) == (None, 0)


class TestRefusal:
    def test_the_context(self):
        assert refusal(gpu_memory_fraction=0.45, max_context=POSITIONS) == (
            "max_context 262144 needs 16.0 GiB of pages; 7.6 GiB are left of 0.45 x 140.0 GiB after 51.0 GiB of "
            "weights, 2.7 GiB for 16 rows and 1.8 GiB for graphs and workspace: use max_context<=123840, or "
            "gpu_memory_fraction>=0.511"
        )

    def test_the_cache_with_its_context(self):
        found = refusal(replace(H200, free=9 * GIB), cache_tokens=200_000, max_context=200_000)
        assert "of the 60.0 GiB that others leave of 140.0 GiB" in found
        assert "use cache_tokens<=74688 with max_context<=74688" in found
        assert "gpu_memory_fraction" not in found, "more of what others hold is no help"

    def test_rows(self):
        found = refusal(max_rows=2000)
        assert found.startswith("a sequence of 64 tokens needs 8.0 MiB of pages; 0 B are left")
        assert re.search(r"use max_rows<=\d+$", found)

    def test_weights_that_leave_nothing(self):
        found = refusal(replace(H200, free=1 << 20))
        assert found.endswith(f"use {NO_WAY}")

    def test_checkpoints(self):
        assert "prefix_device_bytes<=" in refusal(prefix_device_bytes=80 * GIB)

    @pytest.mark.parametrize("seed", range(40))
    def test_what_would_fit_fits_and_no_more(self, seed):
        rng, tried = random.Random(seed), 0
        while tried < 10:
            costs, device, options = any_case(rng)
            try:
                found = plan(device, costs, **options)
            except ConfigError as error:
                tried += 1
                check_advice(str(error), costs, device, options)
            else:
                assert found.total_bytes <= found.limit_bytes
                assert found.max_len <= found.num_pages * found.page_size


def any_case(rng: random.Random):
    costs = Costs(
        target=rng.randrange(1, 60) * GIB,
        page=rng.randrange(1, 1 << 23),
        slot=rng.choice((24, rng.randrange(1 << 28))),
        checkpoint=rng.choice((0, rng.randrange(1 << 28))),
        reserve=rng.randrange(2 * GIB),
        reserve_per_row=rng.randrange(1 << 26),
    )
    total = rng.randrange(60, 150) * GIB + rng.randrange(1 << 20)
    device = Device(name="cuda:0", total=total, free=rng.randrange(total - costs.target))
    options = {"max_rows": rng.randrange(1, 300), "gpu_memory_fraction": rng.choice((0.3, 0.9, 1.0))}
    if rng.random() < 0.4:
        options["prefix_device_bytes"] = rng.randrange(40 * GIB)
    if rng.random() < 0.6:
        options["max_context"] = rng.randrange(1, POSITIONS)
    if rng.random() < 0.4:
        options["cache_tokens"] = options.get("max_context", 0) + rng.randrange(1, 4_000_000)
    return costs, device, options


def check_advice(sentence: str, costs: Costs, device: Device, options: dict) -> None:
    """Each way alone is enough; a step beyond it is too far."""
    ways = sentence.partition(": use ")[2]
    if ways == NO_WAY:
        return
    for way in ways.split(", or "):
        named = re.findall(r"(\w+)([<>])=([\d.]+)", way)
        changes = {
            name: float(value) if name.endswith("fraction") else int(value) for name, _, value in named
        }
        assert changes, way
        found = plan(device, costs, **(options | changes))
        assert found.total_bytes <= found.limit_bytes
        step = {"gpu_memory_fraction": -0.001}
        beyond = {name: value + step.get(name, 1) for name, value in changes.items()}
        refusal(device, costs, **(options | beyond))


@pytest.fixture(scope="module")
def llm():
    return LLM(max_rows=3, max_context=512, page_size=16, progress=quiet)


def bytes_of_state(state) -> tuple[int, int]:
    """(pages, slots) by their tensors."""
    layers = state.layers.values()
    pages = [tensor for layer in layers if hasattr(layer, "keys") for tensor in (layer.keys, layer.values)]
    slots = [
        tensor
        for layer in layers
        if hasattr(layer, "windows")
        for tensor in (layer.delta.committed_SHDE, layer.delta.drafts_SKHX, layer.windows)
    ]
    slots += [state.carry_SD, state.last_token_S]
    return sum(t.nbytes for t in pages), sum(t.nbytes for t in slots)


class TestBytes:
    @pytest.mark.parametrize(
        "options",
        [{}, {"mtp": "off"}, {"dtype": "float64", "page_size": 64}, {"max_rows": 7, "max_draft_tokens": 2}],
        ids=str,
    )
    def test_of_the_state_are_those_of_its_tensors(self, options):
        found = LLM(progress=quiet, max_context=256, **options).engine
        assert (found.memory.kv_bytes, found.memory.slot_bytes) == bytes_of_state(found.state)
        assert tensor_bytes(found.state) == found.memory.kv_bytes + found.memory.slot_bytes
        assert found.state.pages.size == found.memory.num_pages

    def test_of_a_draft_model_with_its_state(self, llm):
        drafted = LLM(
            drafter=str(llm.service.folder), max_rows=2, max_context=256, page_size=16, progress=quiet
        ).engine
        assert isinstance(drafted.proposer, DraftModelProposer)
        both = zip(bytes_of_state(drafted.state), bytes_of_state(drafted.proposer.own), strict=True)
        assert [drafted.memory.kv_bytes, drafted.memory.slot_bytes] == [sum(pair) for pair in both]
        assert drafted.memory.drafter_bytes == llm.engine.memory.target_bytes

    def test_of_weights_are_near_those_on_disk(self, llm):
        memory, stored = llm.engine.memory, sum(file.stat().st_size for file in weight_files(llm))
        assert 0.95 * stored < memory.target_bytes + memory.head_bytes < 1.1 * stored

    def test_of_the_checkpoints_are_the_prefix_caches_bound(self, llm):
        store = llm.engine.state.prefix.checkpoints
        assert store._near.max_bytes == llm.engine.memory.checkpoint_bytes > 0

    def test_a_tensor_is_counted_once_and_whole(self):
        base = torch.zeros(10, 10)
        assert tensor_bytes([base, base[2:], base.view(100)]) == base.untyped_storage().nbytes()
        seen = {}
        assert tensor_bytes({"a": (base,)}, seen) == 400
        assert tensor_bytes([base], seen) == 0

    def test_what_rows_may_ask_of_sampling(self):
        """Tensors as long as the vocabulary come with the first row that is penalised, biased or held back."""
        table = SamplingTable(3, 1000, torch.device("cpu"))
        before = tensor_bytes(table)
        params = SamplingParams(presence_penalty=1.0, logit_bias={5: 1.0}, min_tokens=2)
        asked = Request(id="0", prompt=(1,), params=params, seed=0, choice=0, stop_ids=frozenset({2}))
        table.set(1, asked, [])
        table.tally.update([1])
        assert tensor_bytes(table) - before == 4 * 1000 * BYTES_PER_TOKEN

    def test_in_words(self):
        words = [sized(count) for count in (0, 1023, 1024, 3 << 20, 41 * GIB + GIB // 5)]
        assert words == ["0 B", "1023 B", "1.0 KiB", "3.0 MiB", "41.2 GiB"]


def weight_files(llm: LLM):
    return list(llm.service.folder.glob("*.safetensors"))


def pretend(monkeypatch, total: int, free: int) -> None:
    monkeypatch.setattr(accounting, "device_memory", lambda _: Device(name="gpu", total=total, free=free))


class TestEngine:
    def test_serves_with_what_is_left(self, llm, monkeypatch):
        """As little as a few hundred tokens: rows take turns, and the text is the same."""
        reserve = accounting._reserves(llm.engine.model.config, 512, 8)
        memory = llm.engine.memory
        weights = memory.target_bytes + memory.head_bytes
        slots = memory.slot_bytes + reserve[0] + 3 * reserve[1]
        page = memory.kv_bytes // (memory.num_pages + 1)
        pretend(monkeypatch, total=weights + slots + 24 * page, free=1 << 40)
        small = LLM(max_rows=3, page_size=16, gpu_memory_fraction=1.0, prefix_cache=False, progress=quiet)
        assert small.engine.memory.num_pages == 23
        assert small.engine.max_len == 23 * 16
        prompts = ["Once upon a time", "The dog ran", "Mom said, "]
        params = SamplingParams(max_tokens=150, ignore_eos=True)
        texts = [done.token_ids for done in small.generate(prompts, params)]
        assert texts == [done.token_ids for done in llm.generate(prompts, params)]
        small.engine.check_integrity()

    def test_refuses_before_it_allocates(self, monkeypatch):
        pretend(monkeypatch, total=GIB, free=GIB)
        monkeypatch.setattr(engine_module, "State", None)
        with pytest.raises(ConfigError, match=r"^max_context 4096 needs .* use .*gpu_memory_fraction>="):
            LLM(max_context=4096, max_rows=1, gpu_memory_fraction=0.5, progress=quiet)

    @pytest.mark.parametrize(
        "error",
        [
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nMore."),
            OSError(errno.ENOMEM, "Cannot allocate memory"),
            MemoryError(),
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
        ],
        ids=lambda error: type(error).__name__,
    )
    def test_an_allocators_complaint_is_a_refusal(self, monkeypatch, error):
        def fail(*_):
            raise error

        monkeypatch.setattr("headlong.state.paged_kv.zeros", fail)
        with pytest.raises(
            ConfigError, match=r"of pages .* use cache_tokens below 512, max_rows below 2 "
        ) as caught:
            LLM(max_rows=2, max_context=256, progress=quiet)
        assert "\n" not in str(caught.value)

    def test_other_errors_are_not(self):
        for error in (RuntimeError("no"), OSError(errno.EIO, "no")):
            with pytest.raises(type(error)), refusing_oom():
                raise error

    def test_weights_that_do_not_fit(self, monkeypatch):
        def fail(*_, **__):
            raise torch.OutOfMemoryError("CUDA out of memory.")

        monkeypatch.setattr("headlong.engine.service.build", fail)
        with pytest.raises(ConfigError, match=r"^the weights do not fit in memory \(CUDA out of memory"):
            LLM(progress=quiet)

    def test_the_plan_is_told_at_load(self, caplog):
        with caplog.at_level("INFO", logger="headlong"):
            memory = LLM(max_rows=2, max_context=128, progress=quiet).engine.memory
        told = caplog.text
        assert all(line in told for line in memory.lines())
        assert re.search(r"memory: pages +\d.*4 of 64 tokens: 256, or 2.0 sequences of 128", told)
        assert memory.as_json()["total_bytes"] == memory.total_bytes

    def test_a_gpu_is_asked_after_loading_gave_back_what_it_did_not_keep(self, monkeypatch):
        calls = []
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty"))
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: calls.append(str(device)) or (3, 8))
        assert device_memory(torch.device("cuda:1")) == Device(name="cuda:1", total=8, free=3)
        assert calls == ["empty", "cuda:1"]
