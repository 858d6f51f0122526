"""`rft verify`: holds on a sound configuration, and each check fails where the thing that it guards is broken."""

from __future__ import annotations

import json

import pytest
import torch

from rft.config.root import Config
from rft.verify import checks
from rft.verify.check import largest_difference, measured
from rft.verify.small import make_small
from support.data import write_tiny_tokenizer
from support.tiny import tiny_llama, write_model


def config_for(folder, **tables) -> Config:
    model = tiny_llama(folder / "big", vocab_size=400)
    write_tiny_tokenizer(model)
    values = {"model": {"path": str(model)}, "data": {"train": [{"path": "rows.jsonl"}]}, **tables}
    return Config.model_validate(values)


@pytest.fixture
def lora(tmp_path):
    return make_small(config_for(tmp_path), tmp_path / "small", device="cpu")


@pytest.fixture
def full(tmp_path):
    return make_small(config_for(tmp_path, adapter={"name": "none"}), tmp_path / "small", device="cpu")


def lines(check, case) -> dict[str, str]:
    return {line.name: line.status for line in check(case)}


IN_PROCESS = [check for name, check in checks.CHECKS.items() if name != "two ranks"]


@pytest.mark.parametrize("check", IN_PROCESS, ids=lambda check: check.__name__)
def test_every_check_holds_for_lora(lora, check):
    found = lines(check, lora)
    assert found
    assert set(found.values()) == {"ok"}, found


@pytest.mark.parametrize("check", [checks.equals_transformers, checks.resumed_equals_uninterrupted])
def test_checks_of_saving_hold_for_full_fine_tuning(full, check):
    assert set(lines(check, full).values()) == {"ok"}


def test_checks_hold_for_a_mixture_of_experts_trained_in_full(tmp_path):
    from support.families import FAMILIES

    write_model(tmp_path / "big", FAMILIES["qwen3_moe"]())
    values = {
        "model": {"path": str(tmp_path / "big")},
        "adapter": {"name": "none"},
        "data": {"train": [{"path": "rows.jsonl"}]},
    }
    case = make_small(Config.model_validate(values), tmp_path / "small", device="cpu")
    for check in (checks.packed_equals_separate, checks.accumulation_is_exact):
        assert set(lines(check, case).values()) == {"ok"}


@pytest.mark.slow
def test_two_ranks_hold_for_lora(lora):
    assert set(lines(checks.two_ranks_equal_one, lora).values()) == {"ok"}


# ---- the checks can fail


def test_documents_that_see_each_other_are_found(lora, monkeypatch):
    from rft.models import attention

    def merged(row):
        return attention.Documents.from_lengths((sum(row.lengths),), row.cu_seqlens.device)

    monkeypatch.setattr(attention.Documents, "of", staticmethod(merged))
    monkeypatch.setattr(checks, "CHECKS", {"packed = separate": checks.packed_equals_separate})
    assert "FAILED" in {line.status for line in checks.run_checks(lora)}


def test_loss_that_is_divided_by_micro_batches_is_found(lora, monkeypatch):
    from rft.training import step

    real = step.count

    def per_pack(run, batch):
        return {**real(run, batch), "next_token": 1.0 * batch.num_packs}

    monkeypatch.setattr(step, "count", per_pack)
    monkeypatch.setattr(step, "sum_terms", lambda counts: _mean_of_means(list(counts)))
    assert "FAILED" in lines(checks.accumulation_is_exact, lora).values()


def _mean_of_means(counts):
    summed = {key: sum(c[key] for c in counts) for key in counts[0]}
    return {**summed, "next_token": float(len(counts))}


def test_optimizer_state_that_is_lost_on_resume_is_found(lora, monkeypatch):
    from rft.training import setup

    real = setup.resume_state

    def forgetful(run, checkpoint):
        real(run, checkpoint)
        for tensor in run.optimizer.named_state().values():
            tensor.zero_()

    monkeypatch.setattr(setup, "resume_state", forgetful)
    assert "FAILED" in lines(checks.resumed_equals_uninterrupted, lora).values()


def test_adapter_that_acts_although_it_is_off_is_found(lora, monkeypatch):
    from contextlib import contextmanager

    from peft import PeftModel

    @contextmanager
    def nothing(self):
        yield

    monkeypatch.setattr(PeftModel, "disable_adapter", nothing)
    found = lines(checks.equals_transformers, lora)
    assert found["adapter off = base in transformers"] == "FAILED"
    assert found["saved adapter in PEFT = live"] == "ok"


def test_refusal_becomes_a_failed_line_with_its_reason(lora, monkeypatch):
    from rft.errors import Refused

    def refused(case):
        raise Refused("data.packing", "cannot be packed here", do="set it to none")
        yield

    monkeypatch.setattr(checks, "CHECKS", {"packed = separate": refused})
    (line,) = checks.run_checks(lora)
    assert (line.status, line.name) == ("FAILED", "packed = separate")
    assert "cannot be packed here; do: set it to none" in line.note


# ---- parts


def test_model_with_dropout_is_compared_without_it(tmp_path):
    from transformers import GPT2Config

    config = GPT2Config(vocab_size=400, n_embd=32, n_layer=2, n_head=2, n_positions=256, resid_pdrop=0.3)
    write_tiny_tokenizer(write_model(tmp_path / "big", config))
    values = {"model": {"path": str(tmp_path / "big")}, "data": {"train": [{"path": "rows.jsonl"}]}}
    case = make_small(Config.model_validate(values), tmp_path / "small", device="cpu")
    small = json.loads((case.model / "config.json").read_text())
    assert (small["resid_pdrop"], small["attn_pdrop"], small["embd_pdrop"]) == (0, 0, 0)


def test_fp8_weights_and_attention_of_a_gpu_are_checked_in_fp32_and_told(tmp_path):
    values = config_for(tmp_path).model_dump()
    values["model"] |= {"base_weights": "fp8", "attention": "fa4"}
    case = make_small(Config.model_validate(values), tmp_path / "small", device="cpu")
    assert (case.config.model.base_weights, case.config.model.attention) == ("bf16", "auto")
    assert any("plain base weights" in note for note in case.notes)


def test_over_an_nf4_base_the_stock_model_is_what_the_codes_stand_for(tmp_path):
    values = config_for(tmp_path).model_dump()
    values["model"] |= {"base_weights": "nf4"}
    case = make_small(Config.model_validate(values), tmp_path / "small", device="cpu")
    assert case.config.model.base_weights == "nf4"
    assert case.base != case.model
    found = list(checks.equals_transformers(case))
    assert [c.status for c in found] == ["ok"] * 3, found


def test_differences_are_relative_and_an_unknown_name_is_infinite():
    one = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([1e-9])}
    assert largest_difference(one, one) == 0
    moved = {"a": torch.tensor([3.0, 4.5]), "b": torch.tensor([1e-9])}
    assert largest_difference(moved, one) == pytest.approx(0.1)
    # an all but zero tensor is measured against a thousandth of the largest
    assert largest_difference({**one, "b": torch.tensor([2e-9])}, one) < 1e-6
    assert largest_difference({"a": one["a"]}, one) == float("inf")


def test_error_that_is_no_number_fails():
    assert measured("x", float("nan"), 1.0).status == "FAILED"
    nan = {"a": torch.tensor([float("nan")])}
    assert measured("x", largest_difference(nan, {"a": torch.ones(1)}), 1.0).status == "FAILED"
