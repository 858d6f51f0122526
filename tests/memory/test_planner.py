"""The choices that follow from the byte and time models: what is fastest among what fits, and what is said about it."""

from __future__ import annotations

import dataclasses

import pytest

from rft.config.root import Config
from rft.memory import planner
from rft.memory.devices import find_gpu
from rft.memory.plan import MemoryPlan, config_with
from rft.memory.planner import GIB, Given, Planned, Problem
from rft.memory.sizes import layer_bytes, sizes
from rft.memory.speed import Machinery, seconds
from rft.models.facts import Facts
from rft.training.machine import Machine
from rft.training.resolve import memory_problem, planned_for, resolve, resolve_precision

LLAMA_8B = Facts(
    name="LlamaForCausalLM", model_type="llama", num_layers=32, hidden_size=4096, vocab_size=128_256, max_positions=131_072,
    num_parameters=8_030_000_000, num_trained=42_000_000, weight_bytes=16_060_000_000, trained_bytes=168_000_000,
    matmul_frozen=7_500_000_000, matmul_trained=42_000_000, num_heads=32, head_size=128, is_moe=False, num_experts=0,
    experts_per_token=0, is_tied=False, num_kv_heads=8, intermediate_size=14_336,
)  # fmt: skip
SMOLLM = dataclasses.replace(
    LLAMA_8B, num_layers=30, hidden_size=576, vocab_size=49_152, num_parameters=134_500_000, num_trained=4_900_000,
    weight_bytes=269_000_000, matmul_frozen=134_000_000, matmul_trained=4_900_000, num_heads=9, head_size=64, num_kv_heads=3,
    intermediate_size=1536, max_positions=8192, is_tied=True,
)  # fmt: skip
H200 = Machine("cuda", "NVIDIA H200", 139 * GIB, 1, True, 16)
SMALL_GPU = Machine("cuda", "NVIDIA RTX 4090", 24 * GIB, 1, True, 16)


MACHINERY = Machinery(find_gpu("H200").rates)


def problem(facts: Facts = LLAMA_8B, **changes) -> Problem:
    made = Problem(
        facts=facts, seq_len=8192, packs=4, memory_bytes=139 * GIB, kernels=True, trained_in_full=False, itemsize=2, attention="fa4",
    )  # fmt: skip
    return dataclasses.replace(made, **changes)


def plan(asked: Problem, **given) -> Planned:
    return planner.plan(asked, Given(**{"tiled_mlp": 1} | given), MACHINERY)


def total(asked: Problem, **plan_) -> int:
    return sizes(asked, MemoryPlan(**plan_)).total


def time_of(asked: Problem, **plan_) -> float:
    return seconds(asked, MemoryPlan(**plan_), MACHINERY).step


def test_an_8b_lora_step_of_8192_tokens_is_near_what_kernels_md_counts():
    asked = problem(packs=1)
    assert 42 < sizes(asked, MemoryPlan()).peak / GIB < 47
    assert 15_000 < 8192 / time_of(asked) < 16_300  # the limit of targets.md
    kept = sum(layer_bytes(problem(), 1).values())
    assert kept == 2 * (4 * 4096 + 2 * 4096 + 2 * 1024 + 2 * 14_336) + 32 * 4


def test_recompute_keeps_less_and_takes_longer():
    asked = problem()
    kinds = ("none", 4, 3, 2, "full")
    bytes_ = [total(asked, micro_batch=4, recompute=kind) for kind in kinds]
    times = [time_of(asked, micro_batch=4, recompute=kind) for kind in kinds]
    assert bytes_ == sorted(bytes_, reverse=True)
    assert times == sorted(times)
    assert 1.35 < times[-1] / times[0] < 1.45  # Unsloth 1.41, Liger 1.41 (kernels.md)
    assert total(asked, recompute="full") < total(asked, recompute="selective") < total(asked)
    # attention is not run twice, which is what long documents pay for
    long = problem(seq_len=131_072, packs=1)
    assert time_of(long, recompute="selective") < 0.92 * time_of(long, recompute="full")


def test_offload_and_tiles_take_memory_from_the_gpu_and_count_where_it_goes():
    asked = problem(seq_len=65_536, packs=1)
    plain = sizes(asked, MemoryPlan(recompute="full"))
    moved = sizes(asked, MemoryPlan(recompute="full", offload="cpu"))
    layer = moved.host // LLAMA_8B.num_layers  # all have a place there; of two at a time something is on the GPU
    assert moved.host - 2 * layer == plain.allocated["activations"] - moved.allocated["activations"] > 10 * GIB
    on_disk = sizes(asked, MemoryPlan(recompute="full", offload="disk"))
    assert on_disk.disk == moved.host
    assert on_disk.host < moved.host
    tiled = sizes(asked, MemoryPlan(recompute="full", tiled_mlp=8))
    assert tiled.peak < plain.peak - 5 * GIB
    # copies hide behind 8B layers of 64k tokens, those to a disk of 1.1 GB/s do not
    assert time_of(asked, recompute="full", offload="cpu") < 1.03 * time_of(asked, recompute="full")
    assert time_of(asked, recompute="full", offload="disk") > 1.5 * time_of(asked, recompute="full")


