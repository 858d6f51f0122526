"""Tiny random models written as real Hugging Face directories: config.json and model.safetensors in fp32."""

from __future__ import annotations

import json
from pathlib import Path

import torch


def tiny_llama(
    directory: str | Path,
    vocab_size: int = 128,
    *,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    intermediate: int = 96,
    max_positions: int = 512,
    tied: bool = False,
    bos_id: int = 1,
    eos_id: int = 2,
    pad_id: int = 0,
    seed: int = 0,
) -> Path:
    """Write a random Llama to `directory` and return it. No tokenizer is written. The same arguments give the same bytes."""
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden // heads,
        max_position_embeddings=max_positions,
        tie_word_embeddings=tied,
        bos_token_id=bos_id,
        eos_token_id=eos_id,
        pad_token_id=pad_id,
    )
    return write_model(directory, config, seed=seed)


def write_model(directory: str | Path, config, *, seed: int = 0, scale: float = 0.08) -> Path:
    """Write a random fp32 model of any `transformers` causal LM config, as `save_pretrained` would, and return the directory."""
    from transformers import AutoModelForCausalLM

    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomise(model, seed, scale)
    model.save_pretrained(directory)
    generation = {k: getattr(config, k, None) for k in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (directory / "generation_config.json").write_text(json.dumps(generation))
    return directory


def randomise(model: torch.nn.Module, seed: int = 0, scale: float = 0.12) -> torch.nn.Module:
    """Fill every parameter from `seed`: norms and biases move off their defaults, so that no part is an identity."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.is_floating_point():
                continue
            noise = torch.randn(parameter.shape, generator=generator).to(parameter)
            if parameter.dim() == 1:
                parameter.add_(noise * 0.1)
            else:
                parameter.copy_(noise * scale)
    return model
