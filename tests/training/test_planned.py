"""What was planned is told when a run starts, kept beside it, and compared with what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

from rft.memory import planner
from rft.memory.devices import find_gpu
from rft.memory.plan import MemoryPlan
from rft.memory.speed import Machinery
from rft.models.describe import Facts
from rft.training.finish import compare_with_plan
from rft.training.headline import expected

FACTS = Facts(
    name="LlamaForCausalLM", model_type="llama", num_layers=16, hidden_size=2048, vocab_size=128_256, max_positions=131_072,
    num_parameters=1_235_000_000, num_trained=11_000_000, weight_bytes=2_470_000_000, trained_bytes=44_000_000,
    matmul_frozen=1_235_000_000, matmul_trained=11_000_000, num_heads=32, head_size=64, is_moe=False, num_experts=0,
    experts_per_token=0, is_tied=True, num_kv_heads=8, intermediate_size=8192,
)  # fmt: skip


def planned(plan: MemoryPlan) -> planner.Planned:
    problem = planner.Problem(
        FACTS,
        seq_len=8192,
        packs=4,
        memory_bytes=80 << 30,
        kernels=True,
        trained_in_full=False,
        itemsize=2,
        attention="fa4",
    )
    return planner.planned(problem, plan, planner.Given(tiled_mlp=1), Machinery(find_gpu("H100").rates))


def test_the_plan_line_says_memory_speed_and_time():
    made = planned(MemoryPlan(recompute=2, micro_batch=4))
    words = expected(made, 8, 100)
    assert words[0] == "recompute every 2"
    assert words[1].startswith("peak ")
    assert words[1].endswith(" GiB of 80")
    speed = f"{made.tokens_per_second * 8:,.0f} tok/s"
    assert words[2].startswith(f"about {speed}, ")
    moved = expected(planned(MemoryPlan(recompute="full", offload="cpu", tiled_mlp=4)), 1, 100)
    assert moved[:3] == ["recompute full", "offload to cpu", "MLPs in 4 tiles"]


def test_planned_and_measured_stand_beside_each_other_and_in_the_report(tmp_path: Path, capsys):
    from rft.report.page import _memory

    made = planned(MemoryPlan())
    run = SimpleNamespace(planned=made, world_size=2, run_dir=tmp_path)
    result = SimpleNamespace(memory_peak_bytes=7 << 30, tokens_per_second=1234.5)
    compare_with_plan(run, result)  # type: ignore[arg-type]
    told = capsys.readouterr().out
    assert f"{made.chosen.sizes.peak / 2**30:.1f} GiB, measured 7.0" in told
    assert "measured 1,23" in told
    kept = json.loads((tmp_path / "plan.json").read_text())
    assert kept["measured"] == {"peak_bytes": 7 << 30, "tokens_per_second": 1234.5, "ranks": 2}
    assert kept["planned"]["peak_bytes"] == sum(kept["planned"]["allocated"].values())
    page = _memory(SimpleNamespace(plan=kept))  # type: ignore[arg-type]
    assert "7.0 GiB" in page
    assert "activations" in page
    compare_with_plan(SimpleNamespace(planned=None), result)  # type: ignore[arg-type]