def test_weights_on_the_host_leave_three_layers_and_the_ends_on_the_gpu():
    facts = dataclasses.replace(LLAMA_8B, num_trained=LLAMA_8B.num_parameters)
    ends = 2 * facts.vocab_size * facts.hidden_size
    layers = 2 * (facts.num_parameters - ends)
    for asked in (problem(packs=1), problem(facts, packs=1, trained_in_full=True, master_itemsize=2, moment_bytes=2.0)):
        here = sizes(asked, MemoryPlan(recompute="full"))
        away = sizes(asked, MemoryPlan(recompute="full", offload_weights="cpu"))
        assert here.peak - away.peak == layers * 29 // 32
        assert away.host == layers
        times = [seconds(asked, MemoryPlan(recompute="full", offload_weights=w), MACHINERY) for w in ("none", "cpu")]  # type: ignore[arg-type]
        assert 0 < times[1].parts["fetching weights"] == pytest.approx(times[1].step - times[0].step)
    made = plan(problem(packs=1, memory_bytes=12 * GIB), offload_weights="cpu")
    assert made.fits
    assert made.chosen.plan.recompute in ("full", "selective")
    assert made.chosen.plan.recompute_layers is None


def test_gradients_of_one_micro_batch_stay_in_the_compute_type_but_for_the_head():
    facts = dataclasses.replace(LLAMA_8B, num_trained=LLAMA_8B.num_parameters)
    asked = problem(facts, trained_in_full=True)
    head = facts.vocab_size * facts.hidden_size
    at_once = sizes(asked, MemoryPlan(micro_batch=4)).moments["embedding"]["gradients"]
    assert at_once == 2 * (facts.num_trained - head) + 4 * head
    assert sizes(asked, MemoryPlan(micro_batch=1)).moments["embedding"]["gradients"] == 4 * facts.num_trained
    largest = sizes(asked, MemoryPlan(micro_batch=4, in_backward=True)).moments["embedding"]["gradients"]
    assert largest == 4 * head


def test_a_quantised_base_takes_what_its_format_takes():
    facts = dataclasses.replace(LLAMA_8B, linear_frozen=6_979_321_856, largest_linear=4096 * 14_336)
    held = {
        base: sizes(problem(facts, base=base), MemoryPlan(recompute="full")).allocated["weights"]
        for base in ("bf16", "nf4", "int8")
    }
    left = (LLAMA_8B.num_parameters - facts.linear_frozen) * 2
    assert held["bf16"] == 2 * LLAMA_8B.num_parameters
    assert held["nf4"] == pytest.approx(left + facts.linear_frozen * (0.5 + 1 / 64 + 4 / 16384), rel=1e-9)
    assert held["int8"] == pytest.approx(left + facts.linear_frozen, rel=1e-2)
    assert time_of(problem(facts, base="nf4")) > time_of(problem(facts))


def test_a_small_model_gets_as_many_packs_as_end_its_waiting_for_launches():
    """SmolLM2-135M, 4,096 tokens a pack: one pack at a time left an H200 at an eighth of its speed."""
    asked = problem(SMOLLM, seq_len=4096, packs=8)
    chosen = plan(asked)
    assert chosen.chosen.plan.micro_batch == 8
    assert chosen.chosen.plan.recompute == "none"
    assert time_of(asked) > 4 * time_of(asked, micro_batch=8)
    assert "GiB" in chosen.why_micro_batch()
    assert seconds(asked, MemoryPlan(), MACHINERY).bound_by == "launches of the host"
    # with PEFT's own modules as measured: 15,000 tok/s
    plain = dataclasses.replace(asked, kernels=False, packs=1)
    assert 4096 / time_of(plain) == pytest.approx(15_000, rel=0.01)


def test_a_large_model_fills_what_there_is_and_recomputes_only_where_it_must():
    roomy = plan(problem())
    assert roomy.fits
    assert roomy.chosen.plan.recompute == "none"
    tight = plan(problem(memory_bytes=30 * GIB))
    assert tight.fits
    assert tight.chosen.plan.recompute != "none"
    assert tight.chosen.total <= 30 * GIB
    assert "without it" in tight.why_recompute()
    hopeless = plan(problem(memory_bytes=8 * GIB))
    assert not hopeless.fits
    assert hopeless.chosen.plan.micro_batch == 1
    assert hopeless.chosen.plan.recompute == "full"
    assert hopeless.cheaper() is None


