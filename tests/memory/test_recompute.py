"""Layers that are computed again, and layers whose kept tensors lie elsewhere, give the same gradients and keep less."""

from __future__ import annotations

import dataclasses
import gc
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from rft.errors import Refused, TrainingError
from rft.memory import disk
from rft.memory.disk import DiskFile
from rft.memory.host_pool import HostPool
from rft.memory.offload import Offloader
from rft.memory.plan import offloaded, recomputed
from rft.memory.recompute import apply_recompute
from rft.models import attention_backends
from rft.models.attention import install_attention, register
from rft.models.backbone import Backbone, decoder_layers
from rft.models.head import Head
from rft.models.receipts import Receipts
from rft.models.surgery import apply_swaps
from support.families import build
from support.rows import packed_batch, random_documents

CPU = torch.device("cpu")


def test_every_nth_layer_counted_from_the_first():
    assert recomputed("none", 5) == []
    assert recomputed("full", 3) == recomputed("selective", 3) == [0, 1, 2]
    assert recomputed(2, 5) == [0, 2, 4]
    assert recomputed(4, 3) == [0]


def test_some_layers_are_spread_evenly_and_those_that_are_kept_whole_leave_first():
    assert recomputed("full", 8, 3) == [0, 2, 5]
    assert recomputed("full", 8, 8) == recomputed("full", 8, 99) == list(range(8))
    assert recomputed("none", 8, 3) == []
    assert offloaded([], 8, 4) == [0, 2, 4, 6]
    assert offloaded([0, 2, 5], 8, 2) == [1, 4]
    assert offloaded([0, 2, 5], 8, 6) == [0, 1, 3, 4, 6, 7]
    assert offloaded([0, 2, 5], 8) == list(range(8))


@dataclass
class Done:
    gradients: dict[str, Tensor]
    loss: float
    kept_bytes: int
    """That autograd kept of the forward, outside the offloader."""
    attention_calls: int
    offloader: Offloader | None


def step(
    recompute, *, kernels: bool = False, family: str = "llama", backend: str = "sdpa", dropout: float = 0.0, lora: bool = False,
    offloader: Offloader | None = None, micro_batches: int = 1, count: int | None = None,
) -> Done:  # fmt: skip
    """Gradients of packed batches through a tiny model, and what was kept of it."""
    register()
    torch.manual_seed(3)
    model = build(family, attention="rft").train()
    if dropout or lora:
        from rft.adapters.lora import initialise, inject
        from rft.config.adapter import LoraConfig

        config = LoraConfig(r=4, alpha=8.0, dropout=dropout)
        model = inject(model, config, dtype=torch.float32, base_id="", new_token_ids=[], receipts=Receipts())
        initialise(model, config, seed=0)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, generator=torch.Generator().manual_seed(len(name)))
    if kernels:
        apply_swaps(model, Receipts(), kernels=True)
    state = install_attention(model, backend)
    apply_recompute(list(decoder_layers(model)), recompute, offloader, count=count)
    calls = [0]
    original = attention_backends.BACKENDS[backend]

    def counted(*args):
        calls[0] += 1
        return original(*args)

    kept: dict[int, int] = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    attention_backends.BACKENDS[backend] = counted
    total = torch.zeros(())
    torch.manual_seed(5)
    try:
        for seed in range(micro_batches):
            batch = packed_batch(*random_documents(13, 5 + seed, 21))
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
                hidden, _ = Backbone(model, state)(batch)
            loss = Head(model).loss_sums(hidden, batch.labels)["next_token"]
            loss.backward()
            total += loss.detach()
    finally:
        attention_backends.BACKENDS[backend] = original
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return Done(gradients, float(total), sum(kept.values()), calls[0], offloader)


def assert_equal(got: Done, plain: Done) -> None:
    assert got.loss == plain.loss
    assert got.gradients.keys() == plain.gradients.keys()
    for name, gradient in plain.gradients.items():
        assert torch.equal(got.gradients[name], gradient), name


@pytest.mark.parametrize("kernels", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["plain", "kernels"])
def test_gradients_are_those_without_it_bit_for_bit_and_less_is_kept(kernels):
    plain = step("none", kernels=kernels)
    found = {how: step(how, kernels=kernels) for how in (2, "selective", "full")}
    for got in found.values():
        assert_equal(got, plain)
    assert found["full"].kept_bytes < found[2].kept_bytes < plain.kept_bytes
    assert found["full"].kept_bytes <= found["selective"].kept_bytes < plain.kept_bytes


