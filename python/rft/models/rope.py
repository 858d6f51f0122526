"""Rotary positions beyond the length that a model was trained for: `[model.rope]` written into its config, where every engine reads it.

transformers computes frequencies from `rope_parameters`; this decides what stands there. A model that was trained with a scaling keeps
its kind: another one would move the frequencies that it knows. base (`rope_theta`) never changes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rft.config.model import RopeConfig
from rft.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

PLAIN = "default"
AUTO = {PLAIN: "yarn"}
"""Kind of the model -> what "auto" takes; every other kind is kept."""
CHOICES = ("linear", "dynamic", "yarn", "llama3", "longrope")
GLOBAL_LAYERS = "full_attention"
"""In models with tables by kind of layer, the one whose layers see the whole text; a window's length does not change."""


def asked(rope: RopeConfig) -> bool:
    """Whether the config says anything about it."""
    return rope.target_length is not None or rope.method != "auto"


def scale_rope(config: Any, rope: RopeConfig) -> str:
    """Change a transformers config, in place, for `rope.target_length` positions; says what was done.

    Raises ConfigError where the model has no rotary positions, reaches that far already, or was trained with another kind of scaling.
    """
    assert rope.target_length is not None, "resolve_rope() decides model.rope.target_length"
    text, target = config.get_text_config(), rope.target_length
    trained = getattr(text, "max_position_embeddings", None)
    tables = _tables(text)
    if not tables or not trained:
        raise ConfigError(
            "model.rope",
            f"{type(text).__name__} has no rotary positions whose range its config names",
            wanted="a model with rope_parameters and max_position_embeddings",
            do="leave out [model.rope], and set data.seq_len to what the model was trained for",
        )
    if rope.method == "none":
        text.max_position_embeddings = max(target, trained)
        return f"none: trained for {trained:,} positions, used to {target:,} as it is"
    if target <= trained:
        raise ConfigError(
            f"model.rope.target_length = {target}",
            f"the model was trained for {trained:,} positions already",
            do="leave out [model.rope]",
        )
    told = {_scale(text, table, rope.method, trained, target) for table in tables}
    # dynamic's formula counts from the length that the model was trained for, so that stays
    text.max_position_embeddings = trained if _kind(tables[0]) == "dynamic" else target
    if hasattr(text, "validate_rope"):
        text.validate_rope()
    return f"{' and '.join(sorted(told))}: {trained:,} -> {target:,} positions"


def _tables(text: Any) -> list[dict[str, Any]]:
    """The rope_parameters that are scaled: the only one, or that of the layers which see everything."""
    if getattr(text, "rope_parameters", None) is None and getattr(text, "rope_theta", None) is None:
        return []
    text.standardize_rope_params()
    found = text.rope_parameters or {}
    if any(isinstance(value, dict) for value in found.values()):
        table = found.get(GLOBAL_LAYERS)
        return [table] if isinstance(table, dict) else []
    return [found] if found.get("rope_theta") is not None else []


def _kind(table: dict[str, Any]) -> str:
    return table.get("rope_type", PLAIN)


def _scale(text: Any, table: dict[str, Any], method: str, trained: int, target: int) -> str:
    kind = _kind(table)
    if kind not in (PLAIN, *CHOICES):
        raise ConfigError(
            "model.rope", f'its positions are of the kind "{kind}", which rft does not scale',
            do='set model.rope.method = "none" to go on as it is',
        )  # fmt: skip
    if method == "auto":
        method = AUTO.get(kind, kind)
    if kind not in (PLAIN, method):
        raise ConfigError(
            f'model.rope.method = "{method}"',
            f'the model was trained with "{kind}" scaling: another kind would move the frequencies that it knows',
            wanted=f'"{kind}", "auto" or "none"',
            do=f'set model.rope.method = "{kind}"',
        )
    own = table.get("original_max_position_embeddings") or getattr(text, "original_max_position_embeddings", None)
    original = int(own) if kind != PLAIN and own else trained
    stretch, before = target / trained, float(table.get("factor") or 1.0)
    table["rope_type"] = method
    table.pop("type", None)
    if method in ("linear", "dynamic"):
        table["factor"] = before * stretch
    elif method == "llama3":
        # Llama 3.1 and 3.2 reach 131,072 from 8,192 with factors 8 and 32: the factor is no ratio of lengths, so it is stretched
        table["factor"] = before * stretch
        table.setdefault("low_freq_factor", 1.0)
        table.setdefault("high_freq_factor", 4.0)
        table["original_max_position_embeddings"] = original
    elif method == "yarn":
        table["factor"] = target / original
        table["original_max_position_embeddings"] = original
    else:
        _stretch_longrope(text, table, kind, original, stretch, target)
    return method


def _stretch_longrope(text: Any, table: dict[str, Any], kind: str, original: int, stretch: float, target: int) -> None:
    """The paper searches factors; here they are stretched (a model that has them) or YaRN's (one that has none)."""
    table["original_max_position_embeddings"] = original
    if kind == "longrope":
        table["long_factor"] = [f * stretch for f in table["long_factor"]]
    else:
        count = _rotary_size(text, table) // 2
        table["short_factor"] = [1.0] * count
        table["long_factor"] = _yarn_factors(text, table, original, target)
    table["factor"] = target / original


def _rotary_size(text: Any, table: dict[str, Any]) -> int:
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return int(size * table.get("partial_rotary_factor", 1.0))


def _yarn_factors(text: Any, table: dict[str, Any], original: int, target: int) -> list[float]:
    """By how much YaRN slows each frequency."""
    import copy

    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    other = copy.deepcopy(text)
    other.rope_parameters = {
        **{k: v for k, v in table.items() if k in ("rope_theta", "partial_rotary_factor")},
        "rope_type": "yarn", "factor": target / original, "original_max_position_embeddings": original,
    }  # fmt: skip
    slowed, _ = ROPE_INIT_FUNCTIONS["yarn"](other, None)
    size = _rotary_size(text, table)
    plain = [table["rope_theta"] ** (-i / size) for i in range(0, size, 2)]
    return [p / float(s) for p, s in zip(plain, slowed.tolist(), strict=True)]


def config_entries(config: Any) -> dict[str, Any]:
    """What of a config holds its positions, as config.json spells it."""
    text = config.get_text_config()
    names = ("rope_parameters", "max_position_embeddings")
    return {name: getattr(text, name) for name in names if getattr(text, name, None) is not None}


def settle_dynamic(model: nn.Module, target: int | None) -> int:
    """Frequencies of "dynamic" scaling follow the longest text seen so far, which a resumed run has not seen: hold them at those of
    `target` positions. After the weights are read. Returns how many modules have such frequencies."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    count = 0
    for module in model.modules():
        part: Any = module
        if target is None or getattr(module, "rope_type", None) != "dynamic" or not hasattr(module, "inv_freq"):
            continue
        frequencies, part.attention_scaling = ROPE_INIT_FUNCTIONS["dynamic"](part.config, None, seq_len=target)
        part.inv_freq.copy_(frequencies)
        part.max_seq_len_cached, part.original_max_seq_len = target, 0  # it neither grows nor falls back
        count += 1
    return count