def test_as_few_layers_as_fit_are_computed_again_or_moved():
    asked = problem(seq_len=65_536, packs=1)
    made = plan(asked).chosen
    assert made.plan.recompute == "selective"
    assert 1 < made.plan.recompute_layers < 32
    one_less = MemoryPlan(recompute="selective", recompute_layers=made.plan.recompute_layers - 1)
    assert made.total <= asked.memory_bytes < sizes(asked, one_less).total
    tight = plan(problem(packs=1, memory_bytes=34 * GIB), offload=None, tiled_mlp=1).chosen
    assert tight.plan.offload == "cpu"
    assert 1 < tight.plan.offload_layers < 32
    # copies of so few layers run beside the work of the others, those of all would not
    assert tight.times.parts["waiting for copies"] < 0.01
    assert time_of(problem(packs=1), offload="cpu") > 1.3 * tight.seconds
    assert tight.seconds < 1.05 * time_of(problem(packs=1))


def test_fewer_logits_are_taken_where_that_is_what_it_takes():
    facts = dataclasses.replace(LLAMA_8B, num_layers=2, num_parameters=1_500_000_000)
    loose, tight = (
        plan(problem(facts, packs=1, memory_bytes=int(gib * GIB)), least_loss=True, recompute="none")
        for gib in (40, 6.6)
    )
    assert loose.chosen.plan.chunk_rows == 4096
    assert tight.fits
    assert tight.chosen.plan.chunk_rows == "least"
    assert "GiB" in tight.why_chunk_rows()


def test_alternatives_and_the_next_cheaper_plan_are_told_with_their_cost():
    planned = plan(problem())
    first, second = planned.nearest()
    assert "-" in first
    assert "% slower" in first
    assert first != second
    cheaper = planned.cheaper()
    assert cheaper is not None
    assert cheaper.micro_batch == planned.chosen.plan.micro_batch
    assert sizes(planned.problem, cheaper).total <= 0.9 * planned.chosen.total
    assert planned.cheapest_change().startswith("set memory.recompute = ")
    assert planned.largest()[0][0] == "activations"


def test_what_the_user_gives_is_kept_and_micro_batches_divide_the_step():
    assert plan(problem(), micro_batch=2).chosen.plan.micro_batch == 2
    assert plan(problem(), recompute="full").chosen.plan.recompute == "full"
    for packs in (6, 7):
        assert packs % plan(problem(packs=packs, memory_bytes=60 * GIB)).chosen.plan.micro_batch == 0
    assert {c.plan.recompute for c in planner.choices(problem(), Given(can_recompute=False), MACHINERY)} == {"none"}
    assert planner.divisors(36) == [1, 2, 3, 4, 6, 9, 12, 18, 36]


def test_the_plan_lies_in_the_resolved_config():
    made = config(memory={"recompute": 2}, loss={"chunk_rows": 512}, train={"micro_batch": 4})
    read = MemoryPlan.of(made)
    assert (read.recompute, read.chunk_rows, read.micro_batch) == (2, 512, 4)
    again = config_with(made, dataclasses.replace(read, recompute="full", micro_batch=1))
    assert MemoryPlan.of(again) == dataclasses.replace(read, recompute="full", micro_batch=1)


# ---- through resolve


def config(**tables) -> Config:
    data = {"train": [{"path": "d"}], **tables.pop("data", {})}
    return Config.model_validate({"model": {"path": "m"}, "data": data, **tables})


def decide(made: Config, machine: Machine, facts: Facts, **options):
    made, _ = resolve_precision(made, machine)
    made, decisions = resolve(
        made, facts, machine, attention=("varlen", "serves"), chunk_rows=4096, store="/sets", kernels=True, **options
    )
    return made, {d.key: d.reason for d in decisions}


def test_auto_is_decided_on_a_gpu_with_the_bytes_as_its_reason():
    made, reasons = decide(config(data={"seq_len": 4096}), H200, SMOLLM)
    assert (made.train.micro_batch, made.memory.recompute) == (8, "none")
    assert "GiB" in reasons["train.micro_batch"]
    assert "GiB" in reasons["memory.recompute"]
    made, _ = decide(config(data={"seq_len": 8192}), SMALL_GPU, LLAMA_8B)
    assert made.memory.recompute in ("selective", "full")
    limited, _ = decide(config(data={"seq_len": 8192}, memory={"limit": 24.0}), H200, LLAMA_8B)
    assert limited.memory.recompute in ("selective", "full")


