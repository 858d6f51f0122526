"""A frozen base in NF4 or int8: quantised as it is read, trained over, saved and merged as any other; 4-bit checkpoints read as they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rft.checkpoint.merge import merge
from rft.config.model import ModelConfig
from rft.errors import ModelError
from rft.kernels import nf4
from rft.models.load import build_meta, materialise
from rft.models.source import find_model
from rft.quant.packed import PackedLinear, place
from rft.training.step import train_step
from support.data import write_tiny_tokenizer
from support.model_run import model_run, random_packs
from support.tiny import tiny_llama


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_llama(folder, vocab_size=400, layers=2, tied=True)
    return write_tiny_tokenizer(folder)


@pytest.mark.parametrize(("held", "bits", "error"), [("nf4", 4.6, (0.05, 0.12)), ("int8", 9.2, (0.001, 0.02))])
def test_training_over_a_packed_base_follows_the_plain_one_with_a_receipt(model_dir, tmp_path, held, bits, error):
    packs = random_packs(4, seq_len=24)
    losses = {}
    for base in ("bf16", held):
        run = model_run(
            model_dir, tmp_path / base, packs, packs_per_step=2, model={"base_weights": base}, optim={"lr": 2e-3}, train={"precision": "fp32"},
            adapter={"name": "lora", "r": 4},
        )  # fmt: skip
        losses[base] = [float(train_step(run, packs[i : i + 2]).terms["next_token"]) for i in (0, 2)]
    assert losses[held] == pytest.approx(losses["bf16"], rel=3e-2)
    assert losses[held] != losses["bf16"]
    packed = [m for m in run.model.modules() if isinstance(m, PackedLinear)]
    assert len(packed) == 14
    assert not any(p.is_meta for p in (*run.model.parameters(), *run.model.buffers()))
    (applied,) = [a for a in run.receipts["applied"] if a["what"] == f"{held} base"]
    assert (applied["count"], applied["of"]) == (14, 14)
    assert error[0] < applied["checked"]["largest relative error of a weight"] < error[1]
    numbers = sum(m.in_features * m.out_features for m in packed)
    assert sum(b.nbytes for m in packed for b in m.buffers()) * 8 / numbers < bits
    assert all(float(t.abs().max()) > 0 for n, t in run.optimizer.named_masters().items() if "lora_B" in n)


class Watched:
    """A reader that notes what is asked of it."""

    def __init__(self, inner):
        self.inner, self.asked = inner, []

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def read(self, name, part=None):
        self.asked.append(name)
        return self.inner.read(name, part)


def packed_model(source, kind="nf4"):
    model = build_meta(source, ModelConfig(path=str(source.path)), torch.float32).requires_grad_(False)
    place(model, list(model.model.layers), kind)
    return materialise(model, source, "cpu")


def as_bitsandbytes(model_dir: Path, out: Path, **changes) -> Path:
    """The folder with its linears as bitsandbytes saves them."""
    functional = pytest.importorskip("bitsandbytes.functional")
    out.mkdir()
    for file in model_dir.iterdir():
        if file.suffix != ".safetensors":
            (out / file.name).write_bytes(file.read_bytes())
    tensors = {}
    for name, tensor in load_file(model_dir / "model.safetensors").items():
        if "proj" not in name:
            tensors[name] = tensor
            continue
        codes, state = functional.quantize_4bit(tensor, blocksize=64, quant_type="nf4", compress_statistics=True)
        tensors[name] = codes
        for key, value in state.as_dict(packed=True).items():
            tensors[f"{name}.{key}"] = value.contiguous()
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, **changes,
    }  # fmt: skip
    (out / "config.json").write_text(json.dumps(config))
    return out


def test_a_4_bit_checkpoint_gives_its_own_codes_and_can_be_dequantised(model_dir, tmp_path):
    folder = as_bitsandbytes(model_dir, tmp_path / "nf4")
    source = find_model(ModelConfig(path=str(folder)))
    model = packed_model(source)
    stored = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.down_proj"
    linear = model.get_submodule(name)
    assert torch.equal(linear.codes.view(-1), stored[f"{name}.weight"].view(-1))
    assert torch.equal(linear.scales, stored[f"{name}.weight.absmax"])
    plain = build_meta(source, ModelConfig(path=str(folder)), torch.float32)
    materialise(plain, source, "cpu")
    assert torch.equal(plain.get_submodule(name).weight, linear.weight)
    # what is quantised here from the original is the same but for scales beside a border
    ours = packed_model(find_model(ModelConfig(path=str(model_dir)))).get_submodule(name)
    assert torch.equal(ours.codes, linear.codes)
    assert (ours.weight - linear.weight).norm() < 1e-2 * linear.weight.norm()


def test_other_quantised_checkpoints_are_refused_by_name(model_dir, tmp_path):
    folder = as_bitsandbytes(model_dir, tmp_path / "gptq")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="gptq"):
        find_model(ModelConfig(path=str(folder)))


def test_a_weight_is_read_once_and_one_at_a_time(model_dir):
    """Peak memory is the quantised base and one weight: every linear is read whole once, and nothing keeps it."""
    import dataclasses

    source = find_model(ModelConfig(path=str(model_dir)))
    watched = Watched(source.reader)
    model = packed_model(dataclasses.replace(source, reader=watched))
    linears = [n for n in watched.asked if "proj" in n]
    assert len(linears) == len(set(linears)) == 14
    assert not [n for n, p in model.named_parameters() if "proj" in n]


def test_experts_in_one_tensor_are_told_with_their_share():
    """BO-37: what stays in 16 bits is counted, never silent; the router is not quantised."""
    import transformers

    config = transformers.MixtralConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, vocab_size=64,
        num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config).requires_grad_(False)
    done = place(model, list(model.model.layers), "nf4")
    assert len(done.linears) == 4
    assert any("experts" in why for why in done.left)
    assert done.left_numbers >= 3 * 4 * 64 * 128
    assert not any("gate" in name for name in done.linears)


def test_the_merged_model_is_near_the_run_over_nf4_and_says_which_base(model_dir, tmp_path):
    """BO-28: merged into what the run was trained over, unless asked otherwise; nothing is quantised again."""
    packs = random_packs(4, seq_len=24)
    run = model_run(
        model_dir, tmp_path, packs, packs_per_step=4, model={"base_weights": "nf4"}, optim={"lr": 5e-3}, train={"precision": "fp32"},
        adapter={"name": "lora", "r": 4},
    )  # fmt: skip
    for _ in range(3):
        train_step(run, packs)
    from rft.training.finish import write_final

    write_final(run)
    import transformers

    ids, labels = packs[0].input_ids, packs[0].labels

    def loss_of(model) -> float:
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits
        return float(torch.nn.functional.cross_entropy(logits[0], labels[0], ignore_index=-100))

    live = loss_of(run.model.eval())
    quantised = as_bitsandbytes(model_dir, tmp_path / "nf4")
    cases = {"original": (model_dir, None), "through": (model_dir, "nf4"), "4-bit": (quantised, None)}
    for name, (base, through) in cases.items():
        out = merge(
            run.run_dir / "final",
            tmp_path / f"merged-{name}",
            base=ModelConfig(path=str(base)),
            dtype=torch.float32,
            through=through,
        )
        assert ("de-quantised" in out.base) == (name == "4-bit")
        assert ("nf4 base" in " ".join(out.notes)) == (name == "through")
        assert "quantization_config" not in json.loads((out.out / "config.json").read_text())
        merged = transformers.AutoModelForCausalLM.from_pretrained(out.out)
        assert loss_of(merged) == pytest.approx(live, abs=0.1 if name == "original" else 2e-3), name


def test_a_weight_that_nf4_cannot_hold_is_left_and_told():
    assert nf4.why_not((4, 33)) is not None
    linear = torch.nn.Module()
    linear.proj = torch.nn.Linear(33, 4, device="meta").requires_grad_(False)
    done = place(linear, [linear], "nf4")
    assert not done.linears
    assert "even number of columns" in next(iter(done.left))


def test_bits_of_the_planner_are_those_of_the_format():
    from rft.memory.sizes import BITS_NF4

    linear = PackedLinear((512, 1024), None, "nf4")
    assert sum(b.nbytes for b in linear.buffers()) == 512 * 1024 * BITS_NF4 / 8 + 4
    assert nf4.why_not((3, 5))
