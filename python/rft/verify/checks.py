"""The checks, in the order in which they are shown. Each builds what it needs from the small case and yields its lines."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from torch import Tensor

from rft import log
from rft.checkpoint.load import find_latest, read_tensors
from rft.checkpoint.merge import merge
from rft.config.model import ModelConfig
from rft.config.show import to_toml
from rft.errors import RftError
from rft.losses import SftLoss
from rft.models.surgery import ALLOWED_RATIO, RATIO
from rft.parallel.mesh import join_world
from rft.training.finish import write_final
from rft.training.state import save_state
from rft.verify.check import FP32, Check, largest_difference, measured, relative, skipped
from rft.verify.small import (
    ALL_PACKS,
    Small,
    documents_of,
    gradients_of_a_step,
    loss_sum,
    move_adapters,
    run_steps,
    stock_loss_sum,
)

STEPS, STOP_AFTER = 7, 3
"""Of the resumed run: over the border of an epoch, stopped inside one."""
_RANKS_TIMEOUT_SECONDS = 300

# The surgery's own limits (models/surgery.py): bf16 may flip single roundings and no more.
_SWAP_ALLOWED = {"fp32": 1e-5, "bf16": 5e-4, f"{RATIO}bf16": ALLOWED_RATIO}


def packed_equals_separate(case: Small) -> Iterator[Check]:
    """Documents that share a row against each document alone: loss and every gradient of one step over all rows."""
    packing = case.config.data.packing
    if packing == "none":
        yield skipped("packed = separate", 'data.packing is "none": no document shares a row')
        return
    whole_epoch = {"micro_batch": 1, "accumulate": ALL_PACKS}
    packed = case.build("packed", train=whole_epoch)
    alone = case.build("alone", train=whole_epoch, data={"packing": "none"})
    for run in (packed, alone):
        move_adapters(run)
        # without the router's balance loss, which is one of packs by definition; evaluation leaves it out
        run.losses = SftLoss()
        run.trainee.eval()
    loss, gradients = gradients_of_a_step(packed)
    reference, reference_gradients = gradients_of_a_step(alone)
    yield measured("packed = separate, loss", relative(loss, reference), FP32)
    yield measured("packed = separate, gradients", largest_difference(gradients, reference_gradients), FP32)


def swapped_equal_originals(case: Small) -> Iterator[Check]:
    """What surgery replaced, by the errors that it measured on this architecture's own modules."""
    run = case.build("swaps")
    shown = False
    for entry in run.receipts.get("applied", []):
        for kind, allowed in _SWAP_ALLOWED.items():
            parts = ("forward", "gradient") if kind == "fp32" else ("forward",)
            errors = [
                error
                for label, error in entry["checked"].items()
                if label.startswith(kind) and any(part in label for part in parts)
            ]
            if errors:
                shown = True
                yield measured(
                    f"{entry['what']} = original, {kind}", max(errors), allowed, f"{entry['count']}/{entry['of']}"
                )
    if not shown:
        yield skipped("swapped modules = originals", "no module is swapped in this model")


def equals_transformers(case: Small) -> Iterator[Check]:
    """rft's forward against stock transformers and PEFT: the base, what is saved, and what is merged."""
    from transformers import AutoModelForCausalLM

    def stock(path: Path):
        return AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype="float32")

    run = case.build("stock", train={"accumulate": ALL_PACKS})
    documents = list(documents_of(run))
    base = stock_loss_sum(stock(case.base), documents)
    if not case.has_adapter:
        yield measured("loss = transformers", relative(loss_sum(run), base), FP32)
        run_steps(run, 2)
        write_final(run)
        yield measured(
            "saved model in transformers = live",
            relative(stock_loss_sum(stock(run.run_dir / "final"), documents), loss_sum(run)),
            FP32,
        )
        return
    move_adapters(run)
    with run.model.disable_adapter():  # type: ignore[operator]
        yield measured("adapter off = base in transformers", relative(loss_sum(run), base), FP32)
    live = loss_sum(run)
    write_final(run)
    from peft import PeftModel

    loaded = PeftModel.from_pretrained(stock(case.base), run.run_dir / "final")
    yield measured("saved adapter in PEFT = live", relative(stock_loss_sum(loaded, documents), live), FP32)
    merge(run.run_dir / "final", run.run_dir / "merged", base=ModelConfig(path=str(case.base)))
    merged = stock_loss_sum(stock(run.run_dir / "merged"), documents)
    yield measured("merged adapter = adapter on", relative(merged, live), FP32)


