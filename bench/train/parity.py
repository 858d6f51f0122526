"""Losses of 20 steps against transformers + PEFT on the real SmolLM2 and GSM8K, in fp32, packs of 4096 tokens.

    python bench/train/parity.py --model DIR --train train.jsonl [--device cuda] [--results FILE]

rft trains packed; the reference is a plain transformers + PEFT loop over the same documents, each alone, in the same order,
with eager attention (on a GPU several beside each other, filled up at the right, where no token sees it). The figure is the largest relative difference of a step's loss; above 1e-4 the status is 1. On a GPU the
four cases run side by side, each in a process of its own: what takes time is the launching of small documents.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "tests")]

import torch

from results import Results
from rft.config.load import load_config
from rft.parallel.mesh import join_world
from rft.training import loop, setup
from support.reference import train_reference

NEEDS = "a SmolLM2-135M-Instruct folder and GSM8K's train.jsonl"
STEPS = 20
ALLOWED = 1e-4


def compare(args: argparse.Namespace, adapter: str, packing: str, folder: Path) -> float:
    """Largest relative difference of a step's loss."""
    lora = {"name": "lora", "r": 16} if adapter == "lora" else {"name": "none"}
    source = {
        "path": str(args.train),
        "format": "prompt_completion",
        "fields": {"prompt": "question", "completion": "answer"},
    }
    config = load_config(
        {
            "model": {"path": str(args.model)},
            "adapter": lora,
            "data": {
                "train": [source],
                "seq_len": args.seq_len,
                "packing": packing,
                "store": str(folder / "sets"),
            },
            "train": {"precision": "fp32", "accumulate": 2, "max_steps": STEPS, "out": str(folder / "run")},
        }
    )
    job = setup.inspect_job(config, join_world(args.device))
    setup.add_data(job, None)
    (folder / "run").mkdir()
    run = setup.build_run(job, folder / "run", None)
    steps = [step for step, _ in zip(run.loader.steps(0, run.packs_per_step), range(STEPS), strict=False)]
    rates = [run.schedule.peaks[0] * run.schedule.lr_ratio(step) for step in range(STEPS)]
    start = {name.removeprefix("model."): t.clone() for name, t in run.optimizer.named_masters().items()}
    began = time.perf_counter()
    result = loop.train(run)
    trained = time.perf_counter()
    lines = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["kind"] == "train"]
    reference = train_reference(
        args.model,
        steps,
        rates,
        lora={"r": 16, "lora_alpha": 32, "target_modules": "all-linear"} if adapter == "lora" else None,
        initial=start if adapter == "lora" else None,
        device=args.device,
        most_tokens=1 << 13 if args.device != "cpu" else 1,
    )
    print(f"trained in {trained - began:.0f} s, the reference in {time.perf_counter() - trained:.0f} s")
    pairs = zip(losses, reference.losses, strict=True)
    return max(abs(ours - theirs) / theirs for ours, theirs in pairs)


CASES = tuple((adapter, packing) for adapter in ("lora", "none") for packing in ("stream", "none"))


def name_of(adapter: str, packing: str, seq_len: int) -> str:
    kind, shape = {"lora": "lora", "none": "full"}[adapter], "packed" if packing == "stream" else "unpacked"
    return f"parity/smollm2-135m/{kind}-fp32/gsm8k-{shape}-{seq_len}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=lambda p: Path(p).resolve(), required=True)
    parser.add_argument("--train", type=lambda p: Path(p).resolve(), required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--results", type=Path)
    parser.add_argument("--case", nargs=2, metavar=("ADAPTER", "PACKING"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        with tempfile.TemporaryDirectory() as folder:
            print(f"difference {compare(args, *args.case, Path(folder))!r}")
        return 0
    results = Results(args.results)
    given = ["--model", args.model, "--train", args.train, "--device", args.device, "--seq-len", str(args.seq_len)]
    worst = 0.0

    def run(case: tuple[str, str]) -> tuple[tuple[str, str], subprocess.CompletedProcess]:
        command = [sys.executable, "-P", __file__, *map(str, given), "--case", *case]
        return case, subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)

    with ThreadPoolExecutor(len(CASES) if args.device != "cpu" else 1) as pool:
        for case, process in (done.result() for done in as_completed([pool.submit(run, case) for case in CASES])):
            found = [line for line in process.stdout.splitlines() if line.startswith("difference ")]
            if process.returncode or not found:
                worst = float("inf")
                results.error(name_of(*case, args.seq_len), "rft", process.stdout.strip()[-300:])
                continue
            print(*(line for line in process.stdout.splitlines() if line.startswith("trained in ")), flush=True)
            error = float(found[0].removeprefix("difference "))
            worst = max(worst, error)
            results.add(name_of(*case, args.seq_len), "rft", "largest_relative_loss_difference", error)
    print(f"largest relative difference of a loss over {STEPS} steps: {worst:.2e}, allowed {ALLOWED:.0e}")
    return 0 if worst <= ALLOWED else 1


if __name__ == "__main__":
    sys.exit(main())
