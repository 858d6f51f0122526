"""Sweeps of chunk and block sizes, each variant in the same run, with the products alone as the floor; a table, no result lines."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterable
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from rft.kernels import (
    adamw,
    cross_entropy,
    fp8,
    linear_cross_entropy,
    logit_blocks,
    lora,
    lora_swiglu,
    rms_norm,
    rope,
    swiglu,
)
from rft.kernels.linear_cross_entropy import Chunks
from timing import event_times, graph_times, passes, randn

NEEDS = "a CUDA GPU"
M, H, V = 8192, 4096, 128256
TILES = ((512, 1, 2), (1024, 1, 2), (1024, 2, 2), (1024, 4, 3), (2048, 4, 1), (2048, 4, 2), (2048, 8, 3), (4096, 8, 1))


@contextmanager
def constants(module, **values):
    """Module constants as given, for one variant."""
    before = {name: getattr(module, name) for name in values}
    for name, value in values.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


def show(what: str, times: Iterable[float], note: str = "") -> None:
    times = sorted(times)
    print(f"{what:72} {statistics.median(times):9.4f} ms   {times[0]:9.4f} to {times[-1]:9.4f}   {note}", flush=True)


def attempt(what: str, measure: Callable[[], Iterable[float]], note: str = "") -> None:
    try:
        show(what, measure(), note)
    except Exception as error:
        print(f"{what:72} {type(error).__name__}: {str(error)[:160]}", flush=True)
    torch.cuda.empty_cache()


def products() -> None:
    """What cuBLAS takes for the products alone."""
    weight, hidden = randn(V, H), randn(M, H)
    for rows in (1024, 2048, 3328, 4096, 8192):
        x, logits = hidden[:rows], torch.empty(rows, V, device="cuda", dtype=torch.bfloat16)
        logits.normal_()
        tflop = 2 * rows * H * V / 1e9
        for name, call in {
            "logits": lambda x=x, out=logits: torch.mm(x, weight.t(), out=out),
            "d_hidden": lambda z=logits: torch.mm(z, weight),
            "d_weight": lambda z=logits, x=x: torch.mm(z.t(), x),
            "d_weight fp32": lambda z=logits, x=x: torch.mm(z.t(), x, out_dtype=torch.float32),
        }.items():
            times = event_times(call, repeats=8, warmup=2)
            show(f"product {name} {rows} rows", times, f"{tflop / statistics.median(times):.0f} TFLOP/s")
    z, acc = torch.randn(1024, 8192, device="cuda", dtype=torch.bfloat16), torch.zeros(1024, H, device="cuda")
    times = graph_times(lambda: torch.mm(hidden[:1024], weight[:8192].t(), out=z))
    show(
        "product block logits 1024 x 8192", times, f"{2 * 1024 * 8192 * H / 1e9 / statistics.median(times):.0f} TFLOP/s"
    )
    times = graph_times(lambda: torch.addmm(acc, z, weight[:8192], out_dtype=torch.float32, out=acc))
    show(
        "product block accumulate 1024 x 8192",
        times,
        f"{2 * 1024 * 8192 * H / 1e9 / statistics.median(times):.0f} TFLOP/s",
    )


def row_kernel() -> None:
    logits = randn(4096, V)
    labels = torch.randint(V, (4096,), device="cuda")
    options = {
        "bias": None,
        "token_weight": None,
        "scale": 1.0,
        "softcap": 0.0,
        "ignore_index": -100,
        "label_smoothing": 0.0,
        "z_loss": 0.0,
    }
    for block, warps in ((1024, 4), (2048, 4), (2048, 8), (4096, 8), (8192, 16)):
        for stages in (1, 2, 3, 4):
            with constants(cross_entropy, ROW_BLOCK=block, ROW_WARPS=warps, ROW_STAGES=stages):
                attempt(
                    f"rows kernel 4096 x {V}, BLOCK {block} warps {warps} stages {stages}",
                    lambda: graph_times(
                        lambda: cross_entropy.rows_loss(logits, labels, **options, gradient=logits), repeats=8, inner=2
                    ),
                )


def tile_kernel() -> None:
    """`_accumulate_kernel` over whole rows, and over a block that was just written, as it is after its product."""
    labels = torch.randint(V, (4096,), device="cuda")
    for rows_, columns in ((4096, V), (1024, 8192)):
        logits, sums = randn(rows_, columns), torch.zeros(rows_, H, device="cuda")
        state = logit_blocks.RowState(logits, rows_)
        for tile, warps, stages in TILES:
            how = {"num_warps": warps, "STAGES": stages}
            with constants(logit_blocks, TILE=tile, NARROW=how, WIDE=how):

                def call(logits=logits, sums=sums, state=state, n=rows_):
                    logits.mul_(0.5) if n == 1024 else None
                    state.add_block(
                        logits, labels[:n], None, sums, first_column=0, scale=1.0, softcap=0.0, ignore_index=-100
                    )

                attempt(
                    f"accumulate {rows_} x {columns} TILE {tile} warps {warps} stages {stages}",
                    lambda c=call: graph_times(c, repeats=8),
                )
        attempt(f"the halving alone {rows_} x {columns}", lambda z=logits: graph_times(lambda: z.mul_(0.5), repeats=8))


def linear(train_weight: bool, size: int, variants: Iterable[Chunks], rounds: int = 3) -> None:
    """In turns, since a hot chip is a slow one."""
    hidden, weight = randn(size, H).requires_grad_(), (randn(V, H) * 0.01).requires_grad_(train_weight)
    labels = torch.randint(V, (size,), device="cuda")
    times: dict[Chunks, list[float]] = {chunks: [] for chunks in variants}

    def call():
        hidden.grad = weight.grad = None
        linear_cross_entropy.linear_cross_entropy(hidden, weight, labels).backward()

    for _ in range(rounds):
        for chunks in times:
            with constants(linear_cross_entropy, plan_chunks=lambda *_, chunks=chunks, **__: chunks):
                times[chunks] += event_times(call, repeats=5, warmup=2)
    for chunks in times:
        show(f"linear ce {size} rows {'full' if train_weight else 'frozen'} {tuple(chunks)}", times[chunks])
    hidden.grad = weight.grad = None
    torch.cuda.empty_cache()


def linear_all() -> None:
    frozen = [Chunks(rows, V) for rows in (1024, 2048, 4096, 8192)] + [Chunks(4096, 0)]
    frozen += [
        Chunks(r, c) for r, c in ((1024, 8192), (1024, 16384), (2048, 8192), (2048, 32768), (8192, 8192), (4096, 65536))
    ]
    linear(False, M, frozen)
    linear(False, 3328, [Chunks(3328, V), Chunks(1024, V), Chunks(2048, V), Chunks(3328, 0), Chunks(1024, 8192)])
    linear(True, M, [Chunks(rows, 0) for rows in (4096, 8192)])


def swiglu_blocks() -> None:
    gate, up = randn(16384, 14336), randn(16384, 14336)
    for block in (1024, 2048, 4096, 8192):
        for warps in (4, 8, 16):
            if not 4 <= block // (32 * warps) <= 32:
                continue
            with constants(swiglu, BLOCK=block, NUM_WARPS=warps):
                for which, call in zip(("forward", "both"), passes(swiglu.gated_activation, [gate, up]), strict=True):
                    attempt(
                        f"swiglu 16384x14336 BLOCK {block} warps {warps} {which}",
                        lambda c=call: graph_times(c, repeats=8, inner=2),
                    )


def lora_swiglu_tiles() -> None:
    """Against the passes that it takes the place of: branches added by products of their own, then the activation, then quantisation."""
    T, N, r = 8192, 14336, 16
    gate, up, grad = randn(T, N), randn(T, N), randn(T, N)
    g, u, d = (lora_swiglu.LowRank(randn(T, r), randn(N, r)) for _ in range(3))

    def timed(what: str, call: Callable[[], object]) -> None:
        attempt(f"lora_swiglu {T}x{N} r{r} {what}", lambda: graph_times(call, repeats=8, inner=2))

    def added(x: torch.Tensor, branch: lora_swiglu.LowRank) -> None:
        x.addmm_(branch.left, branch.right.t())

    timed("one branch added by a product", lambda: added(gate, g))
    timed("activation", lambda: swiglu.gated_activation(gate, up))
    timed("activation backward", lambda: swiglu.gated_activation_backward(grad, gate, up, want_output=True))
    timed("both gradients of one branch", lambda: lora.lowrank_gradients([lora.Pair(gate, g.left, g.right)]))
    timed(
        "both gradients of two branches",
        lambda: lora.lowrank_gradients([lora.Pair(gate, g.left, g.right), lora.Pair(up, u.left, u.right)]),
    )
    timed("quantise", lambda: fp8.quantise_rows(gate))
    calls: dict[str, Callable[[], object]] = {
        "forward": lambda: lora_swiglu.lora_gated_activation(gate, up, g, u),
        "backward": lambda: lora_swiglu.lora_gated_activation_backward(grad, gate, up, d, g, u, want_output=True),
        "backward, product for output": lambda: lora_swiglu.lora_gated_activation_backward(
            grad, gate, up, d, g, u, want_product=True
        ),
    }
    for rows, columns, warps, stages, programs in (
        (32, 128, 4, 2, 8), (32, 128, 4, 3, 8), (64, 64, 4, 2, 8), (64, 64, 4, 3, 4), (16, 128, 4, 3, 8), (16, 128, 2, 2, 16),
        (32, 64, 2, 3, 16), (64, 128, 8, 3, 4), (128, 64, 8, 3, 4),
    ):  # fmt: skip
        options = {
            "ROWS_FORWARD": rows,
            "ROWS_BACKWARD": rows,
            "BLOCK_N": columns,
            "NUM_WARPS": warps,
            "PROGRAMS_PER_MULTIPROCESSOR": programs,
        }
        with constants(lora_swiglu, **options, STAGES_FORWARD=stages, STAGES_BACKWARD=stages, SHARED_BYTES=1 << 30):
            for which, call in calls.items():
                timed(f"{rows}x{columns} warps {warps} stages {stages} programs {programs} {which}", call)


def adamw_blocks() -> None:
    """A billion weights in 100 tensors; the floor is 28 bytes each."""
    tensors = [(randn(2048, 4883).float(), randn(2048, 4883)) for _ in range(100)]
    updates = [adamw.Update(w, g, torch.zeros_like(w), torch.zeros_like(w), torch.empty_like(g), 1) for w, g in tensors]
    given = {"lr": 1e-5, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8}
    factor = torch.ones((), device="cuda")
    for block, warps in ((1024, 4), (512, 4), (1024, 8), (2048, 8), (4096, 8)):
        with constants(adamw, BLOCK=block, NUM_WARPS=warps):
            attempt(
                f"adamw 1e9 BLOCK {block} warps {warps}",
                lambda: event_times(lambda: adamw.adamw(updates, **given, factor=factor), repeats=6, warmup=2),
            )
    masters = [u.weight.requires_grad_() for u in updates]
    for master, update in zip(masters, updates, strict=True):
        master.grad = update.gradient.float()
    torch_s = torch.optim.AdamW(masters, lr=1e-5, fused=True)
    attempt("adamw 1e9 torch fused, fp32 gradients, no copies", lambda: event_times(torch_s.step, repeats=6, warmup=2))


def norm_tiles() -> None:
    for width in (2048, 4096):
        x, weight = randn(16384, width), randn(width)
        for rows, warps in ((1, 4), (1, 8), (2, 8), (4, 8)):
            if not 4 <= rows * width // (32 * warps) <= 32:
                continue
            tile = {"ROWS": rows, "BLOCK_N": width, "num_warps": warps}
            for programs in (1, 2, 3, 4):
                for stages in (1, 2, 3, 4):
                    with constants(
                        rms_norm, _tile=lambda N, t=tile: t, PROGRAMS_PER_MULTIPROCESSOR=programs, STAGES=stages
                    ):
                        _, both = passes(rms_norm.rms_norm, [x, weight])
                        attempt(
                            f"rms_norm 16384x{width} ROWS {rows} warps {warps} programs {programs} stages {stages} both",
                            lambda c=both: graph_times(c, repeats=8),
                        )


def rope_blocks() -> None:
    q, k = (randn(1, 16384, heads, 128).transpose(1, 2) for heads in (32, 8))
    tables = [randn(1, 16384, 64) for _ in range(2)]
    for pairs in (256, 512, 1024, 2048):
        for warps in (1, 2, 4, 8):
            with constants(rope, PAIRS_AT_ONCE=pairs, NUM_WARPS=warps):
                for which, call in zip(("forward", "both"), passes(rope.rope, [q, k], *tables), strict=True):
                    attempt(
                        f"rope 16384x32+8x128 pairs {pairs} warps {warps} {which}",
                        lambda c=call: graph_times(c, repeats=8),
                    )


def lora_blocks() -> None:
    shapes = (
        (128, 256, 8, 3),
        (64, 256, 8, 4),
        (64, 256, 4, 4),
        (64, 512, 8, 3),
        (128, 128, 8, 4),
        (128, 128, 4, 4),
        (64, 128, 4, 5),
        (128, 256, 16, 3),
    )
    for width in (4096, 14336):
        inputs = randn(16384, width), randn(16384, 16), randn(width, 16)
        for block_t, block_n, warps, stages in shapes:
            for waves in (1, 3, 6, 12):
                options = {"TILES": ((block_t, block_n, stages),), "NUM_WARPS": warps, "MOST_WAVES": waves}
                with constants(lora, **options):
                    attempt(
                        f"lowrank 16384x{width} r16 BLOCK {block_t}x{block_n} warps {warps} stages {stages} waves {waves}",
                        lambda i=inputs: graph_times(lambda: lora.lowrank_gradients([lora.Pair(*i)]), repeats=8),
                    )


def profiles() -> None:
    """Where the time of a step goes, by kernel."""
    from torch.profiler import ProfilerActivity, profile

    labels = torch.randint(V, (M,), device="cuda")
    hidden, weight = randn(M, H).requires_grad_(), randn(V, H) * 0.02
    for train_weight, chunks in ((False, Chunks(1024, 8192)), (False, Chunks(4096, V)), (True, Chunks(M, 0))):
        weight.requires_grad_(train_weight)
        with constants(linear_cross_entropy, plan_chunks=lambda *_, chunks=chunks, **__: chunks):
            for recorded in (False, True):
                with profile(activities=[ProfilerActivity.CUDA]) if recorded else nullcontext() as profiler:
                    linear_cross_entropy.linear_cross_entropy(hidden, weight, labels).backward()
                    torch.cuda.synchronize()
        hidden.grad = weight.grad = None
        print(f"--- {'full' if train_weight else 'frozen'} {tuple(chunks)}")
        for event in sorted(profiler.key_averages(), key=lambda e: -e.device_time_total)[:9]:
            print(f"{event.device_time_total / 1e3:9.3f} ms {event.count:5} x  {event.key[:110]}", flush=True)


PARTS = {
    "products": products, "rows": row_kernel, "tiles": tile_kernel, "linear": linear_all, "swiglu": swiglu_blocks, "norm": norm_tiles, "rope": rope_blocks,
    "lora": lora_blocks, "lora_swiglu": lora_swiglu_tiles, "adamw": adamw_blocks, "profiles": profiles,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, help="taken, and left empty")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    torch.manual_seed(0)
    for part in parser.parse_args().parts:
        PARTS[part]()


if __name__ == "__main__":
    main()