def accumulation_is_exact(case: Small) -> Iterator[Check]:
    """Eight packs at once against eight, one after the other, with uneven numbers of labels."""
    name = "1 x 8 = 8 x 1 accumulation"
    if case.config.data.packing == "none":
        case.notes.append("accumulation is checked with packs of several documents")
    runs = []
    for at_once in (8, 1):
        sizes = {"micro_batch": at_once, "accumulate": 8 // at_once}
        runs.append(case.build(f"accumulate-{at_once}", train=sizes))
    for run in runs:
        move_adapters(run)
    (loss, gradients), (reference, reference_gradients) = map(gradients_of_a_step, runs)
    yield measured(f"{name}, loss", relative(loss, reference), FP32)
    yield measured(f"{name}, gradients", largest_difference(gradients, reference_gradients), FP32)


def resumed_equals_uninterrupted(case: Small) -> Iterator[Check]:
    """Stopped inside an epoch, saved, loaded in a new run and trained on, against one that ran through: bit for bit."""
    through = case.build("through")
    losses = run_steps(through, STEPS)
    stopped = case.build("stopped")
    first = run_steps(stopped, STOP_AFTER)
    save_state(stopped, "rft verify")
    checkpoint = find_latest(stopped.run_dir)
    assert checkpoint is not None
    with log.quiet():  # it would say where it goes on from
        resumed = case.build("stopped", checkpoint=checkpoint)
    rest = run_steps(resumed, STEPS)
    differences = [relative(a, b) for a, b in zip([*first, *rest], losses, strict=True)]
    yield measured("resumed = uninterrupted, losses", max(differences), 0.0)
    error = largest_difference(resumed.optimizer.named_masters(), through.optimizer.named_masters())
    yield measured("resumed = uninterrupted, weights", error, 0.0)


def two_ranks_equal_one(case: Small) -> Iterator[Check]:
    """Two processes on this machine's CPU against one: the trained weights after a few steps."""
    mode = case.config.parallel.data
    mode = "replicate" if mode == "auto" else mode
    name = f"two gloo ranks = one, {mode}"
    sizes = {"max_steps": 4, "accumulate": 4, "micro_batch": 1}
    one = case.build("one-rank", world=join_world("cpu"), train=sizes)
    run_steps(one, 4)
    out = case.folder / "runs" / "two-ranks"
    config = case.changed(train={**sizes, "accumulate": 2, "out": str(out)}, parallel={"data": mode})
    toml = case.folder / "two-ranks.toml"
    toml.write_text(to_toml(config), encoding="utf-8")
    command = [sys.executable, "-P", "-m", "rft", "train", str(toml), "--cpu-ranks", "2", "-q"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_RANKS_TIMEOUT_SECONDS, env=environment, check=False
        )
    except subprocess.TimeoutExpired:
        yield Check(name, None, FP32, "FAILED", f"no end after {_RANKS_TIMEOUT_SECONDS} s")
        return
    checkpoint = find_latest(out) if done.returncode == 0 else None
    if checkpoint is None:
        words = (done.stderr or done.stdout).strip().splitlines()
        yield Check(name, None, FP32, "FAILED", words[0] if words else f"exit status {done.returncode}")
        return
    ours: dict[str, Tensor] = read_tensors(checkpoint, "model")
    reference = {key: tensor.detach() for key, tensor in one.optimizer.named_masters().items()}
    # After AdamW's first step an element moves by the rate whatever its gradient's size, so rounding of a gradient near
    # zero can flip one: a hundred times the limit of a gradient, and still a thousandth of a step's size.
    yield measured(f"{name}, weights", largest_difference(ours, reference), 100 * FP32)


CHECKS: dict[str, Callable[[Small], Iterator[Check]]] = {
    "packed = separate": packed_equals_separate,
    "swapped modules = originals": swapped_equal_originals,
    "transformers": equals_transformers,
    "accumulation": accumulation_is_exact,
    "resume": resumed_equals_uninterrupted,
    "two ranks": two_ranks_equal_one,
}


def run_checks(case: Small) -> Iterator[Check]:
    """Every check's lines as they come. One that is refused or stopped by an error is FAILED with what was said."""
    for name, check in CHECKS.items():
        try:
            yield from check(case)
        except RftError as error:
            yield Check(name, None, None, "FAILED", str(error).replace("\n", "; "))
