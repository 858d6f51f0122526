"""Memory that runs out in a step: the error says what takes it and what to do; a replanned step is the one that keeps everything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rft.config.load import load_config
from rft.errors import ConfigError, TrainingError
from rft.memory.tiled_mlp import _TiledForward
from rft.models.backbone import decoder_layers
from rft.training.replan import step_within_memory
from support.ranked import gathered, make_run, moments, packs, write_base


class OutOfMemory:
    """A device that is full: the MLP of the last layer raises the allocator's error until the model is in the given state."""

    def __init__(self, run: Any, fits: Any, exception: type[BaseException] = torch.OutOfMemoryError):
        self.count = 0
        self.layers = list(decoder_layers(run.model))
        self.fits, self.exception = fits, exception
        self.layers[-1].mlp.down_proj.register_forward_pre_hook(self._allocate)

    def _allocate(self, *_: object) -> None:
        if not self.fits(self.layers[-1]):
            self.count += 1
            raise self.exception(
                "CUDA out of memory. Tried to allocate 2.00 GiB. DefaultCPUAllocator: can't allocate memory"
            )


def recomputed(layer: Any) -> bool:
    return layer.gradient_checkpointing


def tiled(layer: Any) -> bool:
    return isinstance(layer.mlp.__dict__.get("forward"), _TiledForward) and layer.mlp.forward.tiles >= 4


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return write_base(tmp_path_factory.mktemp("oom") / "base")


def run_of(base: Path, folder: Path, **train: Any) -> Any:
    adapter = {"name": "lora", "r": 4, "dropout": 0.2}
    return make_run(
        base, folder, adapter=adapter, train={"precision": "fp32", "micro_batch": 1, "out": str(folder), **train}
    )


def three_steps(run: Any) -> list[float]:
    losses = []
    for number in range(3):
        batches = packs(2, seed=number)
        losses.append(float(step_within_memory(run, batches).terms["next_token"]))
        run.state.step += 1
    return losses


@pytest.mark.parametrize(
    ("fits", "plan", "exception"),
    [
        (recomputed, {"recompute": "selective"}, torch.OutOfMemoryError),
        (recomputed, {"recompute": "selective"}, RuntimeError),  # what torch raises for the machine's own memory
        (tiled, {"recompute": "full", "tiled_mlp": 4}, MemoryError),
    ],
)
def test_the_step_is_made_again_and_nothing_is_lost(base, tmp_path: Path, fits, plan, exception):
    plain = run_of(base, tmp_path / "plain")
    losses = three_steps(plain)
    run = run_of(base, tmp_path / "run", on_oom="replan")
    full = OutOfMemory(run, fits, exception)
    found = three_steps(run)
    assert full.count == (1 if fits is recomputed else 3), (
        "once for each plan that was too large, and in the first step alone"
    )
    assert {key: getattr(run.config.memory, key) for key in plan} == plan
    allowed = 0.0 if fits is recomputed else 1e-6  # pieces add their gradients in another order
    assert found == pytest.approx(losses, rel=allowed or 1e-15)
    for got, wanted in ((gathered(run), gathered(plain)), (moments(run), moments(plain))):
        assert got.keys() == wanted.keys()
        for name, value in wanted.items():
            torch.testing.assert_close(got[name], value, rtol=allowed * 100, atol=allowed * 10, msg=name)
    assert any("replanned" in item["what"] for item in run.receipts["applied"]), run.receipts


def test_where_no_plan_is_left_the_run_ends_with_what_takes_the_memory(base, tmp_path: Path):
    run = run_of(base, tmp_path / "run", on_oom="replan")
    full = OutOfMemory(run, lambda layer: False)
    with pytest.raises(TrainingError, match=r"ran out in step 1: CUDA out of memory(.|\n)*Largest: weights") as error:
        three_steps(run)
    assert full.count > 3
    assert "lower data.seq_len" in str(error.value)


def test_without_it_the_first_error_ends_the_run_and_names_the_next_key(base, tmp_path: Path):
    run = run_of(base, tmp_path / "run")
    full = OutOfMemory(run, lambda layer: False)
    with pytest.raises(TrainingError, match=r'set memory.recompute = "selective"; the same command goes on'):
        three_steps(run)
    assert full.count == 1


def test_what_the_config_gives_is_not_changed(base, tmp_path: Path):
    run = make_run(
        base, tmp_path / "run", train={"precision": "fp32", "micro_batch": 1, "on_oom": "replan"},
        memory={"recompute": "none", "tiled_mlp": 1}, loss={"chunk_rows": 64},
    )  # fmt: skip
    OutOfMemory(run, lambda layer: False)
    with pytest.raises(TrainingError, match="ran out in step 1"):
        three_steps(run)
    assert run.config.memory.recompute == "none"


def test_another_error_is_no_matter_of_memory(base, tmp_path: Path):
    run = run_of(base, tmp_path / "run", on_oom="replan")

    def broken(*_: object) -> None:
        raise RuntimeError("shapes do not match")

    next(iter(decoder_layers(run.model))).register_forward_pre_hook(broken)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        three_steps(run)


def test_memory_that_runs_out_in_the_update_is_not_tried_again(base, tmp_path: Path, monkeypatch):
    run = run_of(base, tmp_path / "run", on_oom="replan")
    tried = []

    def update(*_: object, **__: object) -> None:
        tried.append(1)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(run.optimizer.param_groups[0]["rule"], "update", update)
    with pytest.raises(TrainingError, match="ran out in step 1"):
        three_steps(run)
    assert tried == [1]


def test_it_is_refused_with_an_update_in_backward(tmp_path: Path):
    (tmp_path / "rows.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match="has changed some weights"):
        load_config(
            {"model": {"path": "org/model"}, "data": {"train": [{"path": str(tmp_path / "rows.jsonl")}]},
             "optim": {"in_backward": True}, "train": {"on_oom": "replan", "max_grad_norm": "none"}}
        )  # fmt: skip