@pytest.mark.parametrize("recompute", [2, "selective", "full"])
def test_dropout_draws_the_same_numbers_again(recompute):
    plain = step("none", dropout=0.3)
    assert_equal(step(recompute, dropout=0.3), plain)
    assert step("none", dropout=0.0).loss != plain.loss, "there is dropout"


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_every_adapter_gets_its_gradient_though_nothing_below_it_needs_one(recompute):  # BO-34
    plain, got = step("none", lora=True), step(recompute, lora=True)
    factors = [n for n in got.gradients if "lora_B" in n]
    assert factors
    assert all(float(got.gradients[n].abs().max()) > 0 for n in factors)
    assert not any("embed" in n for n in got.gradients)
    assert_equal(got, plain)


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3", "phi3", "gpt_oss"])
def test_selective_keeps_attention_whatever_the_family(family):
    backend = "math" if family in ("gemma2", "gpt_oss") else "sdpa"  # soft-cap, sinks
    plain = step("none", family=family, backend=backend)
    selective, full = step("selective", family=family, backend=backend), step("full", family=family, backend=backend)
    assert_equal(selective, plain)
    assert full.attention_calls == 2 * plain.attention_calls
    assert selective.attention_calls == (1 if backend == "sdpa" else 2) * plain.attention_calls


def test_a_graph_that_is_kept_goes_backward_twice():
    register()
    model = build("llama", attention="rft").train()
    state = install_attention(model, "sdpa")
    apply_recompute(list(decoder_layers(model)), "selective")
    batch = packed_batch(*random_documents(13, 5))
    hidden, _ = Backbone(model, state)(batch)
    loss = hidden.pow(2).sum()
    first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True, allow_unused=True)
    second = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    for a, b in zip(first, second, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


def test_each_layers_kept_output_is_freed_when_its_backward_is_done():
    """The highest number of outputs alive at one time in the backward falls layer by layer: what is held is not one list till the end."""
    register()
    model = build("llama", attention="rft").train()
    state = install_attention(model, "sdpa")
    layers = list(decoder_layers(model))
    apply_recompute(layers, "selective")
    outputs: list[StorageWeakRef] = []
    alive: list[int] = []
    original = attention_backends.BACKENDS["sdpa"]

    def noted(*args):
        out = original(*args)
        outputs.append(StorageWeakRef(out.untyped_storage()))
        return out

    attention_backends.BACKENDS["sdpa"] = noted
    try:
        for layer in layers:
            layer.register_full_backward_hook(
                lambda *_: alive.append(sum(not reference.expired() for reference in outputs)) and None
            )
        batch = packed_batch(*random_documents(13, 5))
        hidden, _ = Backbone(model, state)(batch)
        assert sum(not reference.expired() for reference in outputs) == len(layers)
        loss = hidden.pow(2).sum()  # held, as a step does: the graph's nodes live until the backward is over
        loss.backward()
    finally:
        attention_backends.BACKENDS["sdpa"] = original
    assert alive == sorted(alive, reverse=True)
    assert alive[-1] <= 1, alive


class _SavesAsFlashAttention(torch.autograd.Function):
    """An attention that autograd does not see into, which saves q, k, v, its output and its log-sum-exp."""

    alive: ClassVar[list[int]] = []
    made: ClassVar[list[StorageWeakRef]] = []
    inputs: ClassVar[list[StorageWeakRef]] = []

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, run: Any) -> Tensor:
        out = run(q, k, v)
        ctx.save_for_backward(q, k, v, out, q.sum(-1))
        ctx.run = run
        _SavesAsFlashAttention.made += [StorageWeakRef(t.untyped_storage()) for t in (q, k, v, out)]
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, out, lse = ctx.saved_tensors
        own = _SavesAsFlashAttention
        own.inputs.append(StorageWeakRef(q.untyped_storage()))
        own.alive.append(sum(not reference.expired() for reference in own.inputs))
        inputs = [t.detach().requires_grad_() for t in (q, k, v)]
        with torch.enable_grad():
            again = ctx.run(*inputs)
        assert torch.equal(again.detach(), out)
        assert torch.equal(lse, q.sum(-1))
        return (*torch.autograd.grad(again, inputs, d_out), None)


