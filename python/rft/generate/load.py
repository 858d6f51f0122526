"""A run, an adapter or a model, ready to generate: the weights that training left, the template that it was trained with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rft.checkpoint.target import Target
from rft.config.adapter import LoraConfig
from rft.config.model import ModelConfig
from rft.data.conversation import PromptEncoder
from rft.data.template import ChatTemplate, load_template
from rft.models.load import build_meta, find_model, materialise
from rft.models.rope import settle_dynamic
from rft.models.source import ModelSource
from rft.models.tokenizer import TokenizerFiles, load_tokenizer


@dataclass
class Speaker:
    """A model that generates. `model` is in evaluation mode on `device`."""

    model: Any
    encoder: PromptEncoder
    device: torch.device
    name: str
    source: ModelSource

    @property
    def tokenizer(self) -> TokenizerFiles:
        return self.encoder.tokenizer

    @property
    def max_positions(self) -> int | None:
        """Tokens that the model has positions for."""
        return getattr(self.model.config, "max_position_embeddings", None)


def load_speaker(target: Target, *, device: torch.device | None = None, dtype: torch.dtype | None = None) -> Speaker:
    """Load for generation: base weights, the adapter on them, tokenizer and template of the training where they were saved."""
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = dtype or generation_dtype(device)
    home = target.home
    tokenizer = load_tokenizer(ModelConfig(path=str(home), unicode=target.model.unicode) if home else target.model)
    source = find_model(target.model)
    model = build_meta(
        source, target.model, dtype, vocab_size=tokenizer.vocab_size, attention=_attention(source.config)
    )
    if target.adapter is not None:
        from rft.adapters.lora import initialise, inject

        lora = LoraConfig(path=str(target.adapter))
        model = inject(model, lora, dtype=dtype, base_id=source.base_id)
        materialise(model, source, device)
        initialise(model, lora, seed=0)
    else:
        materialise(model, source, device)
    settle_dynamic(model, target.model.rope.target_length)
    model.eval()
    template = _template(target, tokenizer, home)
    return Speaker(model, PromptEncoder(template, tokenizer), device, target.name, source)


def generation_dtype(device: torch.device) -> torch.dtype:
    """bf16 where the machine computes in it, else fp32: as `train.precision = "auto"` decides."""
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    from rft.training.machine import cpu_has_bf16

    return torch.bfloat16 if cpu_has_bf16() else torch.float32


def _attention(config: Any) -> str:
    """transformers' own attention with a cache. SDPA has no soft-cap and no sinks: those models compute plainly."""
    text = config.get_text_config()
    plain = getattr(text, "attn_logit_softcapping", None) or text.model_type in ("gpt_oss",)
    return "eager" if plain else "sdpa"


def _template(target: Target, tokenizer: TokenizerFiles, home: Path | None) -> ChatTemplate | None:
    """The template that lies with the weights, else the one that the run's config names; None = a base model."""
    setting = "model" if home is not None else target.config.get("data", {}).get("template", "model")
    return load_template(setting, tokenizer)
