"""The DeltaNet core's kernels on a GPU: their bits first, then their time by token and layer against the floor.

    python benchmarks/delta_rule.py [--shape benchmarks/shapes/qwen3.6-27b.json] [--tokens 2048,8192] [--prompts 1,16]
                                    [--rows 1,4,16,64] [--skip-exact]

First a prompt is read as a whole, in chunks, token by token and behind drafts that are rejected: outputs and memory
must have the same bits, and be near those of the reference in float64. Then each kernel of a prompt by itself, as a
layer launches it, and decoding steps and verifications of four tokens as a layer runs them, within a CUDA graph whose
calls work on memory of their own, so that no cache holds it. Medians of CUDA-event times.

The floor of reading is the rule's arithmetic: four instructions for each element of S and token, where 128 lanes of
each multiprocessor can begin one in a cycle at the device's highest clock. The floor of decoding is reading and writing
S at the rate of a copy.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headlong.ops.delta_net import triton as op
from headlong.ops.delta_net.reference import DeltaNetWeights, ReferenceDeltaNet
from headlong.ops.delta_net.triton import TritonDeltaNet
from headlong.ops.gated_delta.reference import DeltaState
from headlong.ops.linear.triton_projection import GivenProjected
from headlong.ops.linear.triton_split_k import PartialSums
from headlong.ops.norm.reference import RmsNorm
from headlong.ops.triton_step import TritonStep
from headlong.types import Rows

CUDA = torch.device("cuda")
TAPS, MAX_DRAFTS = 4, 3
KERNELS = ("token_inputs_kernel", "delta_rule_kernel", "gated_norm_kernel")
FEWEST_BYTES = 300 << 20
"""Of memory that a graph's calls work on, which is several times what caches hold."""


class InParts(GivenProjected):
    """A projection that is there in parts already, so that no copy is timed."""

    def __init__(self, projected_NO: Tensor, gates: slice) -> None:
        super().__init__(projected_NO, gates)
        self._core, self._gates_of = super().first(), super().gates()

    def first(self) -> Tensor:
        return self._core

    def gates(self) -> PartialSums | None:
        return self._gates_of


class Layer:
    """A core of the given sizes with random weights, and the state of some slots; slot 0 belongs to nobody."""

    def __init__(
        self, sizes: tuple[int, int, int, int], slots: int, dtype: torch.dtype = torch.float32
    ) -> None:
        self.sizes = key_heads, heads, key_dim, value_dim = sizes
        self.dtype, channels = dtype, 2 * key_heads * key_dim + heads * value_dim
        self.width = channels + heads * value_dim + 2 * heads
        norm = RmsNorm(self.draw(value_dim, seed=4), 1e-6)
        self.weights = DeltaNetWeights(
            *sizes, self.draw(TAPS, channels, seed=1), -self.draw(heads, seed=2).exp(),
            self.draw(heads, seed=3), norm,
        )  # fmt: skip
        self.net = (TritonDeltaNet if dtype == torch.float32 else ReferenceDeltaNet)(self.weights)
        committed = torch.zeros(slots + 1, heads, key_dim, value_dim, dtype=dtype, device=CUDA)
        drafts = torch.zeros(slots + 1, MAX_DRAFTS, heads, key_dim + value_dim + 2, dtype=dtype, device=CUDA)
        self.delta = DeltaState(committed, drafts)
        self.windows = torch.zeros(slots + 1, TAPS - 1 + MAX_DRAFTS, channels, dtype=dtype, device=CUDA)

    def draw(self, *shape: int, seed: int) -> Tensor:
        """The same numbers in every dtype."""
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(CUDA, self.dtype)

    def plan(self, rows: Rows) -> Any:
        if isinstance(self.net, ReferenceDeltaNet):
            return self.net.prepare(rows, TAPS, self.windows.shape[1], CUDA)
        return TritonStep.of(rows, torch.zeros(len(rows.slots), 1, device=CUDA, dtype=torch.long), 16)

    def run(self, projected_NO: Tensor, rows: Rows) -> Tensor:
        return self.net(projected_NO, self.delta, self.windows, self.plan(rows))

    def prepared(self, projected_NO: Tensor, rows: Rows) -> Callable[[], Tensor]:
        """A step that launches the core's kernels and nothing else."""
        assert isinstance(self.net, TritonDeltaNet)
        net, given, step = self.net, InParts(projected_NO, self.net.gates), self.plan(rows)
        return lambda: net(given, self.delta, self.windows, step)


def read(layer: Layer, sequence: Tensor, chunks: list[int], drafts: int = 0) -> list[Tensor]:
    """Outputs and the memory after the sequence, read in the given chunks, cyclically. With drafts, every step ends in
    so many of them, but for the last: of each three steps the drafts of the first are noise, the second's half noise,
    the third's the row's own."""
    outputs, at, replay, turn, total = [], 0, 0, 0, len(sequence)
    while at < total:
        certain = min(chunks[turn % len(chunks)], total - at)
        count = drafts if at + certain + drafts < total else 0
        kept = count * (turn % 3) // 2
        fed = [sequence[at : at + certain + kept], layer.draw(count - kept, layer.width, seed=turn)]
        out = layer.run(torch.cat(fed), Rows((1,), (at,), (certain + count,), (count,), (replay,)))
        outputs.append(out[: certain + kept])
        at, replay, turn = at + certain + kept, kept, turn + 1
    return [torch.cat(outputs), layer.delta.committed_SHDE[1]]