@pytest.mark.parametrize("offload", [False, True], ids=["kept", "offloaded"])
def test_an_attention_that_saves_as_flash_attention_is_kept_offloaded_and_let_go(offload, tmp_path: Path):
    """Whatever it saves but its inputs goes where kept tensors go; q, k and v are made again for one layer at a time."""
    own = _SavesAsFlashAttention
    own.alive, own.made, own.inputs = [], [], []
    register()
    original = attention_backends.BACKENDS["sdpa"]

    def opaque(inputs, *args):
        bare = dataclasses.replace(inputs, query=None, key=None, value=None)  # `run` lives as long as the node

        def run(q, k, v):
            return original(dataclasses.replace(bare, query=q, key=k, value=v), *args)

        return own.apply(inputs.query, inputs.key, inputs.value, run)

    model = build("llama", attention="rft").train()
    state, layers = install_attention(model, "sdpa"), list(decoder_layers(model))
    mover = Offloader("cpu", CPU, HostPool(1 << 30, pinned=False), len(layers), smallest=16) if offload else None
    apply_recompute(layers, "selective", mover)
    plain = build("llama", attention="rft").train()
    batch = packed_batch(*random_documents(13, 21))
    wanted, _ = Backbone(plain, install_attention(plain, "sdpa"))(batch)
    wanted.pow(2).sum().backward()
    attention_backends.BACKENDS["sdpa"] = opaque
    try:
        hidden, _ = Backbone(model, state)(batch)
        count = sum(not reference.expired() for reference in own.made)
        assert count == (0 if offload else len(layers)), (
            "outputs alone are kept, and none of them where they are offloaded"
        )
        if mover is not None:
            tokens, config = 34, model.config
            q = config.num_attention_heads * config.head_dim
            each = tokens * 4 * (config.hidden_size + q + config.num_attention_heads)  # input, output, log-sum-exp
            assert mover.moved_bytes == len(layers) * each
        loss = hidden.pow(2).sum()
        loss.backward()
    finally:
        attention_backends.BACKENDS["sdpa"] = original
    assert own.alive == [1] * len(layers), "q of a layer is gone when the one before it goes backward"
    for got, want in zip(model.parameters(), plain.parameters(), strict=True):
        assert got.grad is None or torch.equal(got.grad, want.grad)


def test_a_model_without_checkpointing_layers_is_refused_with_its_name():
    with pytest.raises(Refused, match=r"Linear has no checkpointing.*\n.*none"):
        apply_recompute([torch.nn.Linear(2, 2)], "full")
    assert apply_recompute([torch.nn.Linear(2, 2)], "none") == 0


# ---- offload

LAYERS = 4


def offloader(
    where: str, folder: Path, *, host_bytes: int = 1 << 30, device_bytes: int = 0, leaving: Any = None
) -> Offloader:
    file = DiskFile(folder, trial_bytes=4096) if where == "disk" else None
    pool = HostPool(host_bytes, pinned=False, disk=file)
    return Offloader(where, CPU, pool, LAYERS, device_bytes=device_bytes, smallest=256, leaving=leaving)  # type: ignore[arg-type]


@pytest.mark.parametrize("recompute", ["none", 2, "selective", "full"])
@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_offloaded_gradients_are_the_same_bit_for_bit(recompute, where, tmp_path: Path):
    plain = step("none", dropout=0.3, micro_batches=3)
    # on disk: host memory for a few pages, so that nearly everything goes through the file
    own = offloader(where, tmp_path / "o", host_bytes=5 * 4096 if where == "disk" else 1 << 30)
    got = step(recompute, dropout=0.3, micro_batches=3, offloader=own)
    assert_equal(got, plain)
    assert own.moved_bytes > 0
    assert own.fetched_late == 0, "each layer was sent for before backward came to it"
    if where == "disk":
        assert os.listdir(tmp_path / "o") == [], "the file has no name"
        assert own.pool.disk is not None
        assert own.pool.disk.written_bytes > 0
        assert own.pool.disk.read_bytes > 0
        own.pool.disk.close()


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_some_layers_computed_again_and_some_offloaded_are_the_same_bit_for_bit(recompute, where, tmp_path: Path):
    plain = step("none", dropout=0.3, micro_batches=2)
    leaving = offloaded(recomputed(recompute, 2, 1), 2, 1)  # of the tiny model's two layers
    own = offloader(where, tmp_path / "o", host_bytes=5 * 4096 if where == "disk" else 1 << 30, leaving=leaving)
    got = step(recompute, dropout=0.3, micro_batches=2, offloader=own, count=1)
    assert_equal(got, plain)
    assert own.num_leaving == 1
    assert own.fetched_late == 0, "what left was sent for while the layer behind it was worked on"
    every = offloader("cpu", tmp_path)
    step(recompute, dropout=0.3, micro_batches=2, offloader=every, count=1)
    assert 0 < own.moved_bytes < every.moved_bytes
    if own.pool.disk is not None:
        own.pool.disk.close()


