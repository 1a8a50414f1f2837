"""Headlong against llama.cpp and transformers on this machine's CPU: the same prompts, in the same run, in turns.

    python benchmarks/cpu.py [--cases decode,together,prompt,load,smollm2] [--formats bf16,q8_0] [--rounds 5]
                             [--max-tokens 160] [--prompts 4] [--depths 1,2,3,4,5,6] [--llama-depths 1,2,3,4]
                             [--threads N] [--smollm2 GGUF] [--smollm2-head DIR] [--no-transformers]
                             [--native-llama PYTHON]

Needs `pip install xllamacpp transformers`. The embedded model is written as GGUF, head included, into a temporary
folder: with `f16` and `q8_0` both sides open the same file, with `bf16` ours is the checkpoint as it is shipped and
theirs F16.

Every contestant runs once to warm up and then once a round, each round in another order; greedy, past the end token,
without prompt caches, with the same number of threads. Decode speed is what llama.cpp calls `predicted_per_second`: the
tokens after the first one by the time after it, on our side by the wall clock around the public API. `together` is
eight sequences at once: all tokens by all the time, prompts included. transformers runs in float32, one prompt a round.
`load` is `footprint.py`, a process each. Ratios are taken within a round; medians over rounds, with the quartiles. If a
token of ours differs between plain decoding and any depth or batch, the run ends and no speed is reported. The wheel of
xllamacpp is built for a fixed instruction set (AVX2, for one) and may leave idle what the machine has beyond it, which
no speed says: its build is printed. `--native-llama` is the interpreter of an environment where it was built for this
machine (`llama_cpp_apart.py` says how), which is a contestant beside the wheel. Ends in one JSON line.
"""

import argparse
import json
import os
import sys
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress

import footprint
from contest import Contest, Contestants, Figures, best
from contestants import CONTEXT, PLAIN, ROWS, STORIES, Headlong, Transformers
from headlong.checkpoint.checkpoint import Checkpoint
from headlong.checkpoint.source import EMBEDDED
from headlong.convert.from_gguf import from_gguf
from headlong.convert.graft import graft
from headlong.convert.to_gguf import to_gguf
from llama_cpp import LlamaCpp, Prompt, features
from llama_cpp_apart import LlamaCppApart

CASES = ("decode", "together", "prompt", "load", "smollm2")
PROMPT_LEN, READS = 512, 2
LLAMA, NATIVE = "llama.cpp plain", "llama.cpp, built here, plain"
PROMPT_GOAL, FOOTPRINT_GOAL = 1 / 1.3, 1.2


@dataclass(frozen=True)
class Model:
    """One set of weights, as each side opens it."""

    name: str
    ours: Path
    theirs: Path
    unpacked: Path
    """The folder that transformers opens."""
    their_depths: tuple[int, ...]
    goals: dict[str, float]
    """Of decoding: `plain` by their plain, our `best` by theirs, `drafting` by our plain; a ratio may have none."""


