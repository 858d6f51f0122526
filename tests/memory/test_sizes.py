"""The byte model against live tensors of whole models at real widths, without their memory: fake tensors go through autograd and our
registered operations as real ones do. Parameters and optimizer states are compared exactly, on a real small model."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from rft import quant
from rft.adapters.lora import inject, train_everything
from rft.config.adapter import LoraConfig
from rft.config.optim import AdamWConfig
from rft.losses import SftLoss
from rft.memory.plan import MemoryPlan, Recompute
from rft.memory.recompute import apply_recompute
from rft.memory.sizes import (
    Problem,
    backward_bytes,
    branch_parts_bytes,
    layer_bytes,
    loss_gradient_bytes,
    sizes,
    state_bytes,
)
from rft.memory.tiled_mlp import apply_tiled_mlp
from rft.models import surgery
from rft.models.attention import install_attention, register
from rft.models.backbone import Backbone, decoder_layers
from rft.models.describe import describe
from rft.models.head import Head
from rft.models.receipts import Receipts
from rft.optim import BUILDERS
from rft.training.trainee import Trainee
from support.live_bytes import LiveBytes
from support.rows import packed_batch, random_documents

TOKENS = 4096
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-8b": ("LlamaConfig", {
        "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 128256,
    }),
    "llama-1b": ("LlamaConfig", {
        "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
        "vocab_size": 128256, "tie_word_embeddings": True,
    }),
    "qwen3-4b": ("Qwen3Config", {
        "hidden_size": 2560, "intermediate_size": 9728, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 151936, "tie_word_embeddings": True,
    }),
    "gemma3-1b": ("Gemma3TextConfig", {
        "hidden_size": 1152, "intermediate_size": 6912, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256,
        "vocab_size": 262144, "sliding_window": 8192,
    }),
}  # fmt: skip


@pytest.fixture
def believed(monkeypatch) -> None:
    """Swaps are taken without comparing: numbers do not matter here, and the interpreter would take minutes for them."""

    def first(module: Any, matcher: Any, device: Any) -> Any:
        found = matcher.candidates(module)
        return surgery._Verdict(None, {}, found) if isinstance(found, str) else surgery._Verdict(found[0], {})

    monkeypatch.setattr(surgery, "_verify", first)
    # a fake tensor is no plain one by its class
    monkeypatch.setattr(quant, "held", lambda linear: None if linear.weight.requires_grad else linear.weight)


def build(shape: str, *, lora: bool, kernels: bool, layers: int = 4) -> tuple[Any, Problem]:
    """On meta, swapped, with attention a call a document. bf16; plain torch in fp32, since a CPU's rms_norm keeps fp32 copies of bf16."""
    import transformers

    register()
    dtype = torch.bfloat16 if kernels else torch.float32
    kind, sizes_ = SHAPES[shape]
    config = getattr(transformers, kind)(**sizes_, num_hidden_layers=layers, max_position_embeddings=8192)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="rft", dtype=dtype)
    model = inject(model, LoraConfig(r=16), dtype=dtype) if lora else train_everything(model, dtype=dtype)
    facts = describe(model)
    surgery.apply_swaps(model, Receipts(), kernels=kernels)
    problem = Problem(
        facts, seq_len=TOKENS, packs=1, memory_bytes=1 << 40, kernels=kernels, trained_in_full=not lora, itemsize=dtype.itemsize,
        master_itemsize=dtype.itemsize,
    )  # fmt: skip
    return model, problem


def measured(model: Any, recompute: Recompute, *, kernels: bool, tiles: int = 1) -> tuple[int, int, int]:
    """(bytes alive behind the forward pass, most during the backward one, alive behind that while the loss is) of one micro-batch of one
    document."""
    attention = install_attention(model, "sdpa")
    layers = list(decoder_layers(model))
    if tiles > 1:
        apply_tiled_mlp(layers, tiles)
    apply_recompute(layers, recompute)
    batch = packed_batch(*random_documents(TOKENS, vocabulary=1000))
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        model.to_empty(device="cpu")
        head = Head(model, chunk_rows=512, kernels=kernels)
        trainee = Trainee(model, Backbone(model, attention), head, SftLoss()).train()
        names = ("input_ids", "labels", "position_ids", "cu_seqlens")
        batch = dataclasses.replace(batch, **{n: fake.from_tensor(getattr(batch, n)) for n in names})
        with LiveBytes() as live:
            loss = trainee(batch)["next_token"]
            kept = live.now()
            live.peak = 0
            loss.backward()
            left = live.now()
    return kept, live.peak, left


def slow(*case: Any) -> Any:
    return pytest.param(*case, marks=pytest.mark.slow)


