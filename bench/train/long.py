"""The longest document that one GPU trains: one step of 8B LoRA at 500k tokens, and parity of the same settings where both fit.

    python bench/train/long.py --tokens 524288 --host-gib 64 --keep-gib 40 --folder /mnt/fast --results FILE
    python bench/train/long.py --detach run.log --tokens 524288 ...    in the background; `tail run.log` shows how far it is
    python bench/train/long.py --parity --results FILE                 32k with all layers, 128k with 4
    python bench/train/long.py --tiny                                  both on a CPU (no figures worth keeping)

Settings: hidden states on GPU (--keep-gib), host (--host-gib) and disk, MLPs and loss in pieces, recompute "full" (or "selective": attention's
output is kept too, twice the bytes). Parity: loss and every adapter's gradient against recompute "full" alone, as relative errors.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]
NEEDS = "a CUDA GPU of 80 GiB or more, 64 GiB of host memory, a disk"


def ways(args: argparse.Namespace, tokens: int, folder: Path) -> dict[str, Any]:
    """The settings of a long run."""
    return {
        "recompute": args.recompute, "offload": args.offload, "tiles": args.tiles or max(2, -(-tokens // 16384)),
        "rows": 16 if args.tiny else args.rows, "folder": folder, "host_gib": args.host_gib, "keep_gib": args.keep_gib,
        "smallest": 64 if args.tiny else None,
    }  # fmt: skip


def one_step(results: Any, args: argparse.Namespace, tokens: int, folder: Path) -> None:
    """One step, once: tokens, seconds, peak and where the hidden states went."""
    import torch
    from _memory_model import build

    model = build("llama-8b", tokens, num_layers=args.layers, tiny=args.tiny)
    options = ways(args, tokens, folder)
    offloader = model.save_memory(options.pop("recompute"), **options)
    print(f"settings: recompute {args.recompute}, {options}", flush=True)
    told = Told(model, offloader)
    if model.device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    loss = float(model.step())
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    told.stop()
    case = "longest/llama-8b/lora"
    if loss != loss or loss in (float("inf"), 0.0):
        results.error(case, "rft", f"the loss is {loss}")
        return
    results.add(case, "rft", "tokens", tokens)
    results.add(case, "rft", "seconds", seconds)
    results.add(case, "rft", "tokens_per_second", tokens / seconds)
    if model.device.type == "cuda":
        results.add(case, "rft", "gib", torch.cuda.max_memory_allocated() / 2**30)
    results.add(case, "rft", "loss", loss)
    if offloader is not None:
        results.add(case, "rft", "gib host", offloader.pool.peak_bytes / 2**30)
        results.add(case, "rft", "gib moved", offloader.moved_bytes / 2**30)
        if offloader.pool.disk is not None:
            results.add(case, "rft", "gib disk", offloader.pool.disk.bytes / 2**30)
            print(f"    {offloader.pool.disk.describe()}", flush=True)
        offloader.close()


class Told:
    """Says every few seconds which layer is at work, so that a step of minutes can be watched."""

    def __init__(self, model: Any, offloader: Any, every_seconds: float = 10.0):
        self._at, self._offloader = "", offloader
        for number, layer in enumerate(model.layers):
            layer.register_forward_pre_hook(lambda *_, n=number: self._set(n))
        self._done = threading.Event()
        self._began = time.perf_counter()
        self._thread = threading.Thread(target=self._tell, args=(every_seconds,), daemon=True)
        self._thread.start()

    def _set(self, number: int) -> None:
        self._at = f"layer {number}"

    def _tell(self, every_seconds: float) -> None:
        while not self._done.wait(every_seconds):
            moved = "" if self._offloader is None else f", {self._offloader.moved_bytes / 2**30:.1f} GiB moved"
            print(f"    {time.perf_counter() - self._began:6.0f} s: {self._at}{moved}", flush=True)

    def stop(self) -> None:
        self._done.set()
        self._thread.join()


def parity(results: Any, args: argparse.Namespace, tokens: int, layers: int | None, folder: Path) -> None:
    """Loss and adapter gradients of the long settings against recompute alone."""
    from _memory_model import build

    model = build("llama-8b", tokens, num_layers=layers, tiny=args.tiny)
    found = []
    for options in ({"recompute": "full"}, ways(args, tokens, folder)):
        model.save_memory(options.pop("recompute"), **options)
        loss = float(model.forward_backward())
        found.append(
            (loss, {n: p.grad.float().cpu() for n, p in model.trainee.named_parameters() if p.grad is not None})
        )
        model.optimizer.zero_grad()
    model.save_memory("none")
    (plain_loss, plain), (long_loss, own) = found
    assert own.keys() == plain.keys()
    worst = max(float((own[n] - g).norm() / g.norm().clamp_min(1e-20)) for n, g in plain.items())
    case = f"longest/parity/llama-8b/{'all' if layers is None else layers}-layers/doc-{tokens}"
    results.add(case, "rft", "relative_error loss", abs(long_loss - plain_loss) / abs(plain_loss))
    results.add(case, "rft", "relative_error gradient", worst)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", help="file to append result lines to")
    parser.add_argument("--tokens", type=int, default=524288)
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--recompute", choices=["full", "selective"], default="full")
    parser.add_argument("--offload", choices=["none", "cpu", "disk"], default="disk")
    parser.add_argument("--host-gib", type=float, default=64.0)
    parser.add_argument(
        "--keep-gib", type=float, default=0.0, help="hidden states of the last layers that stay on the GPU"
    )
    parser.add_argument("--tiles", type=int, help="pieces of an MLP; default one for every 16,384 tokens")
    parser.add_argument("--rows", type=int, default=4096, help="rows of logits at a time")
    parser.add_argument("--folder", type=Path, help="folder on the disk; default the system's temporary one")
    parser.add_argument("--parity", action="store_true")
    parser.add_argument("--detach", metavar="LOG", help="go on in the background, output into LOG")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes on a CPU")
    args = parser.parse_args()
    if args.detach:
        rest = [a for i, a in enumerate(sys.argv[1:], 1) if a != "--detach" and sys.argv[i - 1] != "--detach"]
        with open(args.detach, "w", encoding="utf-8") as log:
            child = subprocess.Popen(
                [sys.executable, "-P", __file__, *rest], stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )  # fmt: skip
        print(f"process {child.pid}, output in {args.detach}")
        return 0
    from results import Results

    results = Results(args.results)
    folder = args.folder or Path(tempfile.mkdtemp(prefix="rft-long-"))
    if args.tiny:
        args.host_gib = 4 * 16384 / 2**30
        parity(results, args, 64, 2, folder)
        one_step(results, args, 128, folder)
    elif args.parity:
        parity(results, args, 32768, None, folder)
        parity(results, args, 131072, 4, folder)
    else:
        one_step(results, args, args.tokens, folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
