"""GGUF files: config from the header, weights dequantised a slice at a time under Hugging Face names.

Read: the llama (Llama, Mistral, SmolLM2 ...), qwen2 and qwen3 architectures. Others are refused by name: their
conversions change weights in ways (norms shifted, experts stacked) that must each be undone exactly.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rft.errors import ModelError
from rft.models.gguf_header import TensorPlace, read_header
from rft.models.tensor_reader import Slices

_CONFIGS = {"llama": "LlamaConfig", "qwen2": "Qwen2Config", "qwen3": "Qwen3Config"}
_IN_LAYER = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
}  # fmt: skip
_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
# Llama 3.1 and 3.2 stretch their rotary frequencies by these; a file holds only the resulting table
_LLAMA3_FACTORS = (8.0, 32.0, 16.0, 4.0)


def open_gguf(path: Path) -> tuple[Any, GgufReader]:
    """(`transformers` config, reader) of a GGUF file. Raises ModelError for a broken file or an architecture that is not read."""
    header, places = read_header(path)
    tensors = {t.name: t for t in places}
    architecture = header.get("general.architecture")
    if architecture not in _CONFIGS:
        raise ModelError(
            str(path),
            f"is a GGUF file of architecture {architecture!r}",
            wanted=", ".join(_CONFIGS),
            do="use the model's safetensors directory",
        )
    if header.get(f"{architecture}.expert_count"):
        raise ModelError(
            str(path),
            "is a GGUF file of a mixture of experts, whose stacked experts rft does not read",
            do="use the model's safetensors directory",
        )
    if "token_embd.weight" not in tensors:
        raise ModelError(str(path), "holds no token embeddings", wanted="a GGUF file of a whole model")
    config = _config(path, architecture, header, tensors)
    return config, GgufReader(path, tensors, config, permuted=architecture == "llama")


def _config(path: Path, architecture: str, header: dict[str, Any], tensors: dict[str, TensorPlace]) -> Any:
    import transformers

    def value(key: str, default: Any = None) -> Any:
        found = header.get(f"{architecture}.{key}", default)
        if found is None:
            raise ModelError(str(path), f"its header lacks {architecture}.{key}")
        return found

    heads, hidden = int(value("attention.head_count")), int(value("embedding_length"))
    head_size = int(value("attention.key_length", value("rope.dimension_count", hidden // heads)))
    tokens = {
        f"{name}_token_id": header.get(f"tokenizer.ggml.{key}_token_id")
        for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }
    values: dict[str, Any] = dict(
        vocab_size=tensors["token_embd.weight"].shape[0],
        hidden_size=hidden,
        intermediate_size=int(value("feed_forward_length")),
        num_hidden_layers=int(value("block_count")),
        num_attention_heads=heads,
        num_key_value_heads=int(value("attention.head_count_kv", heads)),
        head_dim=head_size,
        max_position_embeddings=int(value("context_length")),
        # stored as fp32: 1e-5 comes back as 9.999999747e-06
        rms_norm_eps=float(f"{value('attention.layer_norm_rms_epsilon'):.6g}"),
        rope_parameters=_rope(path, header, architecture, head_size, tensors),
        tie_word_embeddings="output.weight" not in tensors,
        **{k: int(v) for k, v in tokens.items() if v is not None},
    )
    if architecture == "llama":
        values["attention_bias"] = "blk.0.attn_q.bias" in tensors
        values["mlp_bias"] = "blk.0.ffn_up.bias" in tensors
    config = getattr(transformers, _CONFIGS[architecture])(**values)
    config.architectures = [_CONFIGS[architecture].replace("Config", "ForCausalLM")]
    return config


def _rope(
    path: Path, header: dict[str, Any], architecture: str, head_size: int, tensors: dict[str, TensorPlace]
) -> dict[str, Any]:
    theta = float(header.get(f"{architecture}.rope.freq_base", 10000.0))
    kind = header.get(f"{architecture}.rope.scaling.type", "none")
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if kind in ("linear", "yarn"):
        rope.update(rope_type=kind, factor=float(header[f"{architecture}.rope.scaling.factor"]))
        if kind == "yarn":
            rope["original_max_position_embeddings"] = int(
                header[f"{architecture}.rope.scaling.original_context_length"]
            )
    elif kind != "none":
        raise ModelError(
            str(path),
            f"scales its positions by {kind!r}, which rft does not read from GGUF",
            do="use the model's safetensors directory",
        )
    if "rope_freqs.weight" in tensors:
        return _llama3_rope(
            path,
            theta,
            head_size,
            np.memmap(path, "<f4", "r", tensors["rope_freqs.weight"].offset, tensors["rope_freqs.weight"].shape),
        )
    return rope


def _llama3_rope(path: Path, theta: float, head_size: int, table: np.ndarray) -> dict[str, Any]:
    """The Llama 3 scaling whose divisors of the frequencies are this table."""
    frequencies = theta ** -(np.arange(0, head_size, 2, dtype=np.float64) / head_size)
    wavelengths = 2 * math.pi / frequencies
    for factor in _LLAMA3_FACTORS:
        low, high, original = 1.0, 4.0, 8192
        smooth = (original / wavelengths - low) / (high - low)
        middle = 1 / ((1 - smooth) / factor + smooth)
        divisors = np.where(wavelengths < original / high, 1.0, np.where(wavelengths > original / low, factor, middle))
        if divisors.shape == table.shape and np.allclose(divisors, table, rtol=1e-4):
            return {
                "rope_type": "llama3", "rope_theta": theta, "factor": factor, "low_freq_factor": low, "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }  # fmt: skip
    raise ModelError(
        str(path),
        "its table of rotary frequencies (rope_freqs) is no Llama 3 scaling that rft knows",
        do="use the model's safetensors directory",
    )


class GgufReader:
    """Weights of a GGUF file in fp32, under the names of the Hugging Face model. The file is mapped; a slice reads its rows."""

    def __init__(self, path: Path, tensors: dict[str, TensorPlace], config: Any, *, permuted: bool):
        self._path = path
        self._tensors = {self._hugging_face_name(name): t for name, t in tensors.items() if name != "rope_freqs.weight"}
        self._heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads} if permuted else {}

    def _hugging_face_name(self, name: str) -> str:
        stem, _, kind = name.rpartition(".")
        if stem in _OUTSIDE:
            return f"{_OUTSIDE[stem]}.{kind}"
        block, number, part = [*stem.split(".", 2), "", ""][:3]
        if block != "blk" or part not in _IN_LAYER:
            raise ModelError(
                str(self._path),
                f"holds a tensor {name!r} that rft has no place for",
                do="use the model's safetensors directory",
            )
        return f"model.layers.{number}.{_IN_LAYER[part]}.{kind}"

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def read(self, name: str, part: Slices | None = None) -> Tensor:
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize, quant_shape_to_byte_shape

        tensor = self._tensors[name]
        rows, *rest = part or tuple(slice(0, n) for n in tensor.shape)
        kind = GGMLQuantizationType(tensor.kind)
        plain = {GGMLQuantizationType.F32: "<f4", GGMLQuantizationType.F16: "<f2"}.get(kind)
        shape = tensor.shape if plain else quant_shape_to_byte_shape(tensor.shape, kind)
        stored = np.memmap(self._path, plain or np.uint8, "r", tensor.offset, shape)
        data = np.ascontiguousarray(stored[self._rows(name, rows)])
        try:
            values = data.astype(np.float32) if plain else dequantize(data, kind)
        except NotImplementedError:
            raise ModelError(
                str(self._path),
                f"{name} is stored as {kind.name}, which the gguf package cannot unpack",
                do="use a file of another quantisation",
            ) from None
        return torch.from_numpy(np.array(values))[(slice(None), *rest)]

    def _rows(self, name: str, rows: slice) -> Any:
        """Rows of the file that hold these rows of the model: llama files interleave the two rotary halves of each head."""
        heads = self._heads.get(name.split(".")[-2])
        if heads is None:
            return rows
        total = self.shape(name)[0]
        size = total // heads
        index = np.arange(total)[rows]
        head, within = np.divmod(index, size)
        half, place = np.divmod(within, size // 2)
        return head * size + place * 2 + half