@pytest.mark.parametrize(
    ("tables", "options", "why"),
    [
        ({"train": {"accumulate": 4}}, {}, "accumulate"),
        ({"data": {"packing": "none"}}, {}, "different lengths"),
        ({}, {"isolates": False}, "mixes documents"),
    ],
)
def test_one_pack_at_a_time_where_more_would_change_the_run(tables, options, why):
    made, reasons = decide(config(**tables), H200, SMOLLM, **options)
    assert made.train.micro_batch == 1
    assert why in reasons["train.micro_batch"]


def test_a_sharded_rank_holds_its_share_of_the_states():
    two = dataclasses.replace(H200, world_size=2)
    made, _ = decide(config(parallel={"data": "shard"}, adapter={"name": "none"}), two, LLAMA_8B)
    facts = dataclasses.replace(LLAMA_8B, num_trained=LLAMA_8B.num_parameters)
    shared, given, machinery = memory_problem(made, facts, two, kernels=True, can_recompute=True, one_pack=False)
    alone, *_ = memory_problem(made, facts, H200, kernels=True, can_recompute=True, one_pack=False)
    assert (shared.packs, alone.packs, given.micro_batch) == (2, 4, made.train.micro_batch)
    # fp32 shards are the masters, and copies exist only while a layer is gathered: 16 bytes a weight over two, against 18
    assert (
        sum(planner.sizes(shared, MemoryPlan()).allocated[k] for k in ("weights", "optimizer"))
        == 12 * facts.num_parameters // 2
    )
    assert (
        sum(planner.sizes(alone, MemoryPlan()).allocated[k] for k in ("weights", "optimizer"))
        == 14 * facts.num_parameters
    )
    assert seconds(shared, MemoryPlan(), machinery).parts["waiting for weights"] > 0


def test_what_ranks_send_each_other_is_a_category_of_its_own():
    alone = problem(trained_in_full=True)
    one = sizes(alone, MemoryPlan()).moments
    for ranks in ({"shards": 8}, {"replicas": 8}):
        several = sizes(dataclasses.replace(alone, **ranks), MemoryPlan()).moments
        assert "communication" not in one["loss"]
        assert one["backward"].get("communication", 0) == 0
        assert several["backward"]["communication"] == several["update"]["communication"] > 100 * 2**20
        assert several["backward"]["backward of a layer"] == one["backward"]["backward of a layer"]


def test_a_run_knows_what_was_planned_for_it():
    made, _ = decide(config(data={"seq_len": 4096}), H200, SMOLLM)
    planned = planned_for(made, SMOLLM, H200, kernels=True, can_recompute=True, isolates=True)
    planned = planner.again(planned, dataclasses.replace(planned.problem, label_share=0.5))
    assert planned.chosen.plan == MemoryPlan.of(made)
    assert planned.fits
    assert planned.problem.label_share == 0.5
    assert len(planned.alternatives) >= 5


def test_a_limit_is_of_tensors_and_the_context_is_beside_it():
    made, _ = decide(config(memory={"limit": 24.0}), H200, LLAMA_8B)
    limited, *_ = memory_problem(made, LLAMA_8B, H200, kernels=True, can_recompute=True, one_pack=False)
    assert (limited.memory_bytes, limited.context_bytes) == (24 * GIB, 0)
    above, *_ = memory_problem(
        config_with_limit(made, 500.0), LLAMA_8B, H200, kernels=True, can_recompute=True, one_pack=False
    )
    assert above.memory_bytes == H200.memory_bytes
    assert above.context_bytes > 0


def config_with_limit(made: Config, limit: float) -> Config:
    return made.model_copy(update={"memory": made.memory.model_copy(update={"limit": limit})})


def test_no_way_to_save_memory_is_taken_without_need():
    """Where launching bounds the step, plans that take less memory are as fast: none is chosen for that alone."""
    made = plan(problem(SMOLLM, seq_len=4096, packs=1, memory_bytes=80 * GIB), tiled_mlp=None, least_loss=True)
    assert any(a.seconds <= made.chosen.seconds and a.total < made.chosen.total for a in made.alternatives)
    assert made.chosen.plan == MemoryPlan(chunk_rows=4096)


def test_graphs_hold_what_launched_batches_cannot_use_and_go_without_recompute():
    asked = problem(packs=1)
    plain, graph = (sizes(dataclasses.replace(asked, graph=g), MemoryPlan()) for g in (False, True))
    assert graph.peak == plain.peak
    assert graph.beside["graph"] == plain.peak - sum(plain.allocated[k] for k in ("weights", "adapter", "optimizer"))
    for machine in (H200, SMALL_GPU):
        made, _ = decide(config(data={"seq_len": 8192}, train={"cuda_graph": True}), machine, LLAMA_8B)
        assert (made.memory.recompute, made.memory.offload) == ("none", "none")
        assert made.train.micro_batch == 1  # without a graph an H200 takes two
