"""The scaling bench: equal losses on 1, 2 and 4 ranks and for runs that go on with fewer; and what it makes of its figures."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "bench" / "train" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def measured(tmp_path: Path, *options: str) -> list[dict]:
    """Lines of `scaling.py --tiny`."""
    results = tmp_path / "results.jsonl"
    command = [sys.executable, "-P", "bench/train/scaling.py", "--tiny", "--results", str(results), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in results.read_text().splitlines()]


@pytest.mark.slow
def test_twenty_steps_are_the_same_on_1_2_and_4_ranks_and_after_going_on_with_fewer(tmp_path):
    lines = measured(tmp_path, "--ranks", "1", "2", "4", "--parts", "parity")
    errors = {line["case"]: line["median"] for line in lines}
    both = [f"scaling-tiny/parity/full-fp32-{mode}" for mode in ("replicate", "shard")]
    assert set(errors) == {f"{case}/{how}" for case in both for how in ("on-2", "on-4", "resumed-on-1", "resumed-on-2")}
    assert max(errors.values()) <= 1e-5


def test_other_losses_are_told_from_equal_ones():
    scaling = load("scaling")
    assert scaling.largest_error([2.0, 1.0], [2.0, 1.0]) == 0
    assert scaling.largest_error([2.0, 1.1], [2.0, 1.0]) == pytest.approx(0.1)
    assert scaling.largest_error([2.0], [2.0, 1.0]) == float("inf")
    assert scaling.largest_error([float("nan")], [1.0]) == float("inf")


def test_time_that_only_communication_takes_is_what_it_does_not_share():
    covered = load("_scaling_ranks").covered
    talking, computing = [(0, 4), (3, 6), (10, 12)], [(2, 5), (11, 20)]
    assert covered(talking) == 8
    assert covered(talking + computing) - covered(computing) == (2 + 1) + 1  # 0-2, 5-6, 10-11


def lines_of(ranks: int, ours: float, theirs: float | None, wait_ms: float) -> list[dict]:
    case = f"scaling/{ranks}/llama-1b/full-bf16/doc-8192"
    made = [("rft", "tokens_per_second", ours), ("rft", "gib", 30.0), ("rft", "wait_ms", wait_ms)]
    if ranks > 1:
        made.append(("rft", "percent_of_one_gpu", 95.5))
    if theirs is not None:
        made.append(("transformers+fsdp2", "tokens_per_second", theirs))
    common = {"case": case, "device": "8x NVIDIA H200", "date": "2026-11-30T20:00:00+00:00", "run": "r"}
    return [{**common, "system": system, "metric": metric, "median": value} for system, metric, value in made]


def test_the_page_says_what_the_lines_say_and_replaces_its_section(tmp_path):
    page = load("_scaling_page")
    results, docs = tmp_path / "results", tmp_path / "docs"
    results.mkdir()
    docs.mkdir()
    (docs / "performance.md").write_text("# Performance\n\nText before.\n")
    page.write_page(results, docs)
    assert "No figure is stored yet" in (docs / "performance.md").read_text()
    lines = lines_of(1, 60000, None, 0) + lines_of(2, 57300, 45000, 20.0)
    old = {**lines[0], "median": 1.0, "date": "2026-11-29T20:00:00+00:00"}
    (results / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*lines, old]))
    page.write_page(results, docs)
    page.write_page(results, docs)
    text = (docs / "performance.md").read_text()
    assert "No figure is stored yet" not in text
    assert text.startswith("# Performance\n\nText before.\n")
    assert text.count("## Several GPUs") == 1
    assert "| llama-1b/full-bf16, doc-8192 | 1 | 60,000 |" in text
    # 20 ms of 8192 / 57,300 s = 143 ms
    assert "| 57,300 | 95.5 % | 30.0 GiB | transformers+fsdp2 45,000 | 1.27x | waits 14% of a step for others |" in text
    assert (docs / "scaling.svg").read_text().startswith("<?xml")
