"""Cross entropy from hidden states, forward and backward, against Liger, Apple CCE and torch, with the memory each takes."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from results import Results
from rft.kernels.linear_cross_entropy import linear_cross_entropy
from timing import event_times, extra_gib, versions_of

NEEDS = "a CUDA GPU; liger-kernel and cut-cross-entropy as peers"
M, H, V = 8192, 4096, 128256
IGNORED = 0.6


def eager(hidden, weight, labels):
    return F.cross_entropy((hidden @ weight.t()).float(), labels)


def peers() -> dict[str, Callable]:
    """Loss functions (hidden, weight, labels) -> mean loss; one that does not import raises when it is called."""

    def liger(hidden, weight, labels):
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

        return liger_fused_linear_cross_entropy(hidden, weight, labels)

    def cce(hidden, weight, labels, impl="cce"):
        import cut_cross_entropy

        return cut_cross_entropy.linear_cross_entropy(hidden, weight, labels, impl=impl)

    compiled = torch.compile(eager)
    return {
        "liger": liger,
        "cce": cce,
        "cce-torch-compile": lambda *a: cce(*a, impl="torch_compile"),
        "torch": eager,
        "torch-compile": compiled,
    }


def step(function: Callable, hidden, weight, labels) -> Callable[[], object]:
    def call():
        hidden.grad = weight.grad = None
        loss = function(hidden, weight, labels)
        loss.backward()
        return loss

    return call


def drop_gradients(inputs) -> None:
    """They count as extra memory of the next call."""
    inputs[0].grad = inputs[1].grad = None


def measure(results: Results, case: str, systems: dict[str, Callable], inputs, repeats: int) -> None:
    expected = None
    for name, function in systems.items():
        try:
            call = step(function, *inputs)
            loss = call().item()
            expected = loss if expected is None else expected
            if not abs(loss - expected) < 2e-3 * abs(expected):
                raise RuntimeError(f"loss {loss}, rft {expected}")
            torch.cuda.synchronize()
            time.sleep(1.0)  # all systems start from the same rest: a hot chip is a slow one
            times = event_times(call, repeats=repeats, warmup=4)
            results.add(case, name, "ms", times)
            results.add(case, name, "gib", extra_gib(call, forget=lambda: drop_gradients(inputs)))
        except Exception as error:
            results.error(case, name, f"{type(error).__name__}: {str(error)[:300]}")
        drop_gradients(inputs)
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, help="append result lines here")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--systems", nargs="*", help="only these peers beside rft")
    parser.add_argument("--cases", nargs="*", help="only these cases")
    args = parser.parse_args()
    results = Results(args.results, versions=versions_of("liger-kernel", "cut-cross-entropy"))
    torch.manual_seed(0)
    hidden = torch.randn(M, H, device="cuda", dtype=torch.bfloat16).requires_grad_()
    # Logits of deviation 0.64: what Apple CCE may skip, it can.
    weight = (torch.randn(V, H, device="cuda") * 0.01).bfloat16()
    labels = torch.randint(V, (M,), device="cuda")
    ignored = labels.clone()
    ignored[torch.randperm(M, device="cuda")[: int(IGNORED * M)]] = -100
    dropping = partial(linear_cross_entropy, num_labels=M - int(IGNORED * M))  # the packer counts them
    least = partial(linear_cross_entropy, chunk_rows="least")
    others = {name: peer for name, peer in peers().items() if args.systems is None or name in args.systems}
    frugal = {name: peer for name, peer in others.items() if name in ("liger", "cce")}
    cases = (  # name, whether the weight is trained, labels, rft's way, peers
        ("frozen", False, labels, linear_cross_entropy, others),
        ("least-memory-frozen", False, labels, least, frugal),
        ("frozen-60-percent-ignored", False, ignored, dropping, others),
        ("full", True, labels, linear_cross_entropy, others),
        ("full-least-memory", True, labels, least, frugal),
    )
    for name, train_weight, targets, ours, against in cases:
        if args.cases is None or name in args.cases:
            weight.requires_grad_(train_weight)
            measure(
                results,
                f"linear_ce/{M}x{H}x{V}/{name}",
                {"rft": ours, **against},
                (hidden, weight, targets),
                args.repeats,
            )


if __name__ == "__main__":
    main()
