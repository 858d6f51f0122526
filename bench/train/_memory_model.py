"""A Llama of random weights on which ways to save memory are put one after another; used by offload.py, long.py and memory.py."""

from __future__ import annotations

import itertools
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]
import turn
from step import SHAPES, TINY, fill_on_device, packed


@dataclass
class Model:
    """One run without data files: `step()` is forward, backward and update over `batch`."""

    trainee: Any
    layers: list[Any]
    optimizer: Any
    batch: Any
    device: Any
    facts: Any = None
    attention: str = ""
    rows: int = 0
    """Rows of logits at a time that are fast here."""
    offloader: Any = None

    def save_memory(
        self, recompute: Any, *, offload: str = "none", tiles: int = 1, rows: Any = None, folder: Path | None = None,
        host_gib: float = 64.0, keep_gib: float = 0.0, smallest: int | None = None, again_layers: int | None = None,
        moved_layers: int | None = None,
    ) -> Any:  # fmt: skip
        """Put these ways onto the model in place of the ones before. Returns the offloader or None."""
        from rft.memory.disk import DiskFile
        from rft.memory.host_pool import HostPool
        from rft.memory.offload import SMALLEST, Offloader
        from rft.memory.plan import offloaded, recomputed
        from rft.memory.recompute import apply_recompute
        from rft.memory.tiled_mlp import apply_tiled_mlp

        if self.offloader is not None:
            self.offloader.close()
        self.offloader = None
        if offload != "none":
            disk = DiskFile(folder or Path.cwd()) if offload == "disk" else None
            pool = HostPool(int(host_gib * 2**30), pinned=self.device.type == "cuda", disk=disk)
            count = len(self.layers)
            self.offloader = Offloader(
                offload, self.device, pool, count, device_bytes=int(keep_gib * 2**30), smallest=smallest or SMALLEST,
                leaving=offloaded(recomputed(recompute, count, again_layers), count, moved_layers),
            )  # fmt: skip
        apply_tiled_mlp(self.layers, tiles)
        apply_recompute(self.layers, recompute, self.offloader, count=again_layers)
        if rows is not None:
            self.trainee.head.set_chunk_rows(rows)
        return self.offloader

    def put(self, plan: Any, *, folder: Path | None = None, host_gib: float = 64.0, smallest: int | None = None) -> Any:
        """The same for a plan of the planner."""
        return self.save_memory(
            plan.recompute, offload=plan.offload, tiles=plan.tiled_mlp, rows=plan.chunk_rows, folder=folder, host_gib=host_gib,
            smallest=smallest, again_layers=plan.recompute_layers, moved_layers=plan.offload_layers,
        )  # fmt: skip

    def forward_backward(self) -> Any:
        loss = self.trainee(self.batch)["next_token"] / self.batch.label_weight
        loss.backward()
        return loss.detach()

    def step(self) -> Any:
        from rft.optim import clip_factor, grad_norm

        loss = self.forward_backward()
        if self.optimizer.in_backward:
            self.optimizer.norm_in_backward()
            self.optimizer.step()
        else:
            self.optimizer.step(clip_factor(grad_norm(self.optimizer.parameters), 1.0))
        self.optimizer.zero_grad()
        return loss

    def timed(self, steps: int) -> list[float]:
        """tokens/s of each step; the device's clock stands between them."""
        if self.device.type != "cuda":
            rates = []
            for _ in range(steps):
                start = time.perf_counter()
                self.step()
                rates.append(self.batch.num_tokens / (time.perf_counter() - start))
            return rates
        import torch

        clocks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
        clocks[0].record()
        for clock in clocks[1:]:
            self.step()
            clock.record()
        torch.cuda.synchronize()
        return [self.batch.num_tokens / (a.elapsed_time(b) / 1e3) for a, b in itertools.pairwise(clocks)]


def build(
    shape: str, tokens: int, *, num_layers: int | None = None, tiny: bool = False, attention: str = "auto", base: str = "bf16",
    optim: Any = None, packs: int = 1,
) -> Model:  # fmt: skip
    """LoRA r 16 on all linears, `packs` documents of `tokens`, every token labelled. base: bf16 or nf4 (random codes).
    optim: a table of the config: then all weights are trained by it, in the type that they are computed with."""
    import torch
    import transformers
    from transformers import AutoModelForCausalLM

    from rft.adapters.lora import inject, train_everything
    from rft.config.adapter import LoraConfig
    from rft.config.optim import AdamWConfig
    from rft.losses import SftLoss
    from rft.models.attention import Needs, choose_backend, install_attention, register
    from rft.models.backbone import Backbone, decoder_layers
    from rft.models.describe import describe
    from rft.models.head import Head, auto_chunk_rows
    from rft.models.receipts import Receipts
    from rft.models.surgery import apply_swaps
    from rft.optim import BUILDERS
    from rft.quant.packed import place
    from rft.training.trainee import Trainee

    device = torch.device("cpu" if tiny else "cuda")
    dtype = torch.float32 if tiny else torch.bfloat16
    sizes = {**SHAPES[shape], **(TINY if tiny else {})}
    if num_layers is not None:
        sizes["num_hidden_layers"] = num_layers
    rope = {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0 * max(1.0, tokens / 131072), "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    }  # fmt: skip
    config = transformers.LlamaConfig(
        **sizes, rope_parameters=rope, max_position_embeddings=max(tokens, 131072), rms_norm_eps=1e-5, bos_token_id=1, eos_token_id=2
    )  # fmt: skip
    register()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="rft", dtype=dtype)
    receipts = Receipts()
    if optim is None:
        model = inject(model, LoraConfig(r=16), dtype=torch.float32, receipts=receipts)
    else:
        train_everything(model, dtype=dtype)
    facts = describe(model)
    turn.take()
    apply_swaps(model, receipts, device=device, kernels=not tiny)
    backend, _ = choose_backend(attention, device, dtype, Needs(head_size=config.head_dim, value_size=config.head_dim))
    state = install_attention(model, backend)
    layers = list(decoder_layers(model))
    rows = auto_chunk_rows(device.type, facts.vocab_size, kernels=not tiny, head_trained=optim is not None)
    trainee = Trainee(model, Backbone(model, state), Head(model, chunk_rows=rows, kernels=not tiny), SftLoss())
    boxes = place(model, layers, "nf4") if base == "nf4" else None
    torch.manual_seed(0)
    fill_on_device(model, device)
    for box in boxes.linears.values() if boxes is not None else ():
        box.codes.random_(0, 256)
        box.scales.random_(0, 256)
        box.nested.fill_(0.01)
        box.offset.fill_(0.05)
    with torch.no_grad():  # so that every gradient is there from the first step on
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.02)
    named = [(n, p) for n, p in trainee.named_parameters() if p.requires_grad]
    optim = optim or AdamWConfig(name="adamw", lr=1e-5)
    optimizer = BUILDERS[type(optim)](named, optim, compute_dtype=None if tiny else dtype, kernels=not tiny)
    batch = packed([tokens], packs, config.vocab_size).to(device)
    print(f"{shape}, {len(layers)} layers, {packs} x {tokens:,} tokens, attention {backend}", flush=True)
    return Model(trainee.train(), layers, optimizer, batch, device, facts, backend, rows)
