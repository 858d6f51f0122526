"""LoRA and full fine-tuning of the real SmolLM2-135M-Instruct on GSM8K, packed at 4096 tokens, through `rft train`.

    python bench/train/gsm8k.py --model DIR_OR_GGUF --train train.jsonl --eval test.jsonl --out bench/out/gsm8k [--results FILE]

For each of LoRA and full: the held-out loss before and after, real tokens a second (median, smallest, largest over the
steps after the first five), MFU and peak memory, read from the run's own metrics.jsonl; a line each in the format of the
project's results. The model and the data are not in the repository: any SmolLM2 directory or GGUF file and GSM8K's two
JSONL files do.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
import torch  # so that the result lines name the GPU

from results import Results

NEEDS = "a SmolLM2-135M-Instruct folder or GGUF file and GSM8K's two JSONL files"
CASES = {
    "lora": '[adapter]\nname = "lora"\nr = 16\n[optim]\nlr = 2e-4\n',
    "full": '[adapter]\nname = "none"\n[optim]\nlr = 2e-5\n',
}

CONFIG = """
[model]
path = {model}

[data]
seq_len = {seq_len}

[[data.train]]
path = {train}
format = "alpaca"
[data.train.fields]
instruction = "question"
output = "answer"
[[data.eval]]
path = {eval}
format = "alpaca"
[data.eval.fields]
instruction = "question"
output = "answer"

[train]
epochs = {epochs}
tokens_per_step = {tokens_per_step}
micro_batch = {micro_batch}
out = {out}
{more}
"""


def run(case: str, args: argparse.Namespace) -> list[dict]:
    """Train once and return the run's metric lines."""
    out = args.out / case
    text = CONFIG.format(
        model=json.dumps(str(args.model)),
        train=json.dumps(str(args.train)),
        eval=json.dumps(str(args.eval)),
        out=json.dumps(str(out)),
        seq_len=args.seq_len,
        epochs=float(args.epochs),
        tokens_per_step=args.tokens_per_step,
        micro_batch=args.micro_batch,
        more=f"max_steps = {args.max_steps}" if args.max_steps else "",
    )
    args.out.mkdir(parents=True, exist_ok=True)
    config = args.out / f"{case}.toml"
    config.write_text(text.replace("\n[train]", f"\n{CASES[case]}\n[train]"))
    subprocess.run([sys.executable, "-P", "-m", "rft", "train", str(config), "--new"], check=True)
    newest = max(args.out.glob(f"{case}*/metrics.jsonl"), key=lambda p: p.stat().st_mtime)
    return [json.loads(line) for line in newest.read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    for name in ("model", "train", "eval", "out"):
        parser.add_argument(f"--{name}", type=lambda p: pathlib.Path(p).resolve(), required=True)
    parser.add_argument("--results", type=pathlib.Path, help="append result lines here")
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--tokens-per-step", type=int, default=32768)
    parser.add_argument(
        "--micro-batch",
        type=int,
        default=8,
        help="packs at one time; one alone leaves a large GPU waiting for launches",
    )
    parser.add_argument("--epochs", type=float, default=2.0)
    parser.add_argument("--max-steps", type=int)
    parser.add_argument("--only", choices=CASES, action="append")
    args = parser.parse_args()
    if torch.cuda.is_available():
        print(f"on {torch.cuda.get_device_name()}")
    results = Results(args.results)
    for case in args.only or CASES:
        name = f"train/smollm2-135m/{case}-bf16/gsm8k-packed-{args.seq_len}"
        lines = run(case, args)
        held_out = [line["loss"] for line in lines if line["kind"] == "eval"]
        steps = [line for line in lines if line["kind"] == "train"][5:]
        for metric, key in (("tokens_per_second", "tokens_per_second"), ("mfu_percent", "mfu")):
            scale = 100 if key == "mfu" else 1
            values = [line[key] * scale for line in steps if line.get(key) is not None]
            if values:
                results.add(name, "rft", metric, values)
        results.add(name, "rft", "gib", [max(line["memory_peak_bytes"] for line in steps) / 2**30])
        results.add(name, "rft", "held_out_loss_before", held_out[:1])
        results.add(name, "rft", "held_out_loss_after", held_out[-1:])
        print(
            f"{name}: held-out {held_out[0]:.4f} -> {held_out[-1]:.4f}, "
            f"{statistics.median(line['tokens_per_second'] for line in steps):,.0f} tok/s"
        )


if __name__ == "__main__":
    main()