def check(sizes: tuple[int, int, int, int], total: int = 203) -> None:
    """Ends the program where bits differ. Prints how far results are from those in float64."""

    def found(*how: Any, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        layer = Layer(sizes, 1, dtype)
        return read(layer, layer.draw(total, layer.width, seed=9), *how)

    whole = found([total])
    ways = {
        "chunks": ([64, 7, 1, 2, 33],),
        "token by token": ([1],),
        "drafts": ([1], 3),
        "one draft": ([1], 1),
    }
    for name, how in ways.items():
        same = all(torch.equal(a, b) for a, b in zip(found(*how), whole, strict=True))
        print(f"bits, whole against {name}: {'equal' if same else 'DIFFERENT'}", flush=True)
        if not same:
            raise SystemExit(1)
    exact = found([total], dtype=torch.float64)
    for name, ours, theirs in zip(("outputs", "memory"), whole, exact, strict=True):
        apart = (ours - theirs).abs()
        print(f"{name} from float64: mean {apart.mean() / theirs.abs().mean():.2e}", end=" ")
        print(f"most {apart.max() / theirs.abs().max():.2e}", flush=True)


def milliseconds(work: Callable[[], object], repeats: int = 12, warm: int = 3) -> float:
    times = []
    for repeat in range(warm + repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        if repeat >= warm:
            times.append(begin.elapsed_time(end))
    return statistics.median(times)


class Recorded:
    """A kernel that runs, and whose launches can be repeated."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.again = kernel, None

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            self.again = lambda: self.kernel[grid](*args, **options)
            self.again()

        return launch


@contextmanager
def recorded() -> Iterator[dict[str, Recorded]]:
    found = {name: Recorded(getattr(op.kernels, name)) for name in KERNELS}
    for name, kernel in found.items():
        setattr(op.kernels, name, kernel)
    try:
        yield found
    finally:
        for name, kernel in found.items():
            setattr(op.kernels, name, kernel.kernel)


def floor_of_reading(sizes: tuple[int, int, int, int]) -> float:
    """Microseconds a token."""
    _, heads, key_dim, value_dim = sizes
    device = torch.cuda.get_device_properties(CUDA)
    megahertz = getattr(device, "clock_rate", 1_980_000) / 1000
    return 4 * heads * key_dim * value_dim / (device.multi_processor_count * 128) / megahertz


def time_prompts(sizes: tuple[int, int, int, int], tokens: int, prompts: int) -> None:
    layer = Layer(sizes, prompts)
    each = tokens // prompts
    rows = Rows(
        tuple(range(1, prompts + 1)), (0,) * prompts, (each,) * prompts, (0,) * prompts, (0,) * prompts
    )
    with recorded() as kernels:
        step = layer.prepared(layer.draw(each * prompts, layer.width, seed=9), rows)
        step()
        whole = milliseconds(step)
        parts = {name: milliseconds(kernel.again) for name, kernel in kernels.items() if kernel.again}
    texts = [
        f"{name.removesuffix('_kernel')} {ms:.3f} ms {ms * 1e3 / tokens:.3f} µs" for name, ms in parts.items()
    ]
    print(
        f"{prompts}×{each} tokens: all {whole:.3f} ms {whole * 1e3 / tokens:.3f} µs;",
        "; ".join(texts),
        flush=True,
    )


def time_steps(sizes: tuple[int, int, int, int], num_rows: int, drafts: int, copy_rate: float) -> None:
    """Microseconds of a layer's step."""
    _, heads, key_dim, value_dim = sizes
    bytes_of_row = heads * key_dim * value_dim * 4
    calls = max(4, min(48, FEWEST_BYTES // (num_rows * bytes_of_row)))
    layer, steps = Layer(sizes, num_rows * calls), []
    projected = layer.draw(num_rows * (1 + drafts), layer.width, seed=9)
    for call in range(calls):
        slots = tuple(range(1 + call * num_rows, 1 + (call + 1) * num_rows))
        replay = (min(drafts, 2),) * num_rows
        rows = Rows(slots, (8,) * num_rows, (1 + drafts,) * num_rows, (drafts,) * num_rows, replay)
        steps.append(layer.prepared(projected, rows))
    steps[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for step in steps:
            step()
    found = milliseconds(graph.replay) * 1e3 / calls
    floor = 2 * num_rows * bytes_of_row / copy_rate
    print(f"{num_rows} rows, {1 + drafts} tokens: {found:.2f} µs a layer (floor {floor:.2f})", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", type=Path, default=Path(__file__).parent / "shapes" / "qwen3.6-27b.json")
    parser.add_argument("--tokens", default="2048,8192")
    parser.add_argument("--prompts", default="1,16")
    parser.add_argument("--rows", default="1,4,16,64")
    parser.add_argument("--skip-exact", action="store_true")
    options = parser.parse_args()
    config = json.loads(options.shape.read_text())
    config = config.get("text_config", config)
    names = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
    key_heads, heads, key_dim, value_dim = (config[name] for name in names)
    sizes = key_heads, heads, key_dim, value_dim
    print(options.shape.stem, torch.cuda.get_device_name())
    if not options.skip_exact:
        check(sizes)
    print(f"floor of reading: {floor_of_reading(sizes):.3f} µs a token and layer")
    for tokens in map(int, options.tokens.split(",")):
        for prompts in map(int, options.prompts.split(",")):
            time_prompts(sizes, tokens, prompts)
    source = torch.zeros(FEWEST_BYTES // 4, device=CUDA)
    into = torch.empty_like(source)
    rate = 2 * FEWEST_BYTES / (milliseconds(lambda: into.copy_(source)) * 1e3)
    for num_rows in map(int, options.rows.split(",")):
        for drafts in (0, MAX_DRAFTS):
            time_steps(sizes, num_rows, drafts, rate)


if __name__ == "__main__":
    main()