class Match:
    """The cases of one model."""

    def __init__(self, model: Model, contest: Contest, args: argparse.Namespace) -> None:
        self.model, self.contest, self.args = model, contest, args
        self.ours = Headlong(model.ours)
        self.prompts = self.ours.prompts()
        self.depths = self.ours.depths(args.depths)

    def decode(self) -> None:
        model, size, prompts = self.model, self.args.max_tokens, self.prompts[: self.args.prompts]
        contestants: Contestants = {
            name: lambda _, drafts=drafts: self.ours.decode(prompts, size, drafts)
            for name, drafts in self.depths.items()
        }
        for name, opened in self._llamas(rows=1).items():
            contestants[name] = lambda _, opened=opened: opened.decode(prompts, size)
        if self.args.transformers:
            other = Transformers(model.unpacked)
            contestants["transformers"] = lambda turn: other.decode(prompts[turn % len(prompts)], size)
        case = f"{model.name}, decode, tokens/s"
        self._compare(case, self.contest.run(case, model.name, contestants, prompts), model.goals)

    def together(self) -> None:
        model, size, prompts = self.model, self.args.max_tokens, self.prompts
        contestants: Contestants = {
            name: lambda _, drafts=drafts: self.ours.together(prompts, size, drafts)
            for name, drafts in self.depths.items()
        }
        for name, opened in self._llamas(rows=ROWS).items():
            contestants[name] = lambda _, opened=opened: opened.together(prompts, size)
        case = f"{model.name}, {ROWS} together, tokens/s"
        self._compare(case, self.contest.run(case, model.name, contestants, prompts), {"best": 1.3})

    def prompt(self) -> None:
        contestants: Contestants = {PLAIN: lambda turn: self.ours.read(self._long(turn))}
        for name, opened in self._llamas(rows=1, depths=(0,)).items():
            contestants[name] = lambda turn, opened=opened: opened.read(self._long(turn))
        case = f"{self.model.name}, prompt of {PROMPT_LEN}, tokens/s"
        speeds = self.contest.run(case, self.model.name, contestants)
        for name in speeds.keys() - {PLAIN}:
            self.contest.compare(case, f"{PLAIN} / {name}", speeds[PLAIN], speeds[name], PROMPT_GOAL)

    def _long(self, turn: int) -> list[Prompt]:
        """Other ones each round."""
        text = [token for prompt in self.prompts for token in prompt] * PROMPT_LEN
        return [tuple(text[start : start + PROMPT_LEN]) for start in range(turn * READS, (turn + 1) * READS)]

    def _llamas(
        self, rows: int, depths: tuple[int, ...] | None = None
    ) -> dict[str, LlamaCpp | LlamaCppApart]:
        """The wheel at every depth, and one that was built for this machine, if there is one, likewise."""
        found: dict[str, LlamaCpp | LlamaCppApart] = {}
        model, sizes = self.model.theirs, {"threads": self.args.threads, "rows": rows, "context": CONTEXT}
        for drafts in (0, *self.model.their_depths) if depths is None else depths:
            name = f"llama.cpp K={drafts}" if drafts else LLAMA
            found[name] = LlamaCpp(model, drafts=drafts, **sizes)
            if self.args.native_llama is not None:
                name = f"llama.cpp, built here, K={drafts}" if drafts else NATIVE
                found[name] = apart = LlamaCppApart(self.args.native_llama, model, drafts=drafts, **sizes)
                self.args.native_features = apart.features
        return found

    def _compare(self, case: str, speeds: Figures, goals: dict[str, float]) -> None:
        theirs = best(speeds, [name for name in speeds if name.startswith("llama.cpp")])
        pairs = {"plain": (PLAIN, LLAMA), "best": (best(speeds, list(self.depths)), theirs)}
        if NATIVE in speeds:
            pairs["plain, built here"] = (PLAIN, NATIVE)
        if drafting := [name for name in self.depths if name != PLAIN]:
            pairs["drafting"] = (best(speeds, drafting), PLAIN)
        for what, (a, b) in pairs.items():
            self.contest.compare(case, f"{a} / {b}", speeds[a], speeds[b], goals.get(what))


def load(model: Model, contest: Contest, threads: int) -> None:
    """Fresh processes in turns, the first pair to warm the file cache."""
    found: dict[str, list[dict[str, float]]] = {"headlong": [], "llama.cpp": []}
    task = contest.progress.add_task(f"{model.name}, load", total=2 * (contest.rounds + 1))
    for turn in range(contest.rounds + 1):
        for engine, path in (("headlong", model.ours), ("llama.cpp", model.theirs))[:: -1 if turn % 2 else 1]:
            figures = footprint.in_process(engine, path, threads)
            if turn:
                found[engine].append(figures)
            contest.progress.advance(task)
    for what in found["headlong"][0]:
        figures = {engine: [figure[what] for figure in own] for engine, own in found.items()}
        case = f"{model.name}, load, {what}"
        contest.keep(case, figures)
        if not what.startswith("import"):
            own, other = figures["headlong"], figures["llama.cpp"]
            contest.compare(case, "headlong / llama.cpp", own, other, FOOTPRINT_GOAL, at_most=True)


