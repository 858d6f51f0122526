"""A small case of somebody's config: a random model of its architecture, rows of uneven lengths, the same options."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from rft.checkpoint.load import Checkpoint
from rft.checkpoint.merge import linear_files
from rft.config.adapter import LoraConfig
from rft.config.model import ModelConfig
from rft.config.root import Config
from rft.models.bitsandbytes_files import RoundedReader
from rft.models.load import find_model
from rft.models.shrink import build_small
from rft.parallel.mesh import World, join_world
from rft.training.loop import advance, steps_left
from rft.training.run import Run
from rft.training.setup import add_data, build_run, inspect_job
from rft.training.step import train_step

SEQ_LEN = 64
NUM_ROWS = 28
ALL_PACKS = 64
"""More packs than the rows fill: a step of so many takes the whole epoch."""
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass
class Small:
    """Where the small case lies, and the config that trains it."""

    folder: Path
    config: Config
    device: str | None = None
    """None: what training would take here."""
    notes: list[str] = field(default_factory=list)

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def base(self) -> Path:
        """The model that adapters lie on: what a base in fewer bits stands for, where that is trained over."""
        rounded = self.folder / "model-rounded"
        return rounded if rounded.is_dir() else self.model

    @property
    def has_adapter(self) -> bool:
        return isinstance(self.config.adapter, LoraConfig)

    def changed(self, **tables: dict[str, Any]) -> Config:
        """The config with keys of some tables changed."""
        return changed(self.config, **tables)

    def build(
        self, name: str, *, world: World | None = None, checkpoint: Checkpoint | None = None, **tables: Any
    ) -> Run:
        """A Run that is ready for its next step, by the same way as `rft train`."""
        run_dir = self.folder / "runs" / name
        run_dir.mkdir(parents=True, exist_ok=True)
        job = inspect_job(self.changed(**tables), world or join_world(self.device))
        add_data(job, None)
        return build_run(job, run_dir, checkpoint)


def make_small(config: Config, folder: Path, *, device: str | None = None) -> Small:
    """Write model, tokenizer and rows into `folder`. Raises Refused where the architecture has no small copy."""
    source = find_model(config.model)
    _write_model(source.config, folder / "model", trust_remote_code=config.model.trust_remote_code)
    _write_tokenizer(folder / "model")
    if config.model.base_weights in ("nf4", "int8"):
        _write_rounded(folder / "model", folder / "model-rounded", config.model.base_weights)
    _write_rows(folder / "rows.jsonl")
    case = Small(folder, config, device)
    adapter: dict[str, Any] = {}
    if isinstance(config.adapter, LoraConfig):
        adapter = {"path": None, "r": min(config.adapter.r, 4), "dropout": 0.0}
        if isinstance(config.adapter.targets, list) and any(
            any(c.isdigit() for c in t) for t in config.adapter.targets
        ):
            adapter["targets"] = "all-linear"  # names of single layers: the small copy has fewer
            case.notes.append("adapter.targets names single layers; checked with all-linear")
    attention, base = config.model.attention, config.model.base_weights
    if base == "fp8" or attention not in ("auto", "sdpa", "math"):
        case.notes.append("checked in fp32: with plain base weights, and attention that computes in it")
        attention = "auto"
    plain = {"attention": attention, "base_weights": "bf16" if base == "fp8" else base}
    case.config = changed(
        config,
        model={"path": str(folder / "model"), "revision": None, "add_tokens": [], "rope": {}, **plain},
        adapter=adapter,
        data={
            "train": [{"path": str(folder / "rows.jsonl"), "format": "prompt_completion"}],
            "eval": [],
            "eval_fraction": 0.0,
            "seq_len": SEQ_LEN,
            "overlong": "split",
            "template": "model",
            "store": str(folder / "sets"),
        },
        loss={"chunk_rows": 16},
        optim={
            "lr": 3e-3,
            "schedule": {"name": "constant", "warmup_steps": 0},
            "groups": [],
            "in_backward": False,
        },
        train={
            "precision": "fp32",
            "master": "float32",
            "micro_batch": 1,
            "accumulate": 2,
            "tokens_per_step": None,
            "epochs": 4.0,
            "max_steps": None,
            "max_grad_norm": "none",
            "eval_every_steps": None,
            "early_stop": None,
            "deterministic": True,
            "out": str(folder / "runs" / "out"),
        },
        checkpoint={"save_every_steps": None, "final": "last"},
        log={"trackers": []},
    )
    return case


def changed(config: Config, **tables: dict[str, Any]) -> Config:
    """A config with keys of some tables replaced, validated again."""
    values = config.model_dump()
    for table, keys in tables.items():
        values[table] = {**values[table], **keys}
    return Config.model_validate(values)


def _write_model(config: Any, folder: Path, *, trust_remote_code: bool) -> None:
    model = build_small(without_dropout(config), "cpu", trust_remote_code=trust_remote_code)
    model.save_pretrained(folder)


def _write_rounded(model: Path, out: Path, kind: Literal["nf4", "int8"]) -> None:
    """The same folder with what its linears are after quantising."""
    from safetensors.torch import save_file

    shutil.copytree(model, out)
    config = ModelConfig(path=str(model))
    source = find_model(config)
    reader = RoundedReader(source.reader, linear_files(source, config), kind)
    save_file(
        {name: reader.read(name).contiguous() for name in reader.names()},
        out / "model.safetensors",
        metadata={"format": "pt"},
    )


def without_dropout(config: Any) -> Any:
    """The architecture's config with every dropout at zero: two draws of noise have no parity."""
    values = config.to_dict()
    noisy = {
        k: 0.0
        for k, v in values.items()
        if isinstance(v, float) and ("dropout" in k or "pdrop" in k or k == "layerdrop")
    }
    return type(config).from_dict({**values, **noisy})


