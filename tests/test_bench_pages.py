"""The page of figures says what the stored lines say."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

ROOT = Path(__file__).parents[1]


def load():
    spec = importlib.util.spec_from_file_location("_step_page", ROOT / "bench" / "train" / "_step_page.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def line(case, system, metric, median, *, run="r", device="NVIDIA H200", date="2026-11-30T20:00:00+00:00", low=None):
    spread = {"low": median if low is None else low, "high": median, "n": 1 if low is None else 8}
    return {"case": case, "system": system, "metric": metric, "median": median, "run": run, "device": device, "date": date, **spread}  # fmt: skip


def test_the_section_is_replaced_and_ratios_are_of_one_run(tmp_path):
    page = load()
    results, docs = tmp_path / "results", tmp_path / "docs"
    results.mkdir()
    docs.mkdir()
    target = docs / "performance.md"
    target.write_text(f"# Performance\n\n{page.BEGIN}\nold\n{page.END}\n\n## Next\n")
    assert page.write_page(results, docs) == 0
    assert page.EMPTY in target.read_text()
    case = "train/llama-8b/lora-bf16/doc-8192"
    lines = [
        line(case, "rft", "tokens_per_second", 1.0, date="2026-11-29T20:00:00+00:00"),
        line(case, "rft", "tokens_per_second", 15500.0, low=15400.0),
        line(case, "rft", "gib", 43.8),
        line(case, "unsloth", "tokens_per_second", 13763.0),
        line(case, "liger", "tokens_per_second", 11650.0, run="another"),
        line(case, "slow", "tokens_per_second", 5.0, device="some CPU, 2 cores"),
        line("rope/16384", "rft", "ms", 0.0901),
        line("rope/16384", "liger", "ms", 0.1802),
        line("rope/16384", "torch", "ms", 0.05, run="another"),
        line("rope/16384", "floor", "ms", 0.08),
        line("train/smollm2-135m/lora-fp8/curve-200-steps", "rft", "percent_of_20_step_means", 0.8, low=0.1),
        line("plan/8b-lora-8k", "rft", "gib planned", 43.73),
        line("plan/8b-lora-8k", "rft", "gib", 43.87),
        line("plan/8b-lora-8k", "rft", "tokens_per_second planned", 15384.0),
        line("plan/8b-lora-8k", "rft", "tokens_per_second", 15263.0),
        {"case": case, "system": "broken", "error": "does not start", "device": "NVIDIA H200"},
    ]
    (results / "a.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    for _ in range(2):
        assert page.write_page(results, docs) == 0
    text = target.read_text()
    assert text.startswith("# Performance\n\n<!-- steps")
    assert text.endswith("<!-- /steps -->\n\n## Next\n")
    assert "| llama-8b/lora-bf16/doc-8192 | rft | 15,500 (15,400 to 15,500) | 43.8 |  |" in text
    assert "| llama-8b/lora-bf16/doc-8192 | unsloth | 13,763 |  | 1.13 |" in text
    assert "| llama-8b/lora-bf16/doc-8192 | liger | 11,650 |  |  |" in text  # of another run
    assert "slow" not in text
    assert "| rope/16384 | 0.090 | 0.080 | liger 0.180 | 2.00 |" in text
    assert "| 8b-lora-8k | 43.73 | 43.87 | 15,384 | 15,263 |" in text
    assert "`smollm2-135m/lora-fp8/curve-200-steps`: 20 step means differ from bf16's by at most 0.80 %" in text
    target.write_text("# Performance\n")
    assert page.write_page(results, docs) == 1
