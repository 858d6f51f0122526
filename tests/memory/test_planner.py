"""The byte model against what autograd keeps, and the choices that follow from it."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from rft.config.root import Config
from rft.memory import planner
from rft.memory.planner import GIB, Problem, bytes_of, layer_bytes, plan, seconds_of
from rft.models.attention import DocumentMask, Documents, install_attention, register
from rft.models.backbone import decoder_layers
from rft.models.describe import Facts, describe
from rft.models.receipts import Receipts
from rft.models.surgery import apply_swaps
from rft.training.machine import Machine
from rft.training.resolve import memory_problem, resolve, resolve_precision

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


def problem(facts: Facts = LLAMA_8B, **changes) -> Problem:
    made = Problem(
        facts=facts, state_bytes=int(facts.weight_bytes + 16 * facts.num_trained), gathered_bytes=0, seq_len=8192, packs=4,
        memory_bytes=139 * GIB, kernels=True, trained_in_full=False, itemsize=2, chunk_rows=4096, peak_flops=989e12,
    )  # fmt: skip
    return dataclasses.replace(made, **changes)


@pytest.mark.parametrize(
    ("lora", "kernels"), [(True, True), (True, False), pytest.param(False, True, marks=pytest.mark.slow), (False, False)],
    ids=["lora, kernels", "lora, plain", "full, kernels", "full, plain"],
)  # fmt: skip
def test_the_byte_model_of_a_layer_is_what_autograd_keeps(lora, kernels):
    import transformers
    from peft import LoraConfig, get_peft_model

    register()
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="rft", dtype=torch.float32)
    if lora:
        names = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and "layers" in n]
        model = get_peft_model(model, LoraConfig(r=1, target_modules=names), autocast_adapter_dtype=False)
    facts = describe(model)
    if kernels:
        apply_swaps(model, Receipts(), kernels=True)
    install_attention(model, "sdpa")
    (layer,) = decoder_layers(model)
    tokens = 64
    x = torch.randn(1, tokens, 128, requires_grad=True)
    tables = torch.randn(2, 1, tokens, 32)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()} | {
        t.untyped_storage().data_ptr() for t in tables
    }
    kept: dict[int, int] = {}
    held = []

    def pack(tensor):
        held.append(tensor)  # so that no address is used twice
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = layer(
            x,
            position_embeddings=(tables[0], tables[1]),
            attention_mask=DocumentMask(Documents.from_lengths((tokens,))),
            use_cache=False,
        )
    assert out.requires_grad
    measured = sum(size for address, size in kept.items() if address not in weights)
    asked = problem(facts, kernels=kernels, trained_in_full=not lora, itemsize=4)
    modelled = sum(layer_bytes(asked, tokens).values())
    assert 0.95 * measured <= modelled <= 1.05 * measured, (measured, modelled)


def test_an_8b_lora_step_of_8192_tokens_is_near_what_kernels_md_counts():
    gib = sum(bytes_of(problem(packs=1), 1, "none").values()) / GIB
    assert 40 < gib < 50
    assert sum(layer_bytes(problem(), 1).values()) == 2 * (4 * 4096 + 2 * 4096 + 2 * 1024 + 2 * 14_336) + 32 * 4


def test_recompute_keeps_less_and_takes_longer():
    asked = problem()
    sizes = [sum(bytes_of(asked, 4, kind).values()) for kind in ("none", 4, 3, 2, "full")]
    times = [seconds_of(asked, 4, kind) for kind in ("none", 4, 3, 2, "full")]
    assert sizes == sorted(sizes, reverse=True)
    assert times == sorted(times)
    assert 1.2 < times[-1] / times[0] < 1.4


def test_a_small_model_gets_as_many_packs_as_end_its_waiting_for_launches():
    """SmolLM2-135M, 4,096 tokens a pack: one pack at a time left an H200 at an eighth of its speed."""
    asked = problem(SMOLLM, seq_len=4096, packs=8, chunk_rows=4096)
    chosen = plan(asked)
    assert chosen.chosen.micro_batch == 8
    assert chosen.chosen.recompute == "none"
    assert seconds_of(asked, 1, "none") > 4 * seconds_of(asked, 8, "none")
    assert "GiB" in chosen.why_micro_batch()


def test_a_large_model_fills_what_there_is_and_recomputes_only_where_it_must():
    roomy = plan(problem())
    assert roomy.fits
    assert roomy.chosen.recompute == "none"
    tight = plan(problem(memory_bytes=30 * GIB))
    assert tight.fits
    assert tight.chosen.recompute != "none"
    assert tight.chosen.total <= 30 * GIB * 0.94
    assert "without it" in tight.why_recompute()
    hopeless = plan(problem(memory_bytes=8 * GIB))
    assert not hopeless.fits
    assert hopeless.chosen.micro_batch == 1
    assert hopeless.chosen.recompute == "full"


def test_what_the_user_gives_is_kept_and_micro_batches_divide_the_step():
    assert plan(problem(micro_batch=2)).chosen.micro_batch == 2
    assert plan(problem(recompute="full")).chosen.recompute == "full"
    for packs in (6, 7):
        assert packs % plan(problem(packs=packs, memory_bytes=60 * GIB)).chosen.micro_batch == 0
    assert {c.recompute for c in planner.choices(problem(can_recompute=False))} == {"none"}


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
    assert made.memory.recompute == "full"
    limited, _ = decide(config(data={"seq_len": 8192}, memory={"limit": 24.0}), H200, LLAMA_8B)
    assert limited.memory.recompute == "full"


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
    asked = memory_problem(made, LLAMA_8B, two, kernels=True, can_recompute=True, one_pack=False)
    alone = memory_problem(made, LLAMA_8B, H200, kernels=True, can_recompute=True, one_pack=False)
    assert asked.state_bytes == alone.state_bytes // 2
    assert asked.gathered_bytes > 0
    assert asked.packs == 2
