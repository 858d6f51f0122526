"""Packed rows of random documents, as a `Batch`."""

from __future__ import annotations

import torch

from rft.data.batch import Batch


def packed_batch(
    *documents: torch.Tensor,
    fill: int = 0,
    labelled: bool = True,
    pad_id: int = 0,
    weights: torch.Tensor | None = None,
) -> Batch:
    """One pack of the documents end to end, then `fill` positions of fill-up; labels are the next token of the same document."""
    lengths = [len(d) for d in documents] + ([fill] if fill else [])
    ids = torch.cat([*documents, torch.full((fill,), pad_id)]).long()
    labels = torch.full_like(ids, -100)
    at = 0
    for document in documents if labelled else ():
        labels[at : at + len(document) - 1] = document[1:]
        at += len(document)
    positions = torch.cat([torch.arange(n) for n in lengths])
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    kept = labels != -100
    total = float(kept.sum()) if weights is None else float(weights[kept].sum())
    real = sum(len(d) for d in documents)
    return Batch(
        ids[None],
        labels[None],
        positions[None],
        ends,
        None if weights is None else weights[None],
        tuple(lengths),
        (real,),
        real,
        int(kept.sum()),
        total,
    )


def random_documents(*lengths: int, vocabulary: int = 128, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocabulary, (n,), generator=generator) for n in lengths]