def test_recompute_of_some_layers_keeps_what_lies_between_none_and_all():
    none, some, every = (
        step(kind, count=count).kept_bytes for kind, count in (("none", None), ("full", 1), ("full", None))
    )
    assert every < some < none
    assert some == pytest.approx((none + every) / 2, rel=0.1)


def test_without_recompute_all_that_layers_keep_goes_but_their_weights(tmp_path: Path):
    plain = step("none")
    own = offloader("cpu", tmp_path)
    got = step("none", offloader=own)
    assert_equal(got, plain)
    weights = sum(p.numel() * 4 for p in build("llama").parameters())
    assert 0 < own.moved_bytes < plain.kept_bytes
    assert plain.kept_bytes - own.moved_bytes > 0.5 * weights
    full = offloader("cpu", tmp_path)
    step("full", offloader=full)
    assert full.moved_bytes < own.moved_bytes / 3, "with recompute the layers' inputs alone"


def test_the_last_layers_stay_where_there_is_room(tmp_path: Path):
    some = offloader("cpu", tmp_path, device_bytes=3 * 39 * 64 * 4)
    most = offloader("cpu", tmp_path)
    assert_equal(step("full", offloader=some), step("full", offloader=most))
    assert 0 < some.moved_bytes < most.moved_bytes


def test_host_memory_is_used_again_and_given_back(tmp_path: Path):
    own = offloader("cpu", tmp_path)
    step("full", offloader=own, micro_batches=1)
    gc.collect()
    held = own.pool.bytes
    for _ in range(5):
        step("full", offloader=own, micro_batches=1)
    assert own.pool.bytes == held
    disk_own = offloader("disk", tmp_path / "d", host_bytes=5 * 4096)
    step("full", offloader=disk_own)
    length = disk_own.pool.disk.bytes
    for _ in range(5):
        step("full", offloader=disk_own)
    assert disk_own.pool.disk.bytes <= length + 2 * 4096 * 4
    disk_own.pool.disk.close()


def test_too_little_host_memory_is_told_with_the_way_out(tmp_path: Path):
    with pytest.raises(TrainingError, match=r"needs more than 0.00 GiB of host memory(.|\n)*memory.offload = \"disk\""):
        step("full", offloader=offloader("cpu", tmp_path, host_bytes=4096))


def test_a_full_disk_ends_the_run_with_its_folder(tmp_path: Path, monkeypatch):
    own = offloader("disk", tmp_path / "o", host_bytes=4096)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk.os, "posix_fallocate", full)
    with pytest.raises(TrainingError, match=r"memory.offload_dir = (.|\n)*No space left on device"):
        step("full", offloader=own)


def test_a_file_holds_what_was_written_whatever_the_order(tmp_path: Path):
    file = DiskFile(tmp_path, trial_bytes=1 << 20)
    assert set(file.measured) <= {"buffered", "direct"}
    assert file.measured
    from rft.pinned import HostMemory

    pieces = []
    for number in range(9):
        memory = HostMemory(4096 * (number + 1), pinned=False)
        memory.data.copy_(torch.randint(0, 256, memory.data.shape, dtype=torch.uint8))
        pieces.append((file.room(memory.size), memory, memory.data.clone()))
    for future in [file.write(offset, memory.data) for offset, memory, _ in pieces]:
        future.result()
    for offset, memory, wanted in reversed(pieces):
        memory.data.zero_()
        file.read(offset, memory.data).result()
        assert torch.equal(memory.data, wanted)
    length = file.bytes
    file.give_back(pieces[3][0], 4 * 4096)
    assert file.room(4 * 4096 - 5) == pieces[3][0], "a piece that was given back is used again"
    assert file.bytes == length
    file.close()
