"""Parameter names with and without what PEFT puts into them."""

from __future__ import annotations

import re

_ADAPTER = re.compile(r"(^|\.)(lora_[A-Za-z_]+|trainable_tokens_[a-z_]+)\.")
_WRAPPERS = re.compile(
    r"\.(token_adapter\.base_layer|base_layer|original_module|modules_to_save\.[^.]+|token_adapter)(?=\.)"
)


def plain_name(name: str) -> str:
    """The name that a parameter or module has in the model as `transformers` builds it."""
    return _WRAPPERS.sub("", name.removeprefix("base_model.model."))


def is_adapter_parameter(name: str) -> bool:
    """Whether PEFT made this parameter: it is in no checkpoint of the base model."""
    return _ADAPTER.search(name) is not None
