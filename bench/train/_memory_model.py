"""A Llama of random weights on which ways to save memory are put one after another; used by offload.py and long.py."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]
from step import SHAPES, TINY, fill_on_device, packed


@dataclass
class Model:
    """One LoRA run without data files: `step()` is forward, backward and update over one document."""

    trainee: Any
    layers: list[Any]
    optimizer: Any
    batch: Any
    device: Any
    offloader: Any = None

    def save_memory(
        self, recompute: Any, *, offload: str = "none", tiles: int = 1, rows: Any = None, folder: Path | None = None,
        host_gib: float = 64.0, keep_gib: float = 0.0, smallest: int | None = None,
    ) -> Any:  # fmt: skip
        """Put these ways onto the model in place of the ones before. Returns the offloader or None."""
        from rft.memory.disk import DiskFile
        from rft.memory.host_pool import HostPool
        from rft.memory.offload import SMALLEST, Offloader
        from rft.memory.recompute import apply_recompute
        from rft.memory.tiled_mlp import apply_tiled_mlp

        if self.offloader is not None:
            self.offloader.close()
        self.offloader = None
        if offload != "none":
            disk = DiskFile(folder or Path.cwd()) if offload == "disk" else None
            pool = HostPool(int(host_gib * 2**30), pinned=self.device.type == "cuda", disk=disk)
            self.offloader = Offloader(
                offload, self.device, pool, len(self.layers), device_bytes=int(keep_gib * 2**30), smallest=smallest or SMALLEST
            )  # fmt: skip
        apply_tiled_mlp(self.layers, tiles)
        apply_recompute(self.layers, recompute, self.offloader)
        if rows is not None:
            self.trainee.head.set_chunk_rows(rows)
        return self.offloader

    def forward_backward(self) -> Any:
        loss = self.trainee(self.batch)["next_token"] / self.batch.label_weight
        loss.backward()
        return loss.detach()

    def step(self) -> Any:
        from rft.optim import clip_factor, grad_norm

        loss = self.forward_backward()
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
        return [self.batch.num_tokens / (a.elapsed_time(b) / 1e3) for a, b in zip(clocks, clocks[1:], strict=False)]


def build(
    shape: str, tokens: int, *, num_layers: int | None = None, tiny: bool = False, attention: str = "auto"
) -> Model:
    """LoRA r 16 on all linears, one document of `tokens`, every token labelled."""
    import torch
    import transformers
    from transformers import AutoModelForCausalLM

    from rft.adapters.lora import inject
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
    model = inject(model, LoraConfig(r=16), dtype=torch.float32, receipts=receipts)
    facts = describe(model)
    apply_swaps(model, receipts, device=device, kernels=not tiny)
    backend, _ = choose_backend(attention, device, dtype, Needs(head_size=config.head_dim, value_size=config.head_dim))
    state = install_attention(model, backend)
    rows = auto_chunk_rows(device.type, facts.vocab_size, kernels=not tiny, head_trained=False)
    trainee = Trainee(model, Backbone(model, state), Head(model, chunk_rows=rows, kernels=not tiny), SftLoss())
    torch.manual_seed(0)
    fill_on_device(model, device)
    with torch.no_grad():  # so that every gradient is there from the first step on
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.02)
    named = [(n, p) for n, p in trainee.named_parameters() if p.requires_grad]
    optimizer = BUILDERS[AdamWConfig](
        named, AdamWConfig(name="adamw", lr=1e-5), compute_dtype=None if tiny else dtype, kernels=not tiny
    )  # fmt: skip
    batch = packed([tokens], 1, config.vocab_size).to(device)
    print(f"{shape}, {len(list(decoder_layers(model)))} layers, {tokens:,} tokens, attention {backend}", flush=True)
    return Model(trainee.train(), list(decoder_layers(model)), optimizer, batch, device)