def _write_tokenizer(folder: Path) -> None:
    """Letters and the space as tokens, and the three control tokens at the ids that small copies give them."""
    special = ["<pad>", "<bos>", "<eos>"]
    vocabulary = {token: i for i, token in enumerate([*special, "Ġ", *_LETTERS])}
    added = [
        {"id": i, "content": token, "special": True, "normalized": False, "single_word": False, "lstrip": False, "rstrip": False}
        for i, token in enumerate(special)
    ]  # fmt: skip
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": vocabulary, "merges": []},
    }  # fmt: skip
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def _write_rows(path: Path) -> None:
    """Prompts that are masked and completions that are trained, both of very uneven lengths."""
    pick = random.Random(0)

    def text(longest: int) -> str:
        return "".join(pick.choice(_LETTERS + "  ") for _ in range(pick.randint(1, longest))).strip() or "a"

    rows = [{"prompt": text(18), "completion": " " + text(36)} for _ in range(NUM_ROWS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


# ---- running it


class _Silent:
    """Stands where the loop has its recorder."""

    def step_begins(self, data_seconds: float) -> None:
        pass


def run_steps(run: Run, until: int) -> list[float]:
    """Train to step `until` as the loop does, without evaluation, checkpoints or anything on the terminal. Losses of the steps."""
    losses = []
    for micro_batches in steps_left(run, _Silent()):  # type: ignore[arg-type]
        result = train_step(run, micro_batches)
        advance(run, result.counts)
        losses.append(float(sum(result.terms.values())))
        if run.state.step >= until:
            break
    run.loader.close()
    return losses


class _Catcher:
    """Takes the optimizer's place in one step: keeps the gradients and updates nothing."""

    in_backward = False

    def __init__(self, run: Run):
        self._named = [(name, p) for name, p in run.trainee.named_parameters() if p.requires_grad]
        self.parameters = [p for _, p in self._named]
        self.gradients: dict[str, Tensor] = {}

    def step(self, scale: object = None) -> None:
        self.gradients = {name: p.grad.detach().float().cpu().clone() for name, p in self._named if p.grad is not None}

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


def gradients_of_a_step(run: Run) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of the run's next step, by `train_step`; nothing is updated."""
    catcher = _Catcher(run)
    optimizer, run.optimizer = run.optimizer, catcher  # type: ignore[assignment]
    try:
        batches = next(iter(run.loader.steps(0, run.packs_per_step)))
        result = train_step(run, batches)
    finally:
        run.optimizer = optimizer
        run.loader.close()
    return float(sum(result.terms.values())), catcher.gradients


@torch.no_grad()
def move_adapters(run: Run) -> None:
    """Give trained tensors values that matter: a LoRA starts at zero, where half of its gradients vanish."""
    for number, (name, parameter) in enumerate(run.trainee.named_parameters()):
        if parameter.requires_grad and "lora_" in name:
            generator = torch.Generator().manual_seed(number)
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator).to(parameter))


@torch.no_grad()
def loss_sum(run: Run) -> float:
    """Loss over the whole set, as a sum over labels, by the trainee in evaluation mode."""
    run.trainee.eval()
    total = 0.0
    for batches in run.loader.steps(0, run.packs_per_step):
        for batch in batches:
            total += float(run.trainee(batch)["next_token"])
    run.trainee.train()
    run.loader.close()
    return total


def documents_of(run: Run) -> Iterator[tuple[Tensor, Tensor]]:
    """Ids [1, T] and labels [T] of every document in the epoch's plan, alone, on the CPU."""
    for batches in run.loader.steps(0, run.packs_per_step):
        for batch in batches:
            ids, labels = batch.input_ids[0].cpu(), batch.labels[0].cpu()
            start = 0
            for length in batch.lengths:
                if bool((labels[start : start + length] != -100).any()):
                    yield ids[None, start : start + length].clone(), labels[start : start + length].clone()
                start += length
    run.loader.close()


@torch.no_grad()
def stock_loss_sum(model: Any, documents: list[tuple[Tensor, Tensor]]) -> float:
    """The same sum by a stock transformers or PEFT model, each document alone."""
    model.eval()
    total = 0.0
    for ids, labels in documents:
        logits = model(input_ids=ids, use_cache=False).logits[0].float()
        total += float(torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum"))
    return total
