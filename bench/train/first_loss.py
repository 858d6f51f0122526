"""Seconds from `rft train` to the first loss, data prepared: a 1B model of random weights, LoRA, packs of 8,192 tokens.

    python bench/train/first_loss.py --tokenizer DIR --train train.jsonl [--results FILE]

The model's folder is written first (Llama-3.2-1B's sizes with the tokenizer's vocabulary) and the data prepared; neither counts. --tiny: a small
model on whatever device is there, with a tokenizer and rows of the tests.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "tests")]
import torch

from results import Results

NEEDS = "a tokenizer folder and GSM8K's train.jsonl (--tiny: nothing)"
CONFIG = """
[model]
path = {model}
[data]
seq_len = {seq_len}
store = {store}
[[data.train]]
path = {train}
{form}
[train]
max_steps = 2
out = {out}
"""
GSM8K = 'format = "prompt_completion"\nfields = {prompt = "question", completion = "answer"}'


def write_model(folder: Path, tokenizer: Path) -> None:
    import transformers

    for file in tokenizer.iterdir():
        if file.name.startswith(("tokenizer", "special", "vocab", "merges", "chat_template", "added")):
            shutil.copy(file, folder / file.name)
    vocabulary = len(transformers.AutoTokenizer.from_pretrained(folder))
    config = transformers.LlamaConfig(
        vocab_size=-(-vocabulary // 128) * 128, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, head_dim=64, tie_word_embeddings=True, max_position_embeddings=8192,
    )  # fmt: skip
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.cpu().save_pretrained(folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--train", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--results", type=Path)
    args = parser.parse_args()
    results, times = Results(args.results), []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = folder / "model"
        model.mkdir()
        if args.tiny:
            from support.data import write_tiny_tokenizer
            from support.tiny import tiny_llama

            tiny_llama(model, vocab_size=400)
            write_tiny_tokenizer(model)
            train = folder / "rows.jsonl"
            train.write_text("".join(json.dumps({"text": f"row {i} of a few words"}) + "\n" for i in range(50)))
        else:
            write_model(model, args.tokenizer)
            train = args.train.resolve()
        paths = {k: json.dumps(str(v)) for k, v in {"model": model, "store": folder / "sets", "train": train}.items()}
        for number in range(1 if args.tiny else args.repeats + 1):
            out = folder / f"run-{number}"
            config = folder / f"{number}.toml"
            form = 'format = "text"' if args.tiny else GSM8K
            config.write_text(
                CONFIG.format(**paths, out=json.dumps(str(out)), seq_len=64 if args.tiny else 8192, form=form)
            )
            if number == 0:
                subprocess.run([sys.executable, "-P", "-m", "rft", "prepare", str(config)], check=True)
            start = time.perf_counter()
            process = subprocess.Popen([sys.executable, "-P", "-m", "rft", "train", str(config)])
            metrics = out / "metrics.jsonl"
            while process.poll() is None and not (metrics.exists() and '"train"' in metrics.read_text()):
                time.sleep(0.02)
            seconds = time.perf_counter() - start
            if process.wait():
                results.error("first_loss/llama-1b/lora", "rft", f"rft train ended with status {process.returncode}")
                return 1
            if number or args.tiny:  # the first fills caches of compiled kernels and of the disk
                times.append(seconds)
    results.add(f"first_loss/{'tiny' if args.tiny else 'llama-1b'}/lora", "rft", "seconds", times)
    return 0


if __name__ == "__main__":
    sys.exit(main())