def embedded(format: str, folder: Path, depths: tuple[int, ...]) -> Model:
    theirs = folder / f"{format}.gguf"
    to_gguf(Checkpoint.open(EMBEDDED), theirs, type="f16" if format == "bf16" else format)
    ours = EMBEDDED if format == "bf16" else theirs
    goals = {"plain": 1.2, "best": 1.6, "drafting": 1.5}
    return Model(f"embedded {format}", ours, theirs, EMBEDDED, depths, goals)


def smollm2(file: Path, head: Path | None, folder: Path) -> Model:
    """llama.cpp reads no head beside a llama, so it decodes plainly."""
    ours = file
    if head is not None:
        ours = folder / "smollm2"
        graft(file, head / "mtp.safetensors" if head.is_dir() else head, ours)
    unpacked = folder / "unpacked"
    from_gguf(Checkpoint.open(file), unpacked, type="f32")
    return Model("SmolLM2-135M", ours, file, unpacked, (), {"plain": 1.0})


def run(args: argparse.Namespace, contest: Contest, folder: Path) -> None:
    for format in args.formats if set(args.cases) - {"smollm2"} else ():
        model = embedded(format, folder, args.llama_depths)
        if "load" in args.cases:
            load(model, contest, args.threads)
        if timed := [case for case in args.cases if case in ("decode", "together", "prompt")]:
            match = Match(model, contest, args)
            for case in timed:
                getattr(match, case)()
    if "smollm2" in args.cases and args.smollm2 is None:
        contest.progress.console.print("smollm2: skipped, since --smollm2 names no GGUF file")
    elif "smollm2" in args.cases:
        model = smollm2(args.smollm2, args.smollm2_head, folder)
        load(model, contest, args.threads)
        match = Match(model, contest, args)
        match.decode()
        match.prompt()


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part)


def chosen(text: str) -> list[str]:
    if wrong := set(text.split(",")) - set(CASES):
        raise argparse.ArgumentTypeError(f"{', '.join(sorted(wrong))}: choose from {', '.join(CASES)}")
    return text.split(",")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=chosen, default=list(CASES))
    parser.add_argument("--formats", type=lambda text: text.split(","), default=["bf16", "q8_0"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--prompts", type=int, default=4, help=f"of the {len(STORIES)}, for `decode`")
    parser.add_argument("--depths", type=numbers, default=numbers("1,2,3,4,5,6"), help="ours")
    parser.add_argument("--llama-depths", type=numbers, default=numbers("1,2,3,4"))
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--smollm2", type=Path, metavar="GGUF")
    parser.add_argument("--smollm2-head", type=Path, metavar="DIR")
    parser.add_argument("--native-llama", type=Path, metavar="PYTHON")
    parser.set_defaults(native_features=None)
    parser.add_argument("--no-transformers", dest="transformers", action="store_false")
    return parser.parse_args()


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    with (
        Progress(console=Console(stderr=True)) as progress,
        tempfile.TemporaryDirectory(prefix="headlong-") as folder,
    ):
        contest = Contest(args.rounds, progress)
        run(args, contest, Path(folder))
    contest.show(f"{args.threads} threads, {args.rounds} rounds, {args.max_tokens} tokens a sequence")
    print(f"llama.cpp's build: {features()}")
    conditions = {
        "cpu": footprint.cpu_name(),
        "threads": args.threads,
        "versions": {name: version(name) for name in ("headlong", "torch", "xllamacpp", "transformers")},
        "llama_cpp_build": features(),
        "llama_cpp_built_here": args.native_features,
        "command": sys.argv[1:],
    }
    print(json.dumps({"benchmark": "cpu"} | conditions | contest.as_json()))


if __name__ == "__main__":
    main()
