"""The oracle of training: transformers and PEFT in a plain loop, every document a row of its own, no code of rft's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rft.data.batch import Batch


@dataclass(frozen=True)
class Reference:
    """What the plain loop gave, step by step, and the model it ended with."""

    losses: list[float]
    grad_norms: list[float]
    model: Any


def documents(batch: Batch) -> Iterator[tuple[Tensor, Tensor]]:
    """(ids, labels) of every document of a packed row, cut out by its boundaries. labels: as in the batch, shifted."""
    ends = batch.cu_seqlens.tolist()
    for start, end in pairwise(ends):
        labels = batch.labels[0, start:end]
        if (labels != -100).any():
            yield batch.input_ids[0, start:end], labels


def padded_rows(batches: Sequence[Batch], most_tokens: int) -> Iterator[tuple[Tensor, Tensor]]:
    """(ids, labels) [rows, longest] of every document of these packs, the longest first, filled up at the right, `most_tokens` with that at
    most in one. No real token sees what it is filled up with, which has no labels: attention is causal."""
    found = sorted((pair for batch in batches for pair in documents(batch)), key=lambda pair: -len(pair[0]))
    while found:
        longest = len(found[0][0])
        part, found = found[: max(1, most_tokens // longest)], found[max(1, most_tokens // longest) :]
        ids, labels = torch.zeros(len(part), longest, dtype=torch.int64), torch.full((len(part), longest), -100)
        for row, (own, own_labels) in enumerate(part):
            ids[row, : len(own)], labels[row, : len(own)] = own, own_labels
        yield ids, labels


def train_reference(
    model_dir: str | Path,
    steps: Sequence[Sequence[Batch]],
    rates: Sequence[float],
    *,
    lora: dict[str, Any] | None = None,
    initial: dict[str, Tensor] | None = None,
    weight_decay: float = 0.0,
    max_grad_norm: float = 1.0,
    device: str = "cpu",
    most_tokens: int = 1,
) -> Reference:
    """Train in fp32 on the packs of `steps`, unpacked again, at the given rates.

    lora: keyword arguments of PEFT's LoraConfig, None = full fine-tuning. initial: adapter weights to start from, by the
    names that `PeftModel.named_parameters()` gives. most_tokens: documents share a forward of so many tokens, filled up
    at the right; 1 = every document alone. Nothing waits for the device inside a run: losses and norms are read at its end.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager")
    if lora is not None:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **lora))
        own = dict(model.named_parameters())
        with torch.no_grad():
            for name, tensor in (initial or {}).items():
                own[name].copy_(tensor)
    model.to(device).train()
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    matrices = [p for n, p in trained if p.ndim >= 2 and "embed" not in n]
    others = [p for n, p in trained if not (p.ndim >= 2 and "embed" not in n)]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=1.0, betas=(0.9, 0.999), eps=1e-8)
    losses: list[Tensor] = []
    norms: list[Tensor] = []
    for micro_batches, rate in zip(steps, rates, strict=True):
        on_host = [batch.to("cpu") for batch in micro_batches]
        total = sum(int((batch.labels != -100).sum()) for batch in on_host)
        loss = torch.zeros((), dtype=torch.float64, device=device)
        for ids, labels in padded_rows(on_host, most_tokens):
            logits = model(input_ids=ids.to(device), use_cache=False).logits.float()
            targets = labels.to(device).flatten()
            part = (
                torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets, ignore_index=-100, reduction="sum")
                / total
            )
            part.backward()
            loss += part.detach()
        norms.append(torch.nn.utils.clip_grad_norm_([p for _, p in trained], max_grad_norm))
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    return Reference([float(t) for t in losses], [float(t) for t in norms], model)
