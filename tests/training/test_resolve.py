"""Every `auto` is decided, with a reason; what cannot be had is refused before anything is loaded."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from rft.config.root import Config
from rft.errors import ConfigError
from rft.models.facts import Facts
from rft.training.machine import Machine
from rft.training.resolve import (
    plan_packs_per_step,
    plan_total_steps,
    replica_bytes,
    resolve,
    resolve_for_data,
    resolve_precision,
)

CPU = Machine("cpu", "AVX-512 BF16", 24 << 30, 1, True, 2)
OLD_CPU = dataclasses.replace(CPU, device_name="AVX2", bf16=False)
H200 = Machine("cuda", "NVIDIA H200", 139 << 30, 1, True, 16)
OLD_GPU = Machine("cuda", "Tesla T4", 15 << 30, 1, False, 8)
SMALL = Facts(
    name="LlamaForCausalLM",
    model_type="llama",
    num_layers=2,
    hidden_size=64,
    vocab_size=400,
    max_positions=2048,
    num_parameters=100_000,
    num_trained=1_000,
    weight_bytes=200_000,
    trained_bytes=4_000,
    matmul_frozen=90_000,
    matmul_trained=1_000,
    num_heads=4,
    head_size=16,
    is_moe=False,
    num_experts=0,
    experts_per_token=0,
    is_tied=False,
)


def config(**tables: dict[str, Any]) -> Config:
    return Config.model_validate({"model": {"path": "m"}, "data": {"train": [{"path": "d"}]}} | _merge(tables))


def _merge(tables: dict[str, dict[str, Any]]) -> dict[str, Any]:
    data = {"train": [{"path": "d"}], **tables.pop("data", {})}
    return {"data": data, **tables}


def decide(made: Config, machine: Machine = H200, facts: Facts = SMALL):
    made, first = resolve_precision(made, machine)
    made, rest = resolve(made, facts, machine, attention=("varlen", "serves it"), chunk_rows=512, store="/sets")
    made, last = resolve_for_data(made, machine, 400.0, facts.is_moe)
    return made, {d.key: d for d in [*first, *rest, *last]}


def test_no_auto_is_left_and_each_has_a_reason():
    made, decisions = decide(config())
    text = made.model_dump_json()
    nothing_to_scale = '"method":"auto"'
    for by_the_data in (nothing_to_scale, '"format":"auto"', '"resume":"auto"', '"end_of_turn":"auto"'):
        text = text.replace(by_the_data, "")
    assert '"auto"' not in text
    assert all(decision.reason for decision in decisions.values())
    for key, decision in decisions.items():
        node: Any = made
        for part in key.split("."):
            node = getattr(node, part)
        assert node == decision.value, key


def test_what_is_given_is_not_decided():
    given = config(optim={"lr": 3e-5}, train={"micro_batch": 4, "precision": "fp32"}, data={"seq_len": 77})
    made, decisions = decide(given)
    assert (made.optim.lr, made.train.micro_batch, made.train.precision, made.data.seq_len) == (3e-5, 4, "fp32", 77)
    assert not {"optim.lr", "train.micro_batch", "train.precision", "data.seq_len"} & decisions.keys()


@pytest.mark.parametrize(
    ("machine", "precision"), [(H200, "bf16"), (OLD_GPU, "fp32"), (CPU, "bf16"), (OLD_CPU, "fp32")], ids=str
)
def test_precision_is_bf16_where_the_device_computes_in_it(machine: Machine, precision: str):
    assert resolve_precision(config(), machine)[0].train.precision == precision


def test_bf16_on_a_card_without_it_is_refused_and_never_switched():  # BO-30
    with pytest.raises(ConfigError, match="Tesla T4 has no bf16"):
        resolve_precision(config(train={"precision": "bf16"}), OLD_GPU)


def test_bf16_masters_of_an_fp32_run_are_refused():
    with pytest.raises(ConfigError, match="computes in fp32"):
        resolve_precision(config(train={"precision": "fp32", "master": "bfloat16"}), H200)


@pytest.mark.parametrize(("adapter", "lr"), [("lora", 2e-4), ("none", 1e-5)])
def test_learning_rate_is_that_of_lora_or_of_full_fine_tuning(adapter: str, lr: float):
    assert decide(config(adapter={"name": adapter}))[0].optim.lr == lr


@pytest.mark.parametrize(("positions", "seq_len"), [(2048, 2048), (131_072, 8192), (None, 8192)])
def test_packs_are_as_long_as_the_model_allows_up_to_8192(positions: int | None, seq_len: int):
    facts = dataclasses.replace(SMALL, max_positions=positions)
    assert decide(config(), facts=facts)[0].data.seq_len == seq_len


def test_packs_longer_than_the_models_positions_are_refused():
    with pytest.raises(ConfigError, match="trained for 2,048 positions"):
        decide(config(data={"seq_len": 4096}))


def test_replicas_while_they_take_under_60_percent_and_shards_beyond():
    two = dataclasses.replace(H200, world_size=2)
    big = dataclasses.replace(SMALL, num_parameters=8 * 10**9, num_trained=40 * 10**6)
    assert decide(config(), two, big)[0].parallel.data == "replicate"
    full = dataclasses.replace(big, num_trained=big.num_parameters)
    made, decisions = decide(config(adapter={"name": "none"}), two, full)
    assert made.parallel.data == "shard"
    assert "134.1 GiB" in decisions["parallel.data"].reason  # 18 bytes a parameter


def test_replica_bytes_count_weights_masters_gradients_and_moments():
    trained = {"name": "none"}
    full = dataclasses.replace(SMALL, num_parameters=10, num_trained=10)
    bf16, _ = resolve_precision(config(adapter=trained), H200)
    fp32, _ = resolve_precision(config(adapter=trained, train={"precision": "fp32"}), H200)
    pure, _ = resolve_precision(config(adapter=trained, train={"master": "bfloat16"}), H200)
    assert [replica_bytes(made, full) for made in (bf16, fp32, pure)] == [
        180,
        160,
        120,
    ]  # moments are fp32 whatever the masters are


@pytest.mark.parametrize(
    ("length", "moe", "on"), [(400.0, False, True), (16_000.0, False, False), (400.0, True, False)]
)
def test_deterministic_is_on_for_short_documents_on_cuda(length: float, moe: bool, on: bool):
    made, _ = resolve_for_data(config(), H200, length, moe)
    assert made.train.deterministic is on


def test_final_is_the_best_checkpoint_under_early_stop():
    stops = config(train={"early_stop": {}}, data={"eval_fraction": 0.1})
    assert decide(stops)[0].checkpoint.final == "best"
    assert decide(config())[0].checkpoint.final == "last"


@pytest.mark.parametrize(
    ("train", "world_size", "packing", "packs", "accumulate"),
    [
        ({"accumulate": 4, "micro_batch": 1}, 1, "stream", 4, 4),
        ({"accumulate": 4, "micro_batch": 2}, 3, "stream", 24, 4),
        ({"tokens_per_step": 32_768, "micro_batch": 1}, 1, "stream", 32, 32),
        ({"tokens_per_step": 32_768, "micro_batch": 1}, 3, "stream", 33, 11),
        ({"tokens_per_step": 100, "micro_batch": 2}, 2, "stream", 4, 1),
        ({"tokens_per_step": 2_000, "micro_batch": 1}, 1, "none", 10, 10),
    ],
)
def test_packs_of_a_step(train: dict[str, Any], world_size: int, packing: str, packs: int, accumulate: int):
    made = config(train=train, data={"seq_len": 1024, "packing": packing})
    assert plan_packs_per_step(made, world_size, mean_pack_tokens=200.0) == (packs, accumulate)


@pytest.mark.parametrize(
    ("train", "steps"),
    [({}, 10), ({"epochs": 2.0}, 21), ({"epochs": 1.5}, 16), ({"epochs": 0.05}, 1), ({"max_steps": 7}, 7), ({"max_steps": 70}, 70)],
)  # fmt: skip
def test_total_steps(train: dict[str, Any], steps: int):
    assert plan_total_steps(config(train=train), lambda epoch: 10 + epoch) == steps


def test_a_third_of_three_steps_is_one_step():
    assert plan_total_steps(config(train={"epochs": 1 / 3}), lambda epoch: 3) == 1


@pytest.mark.parametrize("packing", ["stream", "none"])
def test_a_micro_batch_that_no_memory_holds_is_refused_before_anything_is_allocated(packing):
    with pytest.raises(ConfigError, match=r"train\.micro_batch = 1000000: .* tokens at one time") as raised:
        decide(
            config(train={"micro_batch": 10**6}, data={"packing": packing, "seq_len": 2048}),
            facts=dataclasses.replace(SMALL, hidden_size=10**6),
        )
    assert "train.tokens_per_step" in raised.value.do
    decide(config(train={"micro_batch": 1000}, data={"packing": packing}))


def test_numbers_that_overflow_an_integer_of_the_machine_are_out_of_range():
    from pydantic import ValidationError

    for key in ("micro_batch", "accumulate", "tokens_per_step"):
        for value in (2**62, 10**30, 0):
            with pytest.raises(ValidationError):
                config(train={key: value})


@pytest.mark.parametrize(
    ("memory", "words"),
    [
        ({"recompute": 3}, "memory.recompute = 3"),
        ({"recompute": 99}, "2 decoder layers"),
        ({"tiled_mlp": 100_000}, "memory.tiled_mlp = 100000"),
        ({"limit": 140.0}, "memory.limit = 140"),
        ({"offload": "cpu", "offload_keep": 1e6}, "memory.offload_keep"),
    ],
)
def test_numbers_that_this_model_or_gpu_cannot_mean_are_refused_by_their_key(memory, words):
    with pytest.raises(ConfigError, match=words):
        decide(config(memory=memory, data={"seq_len": 2048}, train={"micro_batch": 4}))
    kept = {key: value for key, value in memory.items() if key not in ("limit", "offload_keep")}
    if kept == memory:
        with pytest.raises(ConfigError, match=words):
            decide(config(memory=memory, data={"seq_len": 2048}, train={"micro_batch": 4}), CPU)


def test_the_largest_numbers_that_mean_something_are_taken():
    memory = {"recompute": 2, "tiled_mlp": 8192, "limit": 139.0}
    made, _ = decide(config(memory=memory, data={"seq_len": 2048}, train={"micro_batch": 4}))
    assert (made.memory.recompute, made.memory.tiled_mlp, made.memory.limit) == (2, 8192, 139.0)


@pytest.mark.parametrize(
    ("layers", "keep", "words"), [(2, None, "base_weights"), (8, 4, "keep_ends = 4"), (8, 1000, "keep_ends = 1000")]
)
def test_fp8_of_no_layer_at_all_is_refused(layers, keep, words):
    model = {"path": "m", "base_weights": "fp8"} | ({} if keep is None else {"keep_ends": keep})
    facts = dataclasses.replace(SMALL, num_layers=layers)
    with pytest.raises(ConfigError, match=words) as raised:
        decide(config(model=model), facts=facts)
    assert "none is left for FP8" in str(raised.value)
    assert decide(config(model=model | {"keep_ends": 0}), facts=facts)[0].model.keep_ends == 0
