"""Does training over an FP8 base lose anything? Loss curves of LoRA over bf16 and over FP8, trained alike.

    python bench/train/fp8_curve.py --model DIR_OR_GGUF --train train.jsonl --eval test.jsonl [--name smollm2-135m] [--results FILE]
    python bench/train/fp8_curve.py --tiny                 the same path on a CPU: kernels in Triton's interpreter, FP8 multiplied in fp32

Three runs through the library's own setup and loop, of the same seed, data and order: bf16, FP8 as it is by default (first and last layer in bf16),
FP8 in every layer. Each run is a process of its own. For both FP8 runs: the largest difference of a 20-step mean of the training loss from
bf16's, and that of the held-out loss after the last step, in percent. Status 1 where they pass 1.5 and 1. A folder of a mixture of experts
works as well: its dense linears are what is quantised. GSM8K's two files do as data.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "tests")]
NEEDS = "a SmolLM2-135M-Instruct folder or GGUF file and GSM8K's two JSONL files (--tiny: nothing)"
CURVE_PERCENT, HELD_OUT_PERCENT = 1.5, 1.0
BASES = {
    "bf16": "",
    "fp8": 'base_weights = "fp8"',
    "fp8-every-layer": 'base_weights = "fp8"\nkeep_ends = 0',
}
CONFIG = """
[model]
path = {model}
{base}
[adapter]
name = "lora"
r = {r}
[data]
seq_len = {seq_len}
store = {store}
[[data.train]]
path = {train}
{form}
[[data.eval]]
path = {eval}
{form}
[optim]
lr = {lr}
[train]
max_steps = {steps}
tokens_per_step = {tokens_per_step}
{more}
out = {out}
"""
GSM8K = 'format = "prompt_completion"\nfields = {prompt = "question", completion = "answer"}'


def train(config: Path, tiny: bool) -> None:
    """One run in this process. tiny: with the kernels, which a CPU run would leave out."""
    from rft import log
    from rft.config.load import load_config
    from rft.parallel.mesh import join_world
    from rft.training.loop import train as train_run
    from rft.training.rundir import write_run_files
    from rft.training.setup import add_data, build_run, inspect_job

    checked = load_config(config)
    with log.capture_noise():
        job = inspect_job(checked, join_world("cpu" if tiny else None), kernels=True if tiny else None)
        add_data(job, None)
        out = Path(str(checked.train.out))
        out.mkdir(parents=True)
        run = build_run(job, out, None)
        write_run_files(run)
        train_run(run)


def tiny_parts(folder: Path) -> dict[str, Path]:
    from support.data import write_tiny_tokenizer
    from support.tiny import tiny_llama

    model = folder / "model"
    model.mkdir()
    tiny_llama(model, vocab_size=400, layers=3)
    write_tiny_tokenizer(model)
    paths = {"model": model, "train": folder / "train.jsonl", "eval": folder / "eval.jsonl"}
    for name, rows in (("train", 40), ("eval", 4)):
        paths[name].write_text(
            "".join(json.dumps({"text": f"{name} row {i} of a few words"}) + "\n" for i in range(rows))
        )
    return paths


def read(out: Path) -> tuple[list[float], float]:
    """(training loss of each step, held-out loss after the last)."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [x["loss"] for x in lines if x["kind"] == "train"], [x["loss"] for x in lines if x["kind"] == "eval"][-1]


def means(losses: list[float], window: int) -> list[float]:
    return [sum(losses[i : i + window]) / window for i in range(0, len(losses) - window + 1, window)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "train", "eval"):
        parser.add_argument(f"--{name}", type=lambda p: Path(p).resolve())
    parser.add_argument("--name", default="smollm2-135m", help="of the model, in result lines")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--window", type=int, default=20, help="steps of a mean")
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--tokens-per-step", type=int, default=16384)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--bases", nargs="*", choices=BASES, default=list(BASES))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--results", type=Path)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        train(args.child, args.tiny)
        return 0
    if not args.tiny and not (args.model and args.train and args.eval):
        parser.error("--model, --train and --eval, or --tiny")
    import torch  # so that the result lines name the GPU  # noqa: F401

    from results import Results

    results, failed = Results(args.results), False
    name, steps, window = ("tiny", 4, 2) if args.tiny else (args.name, args.steps, args.window)
    curves: dict[str, tuple[list[float], float]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        parts = tiny_parts(folder) if args.tiny else {n: getattr(args, n) for n in ("model", "train", "eval")}
        for base in dict.fromkeys(["bf16", *args.bases]):
            case, out = f"train/{name}/lora-{base}/curve-{steps}-steps", folder / base
            values = {**parts, "store": folder / "sets", "out": out}
            text = CONFIG.format(
                **{key: json.dumps(str(value)) for key, value in values.items()}, base=BASES[base], steps=steps, lr=args.lr,
                r=4 if args.tiny else args.rank, seq_len=32 if args.tiny else args.seq_len,
                tokens_per_step=64 if args.tiny else args.tokens_per_step, form='format = "text"' if args.tiny else GSM8K,
                more='precision = "fp32"' if args.tiny else "",
            )  # fmt: skip
            config = folder / f"{base}.toml"
            config.write_text(text)
            command = [sys.executable, "-P", __file__, "--child", str(config), *(["--tiny"] if args.tiny else [])]
            environment = os.environ | ({"TRITON_INTERPRET": "1"} if args.tiny else {})
            if subprocess.run(command, env=environment, check=False).returncode:
                results.error(case, "rft", "the run failed")
                failed = True
                continue
            losses, held_out = curves[base] = read(out)
            results.add(case, "rft", "loss_first_steps", means(losses, window)[0])
            results.add(case, "rft", "loss_last_steps", means(losses, window)[-1])
            results.add(case, "rft", "held_out_loss", held_out)
            if base == "bf16" or "bf16" not in curves:
                continue
            own, plain = means(losses, window), means(curves["bf16"][0], window)
            percents = [100 * abs(a - b) / b for a, b in zip(own, plain, strict=True)]
            results.add(case, "rft", f"percent_of_{window}_step_means", percents)
            behind = 100 * abs(held_out - curves["bf16"][1]) / curves["bf16"][1]
            results.add(case, "rft", "percent_of_held_out", behind)
            failed |= max(percents) > CURVE_PERCENT or behind > HELD_OUT_PERCENT
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
