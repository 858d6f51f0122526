"""A `Run` around a model of a few numbers and hand-made packs: the loop without transformers and without the data engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from rft.config.root import Config
from rft.data.batch import Batch
from rft.losses import SftLoss
from rft.optim import Schedule
from rft.optim.build import build
from rft.training.run import Run
from rft.training.state import TrainState
from rft.training.trainee import Trainee

VOCABULARY, HIDDEN = 17, 8


def pack(
    ids: Sequence[int],
    *,
    labelled: Sequence[bool] | None = None,
    weights: Sequence[float] | None = None,
    size: int | None = None,
) -> Batch:
    """One document in one pack, filled up to `size`. labelled: per token, whether it is a target of the one before."""
    size = size or len(ids)
    labelled = labelled or [True] * len(ids)
    labels = [ids[i + 1] if labelled[i + 1] else -100 for i in range(len(ids) - 1)] + [-100] * (len(ids) > 0)
    fill = size - len(ids)
    lengths = tuple(length for length in (len(ids), fill) if length)
    count = sum(label != -100 for label in labels)
    token_weights = None
    if weights is not None:
        token_weights = torch.tensor([list(weights) + [0.0] * fill])
    weight = (
        float(count) if weights is None else sum(w for w, label in zip(weights, labels, strict=True) if label != -100)
    )
    return Batch(
        input_ids=torch.tensor([list(ids) + [0] * fill]),
        labels=torch.tensor([labels + [-100] * fill]),
        position_ids=torch.tensor([list(range(len(ids))) + list(range(fill))]),
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).int(),
        weights=token_weights,
        lengths=lengths,
        pack_tokens=(len(ids),),
        num_tokens=len(ids),
        num_label_tokens=count,
        label_weight=weight,
    )


def join(batches: Sequence[Batch]) -> Batch:
    """Several packs end to end, as `micro_batch` > 1 makes them."""
    lengths = tuple(length for batch in batches for length in batch.lengths)
    ends = torch.tensor([0, *lengths]).cumsum(0).int().to(batches[0].input_ids.device)
    return Batch(
        input_ids=torch.cat([b.input_ids for b in batches], 1),
        labels=torch.cat([b.labels for b in batches], 1),
        position_ids=torch.cat([b.position_ids for b in batches], 1),
        cu_seqlens=ends,
        weights=None,
        lengths=lengths,
        pack_tokens=tuple(n for b in batches for n in b.pack_tokens),
        num_tokens=sum(b.num_tokens for b in batches),
        num_label_tokens=sum(b.num_label_tokens for b in batches),
        label_weight=sum(b.label_weight for b in batches),
    )


class TinyModel(nn.Module):
    """Embedding, one linear, head: enough for real gradients. A token's hidden state depends on itself alone."""

    def __init__(self, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.linear = nn.Linear(HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def backbone(self, batch: Batch) -> tuple[Tensor, None]:
        return torch.tanh(self.linear(self.embed(batch.input_ids[0]))), None

    def loss_sums(
        self, hidden_TD: Tensor, labels: Tensor, weights: Tensor | None = None, *, num_label_tokens: int | None = None
    ) -> dict[str, Tensor]:
        logits = self.head(hidden_TD).float()
        each = nn.functional.cross_entropy(logits, labels, reduction="none", ignore_index=-100)
        return {"next_token": (each if weights is None else each * weights).sum()}


class StubLoader:
    """Packs in a fixed order, `packs_per_step` a step, as `rft.data.loader.Loader` deals them to one rank."""

    def __init__(self, packs: Sequence[Batch], micro_batch: int = 1):
        self.packs, self.micro_batch = list(packs), micro_batch

    def plan(self, epoch: int) -> Any:
        return SimpleNamespace(hash=f"stub-{len(self.packs)}-{epoch}", num_packs=len(self.packs))

    def steps_in_epoch(self, epoch: int, packs_per_step: int) -> int:
        return -(-len(self.packs) // packs_per_step)

    def steps(self, epoch: int, packs_per_step: int, start_step: int = 0) -> Iterator[list[Batch]]:
        for start in range(start_step * packs_per_step, len(self.packs), packs_per_step):
            packs = self.packs[start : min(start + packs_per_step, len(self.packs))]
            yield [join(packs[i : i + self.micro_batch]) for i in range(0, len(packs), self.micro_batch)]

    def close(self) -> None:
        pass


def stub_config(tmp_path: Path, **tables: dict[str, Any]) -> Config:
    """A resolved config; tables change single keys."""
    base: dict[str, dict[str, Any]] = {
        "model": {"path": "stub", "attention": "sdpa"},
        "adapter": {"name": "none"},
        "data": {"train": [{"path": "stub.jsonl"}], "seq_len": 8},
        "optim": {"lr": 1e-2, "schedule": {"name": "constant", "warmup_steps": 0}},
        "parallel": {"data": "replicate"},
        "train": {
            "precision": "fp32", "micro_batch": 1, "accumulate": 1, "deterministic": True, "out": str(tmp_path / "run"),
        },
        "checkpoint": {"final": "last"},
    }  # fmt: skip
    for table, changes in tables.items():
        base[table] = {**base.get(table, {}), **changes}
    return Config.model_validate(base)


def stub_run(
    tmp_path: Path,
    packs: Sequence[Batch],
    *,
    eval_packs: Sequence[Batch] = (),
    packs_per_step: int = 1,
    total_steps: int | None = None,
    model: nn.Module | None = None,
    **tables: dict[str, Any],
) -> Run:
    """A run that `train`, `train_step` and `evaluate` take, on the CPU in fp32."""
    config = stub_config(tmp_path, **tables)
    model = model or TinyModel(config.train.seed)
    losses = SftLoss()
    trainee = Trainee(model, model.backbone, model, losses)  # type: ignore[union-attr, arg-type]
    named = [(n, p) for n, p in trainee.named_parameters() if p.requires_grad]
    optimizer = build(named, config.optim)
    loader = StubLoader(packs, config.train.micro_batch)  # type: ignore[arg-type]
    steps = total_steps or loader.steps_in_epoch(0, packs_per_step)
    run_dir = Path(config.train.out or tmp_path)
    run_dir.mkdir(parents=True, exist_ok=True)
    return Run(
        config=config,
        decisions=[],
        run_dir=run_dir,
        device=torch.device("cpu"),
        model=model,
        trainee=trainee,
        losses=losses,
        optimizer=optimizer,
        schedule=Schedule(config.optim.schedule, steps, optimizer.param_groups),
        loader=loader,  # type: ignore[arg-type]
        eval_loader=StubLoader(eval_packs) if eval_packs else None,  # type: ignore[arg-type]
        packs_per_step=packs_per_step,
        total_steps=steps,
        source=SimpleNamespace(reader=SimpleNamespace(names=list)),  # type: ignore[arg-type]
        tokenizer=SimpleNamespace(),  # type: ignore[arg-type]
        state=TrainState(packs_per_step=packs_per_step, total_steps=steps),
    )
