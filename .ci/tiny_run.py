"""A tiny model, its tokenizer, rows and a config, made from nothing, for the two-step training that tries the wheel.

tiny_run.py run      writes run/model, run/rows.jsonl and run/tiny.toml
tiny_run.py check    holds run/out against what a finished run leaves behind
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

FOLDER = Path("run")
CONFIG = """\
[model]
path = "model"

[[data.train]]
path = "rows.jsonl"

[data]
seq_len = 128
template = "chatml"
eval_fraction = 0.1

[train]
max_steps = 2
tokens_per_step = 256
out = "out"
"""


def write() -> None:
    """The inputs of the run."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.save_pretrained(FOLDER / "model")

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(fast), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, eos_token_id=fast.eos_token_id, pad_token_id=fast.pad_token_id,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(FOLDER / "model")
    with open(FOLDER / "rows.jsonl", "w", encoding="utf-8") as rows:
        for number in range(40):
            messages = [
                {"role": "user", "content": f"What is {number} plus {number}?"},
                {"role": "assistant", "content": str(2 * number)},
            ]
            rows.write(json.dumps({"messages": messages}) + "\n")
    (FOLDER / "tiny.toml").write_text(CONFIG, encoding="utf-8")


def check() -> None:
    """What a finished run leaves behind."""
    out = FOLDER / "out"
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [line["step"] for line in lines if line["kind"] == "train"]
    assert steps == [1, 2], f"metrics.jsonl has the steps {steps}"
    evaluations = [line["step"] for line in lines if line["kind"] == "eval"]
    assert (evaluations[0], evaluations[-1]) == (0, 2), f"metrics.jsonl has evaluations at the steps {evaluations}"
    for name in ("config.resolved.toml", "receipts.json", "data.json", "run.log", "report.html",
                 "final/adapter_model.safetensors", "final/adapter_config.json", "final/tokenizer.json"):  # fmt: skip
        assert (out / name).stat().st_size > 0, f"{name} is empty"
    data = json.loads((out / "data.json").read_text(encoding="utf-8"))
    assert "train" in data, f"data.json has {list(data)}"
    print("the run left everything behind that it should")


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    {"run": write, "check": check}[sys.argv[1]]()