CASES = [
    ("llama-8b", True, True), slow("llama-8b", True, False), slow("llama-1b", False, True), slow("llama-1b", False, False),
    slow("qwen3-4b", True, True), slow("qwen3-4b", False, True), slow("gemma3-1b", True, True),
]  # fmt: skip


@pytest.mark.usefixtures("believed")
@pytest.mark.parametrize(
    ("recompute", "tiles"),
    [("none", 1), (3, 1), ("full", 1), ("selective", 1), ("full", 4), ("none", 4)],
    ids=["none", "every 3", "full", "selective", "full, tiles", "tiles"],
)
@pytest.mark.parametrize(("shape", "lora", "kernels"), CASES)
def test_activations_and_peak_are_those_that_live(shape, lora, kernels, recompute, tiles):
    model, problem = build(shape, lora=lora, kernels=kernels)
    kept, peak, left = measured(model, recompute, kernels=kernels, tiles=tiles)
    moments = sizes(problem, MemoryPlan(recompute=recompute, tiled_mlp=tiles, chunk_rows=512, micro_batch=1)).moments
    modelled = moments["loss"]["activations"] + loss_gradient_bytes(problem, TOKENS)
    assert modelled == pytest.approx(kept, rel=0.02)
    # what is there before the forward pass, and what a registered operation has for itself alone, is not seen here
    own = ("weights", "adapter", "optimizer")
    most = max(sum(v for k, v in moments[m].items() if k not in own) for m in moments if m != "loss")
    assert most - branch_parts_bytes(problem, math.ceil(TOKENS / tiles)) == pytest.approx(peak, rel=0.06)
    if not kernels:  # plain torch's loss holds the gradients that it made until the graph is gone
        return
    # layers let go of everything as the pass goes back: gradients are left
    gradients = sum(p.grad.numel() * p.grad.element_size() for p in model.parameters() if p.grad is not None)
    assert left < gradients + TOKENS * problem.facts.hidden_size * problem.itemsize


@pytest.mark.usefixtures("believed")
def test_pieces_of_a_trained_mlp_take_what_is_planned_for_them():
    """Of the piece before, only the fp32 sums are left when the next one is widest: gate, up and the gradients of both and of their product."""
    model, problem = build("llama-1b", lora=False, kernels=True, layers=1)
    (layer,) = decoder_layers(model)
    apply_tiled_mlp([layer], 2)
    mlp: Any = layer.mlp
    with FakeTensorMode(allow_non_fake_inputs=True):
        mlp.to_empty(device="cpu")
        x = torch.empty(1, 4 * TOKENS, 2048, dtype=torch.bfloat16, requires_grad=True)
        with LiveBytes() as live:
            out = mlp(x)
            given = torch.empty_like(out)
            live.peak = 0
            out.backward(given)
    # beside: output and given gradient, and the piece's own of both; in a step the final norm's input is gone by then, which is planned
    streams = 3 * out.nbytes
    assert live.peak - streams == pytest.approx(backward_bytes(problem, 4 * TOKENS, 2), rel=0.02)


@pytest.mark.usefixtures("believed")
def test_an_architecture_keeps_what_its_norms_read():
    """Gemma norms the outputs of attention and MLP too, Qwen 3 its queries and keys."""
    tokens = 10
    for shape, norms in (("llama-8b", 2 * 4096), ("qwen3-4b", 2 * 2560 + 40 * 128), ("gemma3-1b", 4 * 1152 + 5 * 256)):
        _, problem = build(shape, lora=True, kernels=True, layers=1)
        assert layer_bytes(problem, tokens)["norms"] == tokens * norms * 2


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_states_are_counted_exactly(lora):
    """Weights, copies, masters and moments of a real model behind its first step."""
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model = inject(model, LoraConfig(r=4)) if lora else train_everything(model)
    facts = describe(model)
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    optimizer = BUILDERS[AdamWConfig](named, AdamWConfig(lr=1e-3), compute_dtype=torch.bfloat16)
    for _, parameter in named:
        parameter.grad = torch.zeros(parameter.shape)
    optimizer.step()
    problem = Problem(facts, seq_len=1, packs=1, memory_bytes=0, kernels=False, trained_in_full=not lora, itemsize=2)
    got = state_bytes(problem)
    moments = sum(t.nbytes for n, t in optimizer.named_state().items() if not n.endswith("::step"))
    assert got["weights"] == sum(p.nbytes for p in model.parameters() if not lora or not p.requires_grad)
    assert got["adapter"] == (sum(p.nbytes for _, p in named) if lora else 0)
    assert got["gradients"] == sum(p.grad.nbytes for _, p in named)
    assert got["optimizer"] == moments + sum(m.nbytes for m in optimizer.named_masters().values())
    halved = state_bytes(dataclasses.replace(problem, shards=2))
    assert halved["gradients"] == got["gradients"] // 2
