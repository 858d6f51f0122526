"""Compiles the kernels for a GPU on a machine that has none: what Triton's interpreter takes and its compiler does not is found here.

    python tests/kernels/compile_for_gpu.py [90]       compute capability times ten

Every op is called on small CPU tensors, forward and backward, with launches that compile for the target (in bf16, as in training) instead of
running; results are garbage and nobody looks at them. Prints one line a kernel and variant: name, shared memory. Run as a process of its own,
without TRITON_INTERPRET. Status 1 if a kernel does not compile or takes more shared memory than the target has.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from rft.kernels import adamw, fp8, launch, lora, lora_linear, lora_swiglu, nf4, rms_norm, rope, swiglu
from rft.kernels.cross_entropy import rows_loss
from rft.kernels.dropout import dropped
from rft.kernels.linear_cross_entropy import linear_cross_entropy

SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10}
"""Most that a program may have, by compute capability (CUDA programming guide, table of compute capabilities)."""


def compiled_for(capability: int) -> list[tuple[str, int]]:
    """From now on launches compile; the list grows by (kernel, bytes of shared memory)."""
    target = GPUTarget("cuda", capability, 32)
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: target,
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 0,
            get_device_interface=lambda: torch.cpu,
        )
    )
    made: list[tuple[str, int]] = []

    def launching(self: JITFunction, grid):
        def call(*args, **options):
            kernel = self.warmup(*args, grid=grid, **options)
            made.append((self.fn.__name__, kernel.metadata.shared))
            return kernel

        return call

    def on_cpu(product):
        """Of torch, without the option that CUDA's alone has."""

        def call(*given, out_dtype=None, out=None, **options):
            made = product(*(t.float() for t in given), **options).to(out_dtype or given[-1].dtype)
            return made if out is None else out.copy_(made)

        return call

    torch.mm, torch.addmm = on_cpu(torch.mm), on_cpu(torch.addmm)
    JITFunction.__getitem__ = launching
    launch.shared_memory = lambda device: SHARED_BYTES[capability]
    launch.on_device_of = lambda tensor: nullcontext()
    return made


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape).bfloat16()


def both_ways(outputs: object) -> None:
    tensors = [outputs] if isinstance(outputs, torch.Tensor) else [t for t in outputs if t.is_floating_point()]  # type: ignore[attr-defined]
    torch.autograd.backward(tensors, [torch.ones_like(t) for t in tensors])


def call_everything(capability: int) -> None:
    T, K, N, r = 256, 512, 1024, 16
    x, weight = draw(T, K).requires_grad_(), torch.ones(K).bfloat16().requires_grad_()
    both_ways(rms_norm.rms_norm(x, weight))
    both_ways(rms_norm.add_rms_norm(x, draw(T, K).requires_grad_(), weight))
    gate, up = draw(T, N).requires_grad_(), draw(T, N).requires_grad_()
    both_ways(swiglu.gated_activation(gate, up))
    both_ways(swiglu.gated_activation_fused(draw(T, 2 * N).requires_grad_()))
    swiglu.gated_activation_backward(draw(T, N), gate.detach(), up.detach(), want_output=True)
    q, k = draw(1, 8, T, 64).requires_grad_(), draw(1, 2, T, 64).requires_grad_()
    both_ways(rope.rope(q, k, draw(1, T, 32), draw(1, T, 32)))
    for ranks in ((r, r, r), (0, r, 64), (5, 0, 0), (0, 0, 0)):
        grad_branch, *branches = [lora_swiglu.LowRank(draw(T, n), draw(N, n)) if n else None for n in ranks]
        lora_swiglu.lora_gated_activation(gate.detach(), up.detach(), *branches)
        for want in ({"want_output": True}, {"want_product": True}):
            if grad_branch is not None or "want_output" in want:
                lora_swiglu.lora_gated_activation_backward(
                    draw(T, N), gate.detach(), up.detach(), grad_branch, *branches, **want
                )
    for rank in (1, r, 32):
        for number in (1, 2, 3):
            lora.lowrank_gradients([lora.Pair(draw(T, N), draw(T, rank), draw(N, rank), 0.5)] * number)
    seeds = torch.zeros(1, dtype=torch.int64)
    dropped(draw(T, K), seeds, 0, 0.1)
    if fp8.why_not(draw(16, 16), divmod(capability, 10)) is None:
        fp8._quantise_rows.function(draw(T, K))
        fp8._quantise_rows.function(draw(4, 1 << 15))
        fp8._quantise_joined.function(draw(T, K), draw(T, N), draw(T, K))
    held = nf4.quantise(draw(N, K))
    held.plain(torch.bfloat16)
    head = draw(2048, K)
    labels = torch.zeros(T, dtype=torch.int64)
    for trained in (False, True):
        both_ways(linear_cross_entropy(x, head.clone().requires_grad_(trained), labels))
    rows_loss(
        draw(T, 2048), labels, bias=None, token_weight=None, scale=1.0, softcap=0.0, ignore_index=-100, label_smoothing=0.0, z_loss=0.0,
        gradient=draw(T, 2048),
    )  # fmt: skip
    master = torch.zeros(K)
    adamw.serves = lambda update: True  # it asks for a GPU
    update = adamw.Update(master, draw(K), torch.zeros(K), torch.zeros(K), draw(K), 1)
    adamw.adamw([update], lr=1e-5, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8, factor=torch.ones(()))
    branch = lora_linear.Branch(draw(r, K), draw(N, r), 2.0)
    both_ways(lora_linear.lora_linears(x, [lora_linear.FrozenLinear(draw(N, K), None, (branch,))]))


def main() -> int:
    capability = int(sys.argv[1]) if len(sys.argv) > 1 else 90
    made = compiled_for(capability)
    call_everything(capability)
    for name, shared in dict.fromkeys(made):
        print(f"{name} {shared}")
    print(f"triton {triton.__version__}, sm_{capability}: {len(set(made))} kernels and variants")
    return int(any(shared > SHARED_BYTES[capability] for _, shared in made))


if __name__ == "__main__":
    sys.exit(main())
