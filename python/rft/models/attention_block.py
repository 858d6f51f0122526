"""The attention block around attention itself: projections fused with their LoRA, q and k turned by one kernel.

T tokens, H heads, E head size, R rotated columns. What a layer does (norms of q and k, before or after rotation; halves or neighbours
as pairs; a table of angles once or twice as wide; layers without rotation) is found by comparing candidates with the layer itself, with
the tables that the model's own rotary embedding gives. What it hands to attention (scale, window, soft-cap, sinks) is recorded
from the original and handed on; both are compared.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rft.errors import Refused
from rft.kernels import fp8
from rft.kernels.rope import rope
from rft.models.attention import NAME, CallConstants, attention, recorded, register
from rft.models.backbone import find_base
from rft.models.documents import DocumentMask, Documents
from rft.models.linear import apply_linears, as_class, child, width_in, without_dropout
from rft.models.matching import Candidate, Matcher
from rft.models.mlp import linears_of, width_out

Table = Literal["halves", "neighbours", "once"]
"""How a table of cosines repeats its angles: [a | a], [a a b b ..], or not at all."""
_LENGTHS = (9, 1, 11)
_CACHES = ("past_key_values", "past_key_value", "cache")


@dataclass(frozen=True)
class Plan:
    """What one attention layer does."""

    projections: tuple[str, ...]
    """q, k, v; or one for all."""
    output: str
    head_size: int
    heads: tuple[int, int]
    """Of q; of k and v."""
    norms: tuple[str, str] | None
    norm_first: bool
    rotation: Table | None
    interleaved: bool
    constants: CallConstants
    sinks: str | None
    """Parameter that is handed on as sinks."""

    def describe(self) -> str:
        turned = {None: "no rotation", "halves": "", "neighbours": "", "once": ""}[self.rotation] or (
            f"rope of {'neighbours' if self.interleaved else 'halves'}"
        )
        norms = "" if self.norms is None else (", q and k norms before" if self.norm_first else ", q and k norms after")
        return f"{'+'.join(self.projections)} together, {turned}{norms}"


class AttentionBlock(nn.Module):
    """Stands in for an attention layer; shares its children and parameters under their names."""

    rft_plan: Plan

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Any = None,
        quantised: fp8.Rows | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """quantised: hidden_states as (T, D) for FP8 weights, where the norm before gave it."""
        plan = self.rft_plan
        if any(kwargs.pop(name, None) is not None for name in _CACHES):
            raise Refused(
                type(self).__name__, "got a cache of keys and values", wanted="training or evaluation of whole rows"
            )
        shape = hidden_states.shape[:-1]
        q, k, v = self._project(hidden_states, quantised)
        if plan.norms is not None and plan.norm_first:
            q, k = self._normed(q, k)
        q, k, v = (t.reshape(*shape, -1, plan.head_size).transpose(1, 2) for t in (q, k, v))
        if plan.rotation is not None:
            assert position_embeddings is not None
            cos, sin = (_angles(t, plan.rotation) for t in position_embeddings)
            q, k = rope(q, k, cos, sin, interleaved=plan.interleaved)
        if plan.norms is not None and not plan.norm_first:
            q, k = self._normed(q, k)
        given = plan.constants
        out, _ = attention(
            self, q, k, v, attention_mask, scaling=given.scaling, dropout=given.dropout if self.training else 0.0,
            sliding_window=given.sliding_window, softcap=given.softcap,
            s_aux=None if plan.sinks is None else self.get_parameter(plan.sinks), **kwargs,
        )  # fmt: skip
        return apply_linears(out.reshape(*shape, -1), (child(self, plan.output),))[0], None

    @property
    def rft_readers(self) -> tuple[nn.Module, ...]:
        """The linears that read its input."""
        return tuple(child(self, name) for name in self.rft_plan.projections)

    def _project(self, x: Tensor, quantised: fp8.Rows | None) -> tuple[Tensor, Tensor, Tensor]:
        plan = self.rft_plan
        outs = apply_linears(x, self.rft_readers, quantised)
        if len(outs) == 1:
            heads, kv_heads = plan.heads
            sizes = [heads * plan.head_size, kv_heads * plan.head_size, kv_heads * plan.head_size]
            return outs[0].split(sizes, -1)  # type: ignore[return-value]
        return outs  # type: ignore[return-value]

    def _normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Over each head, or over the whole projection where the norm is as wide."""
        plan = self.rft_plan
        assert plan.norms is not None
        outs = []
        for name, x in zip(plan.norms, (q, k), strict=True):
            norm = child(self, name)
            wide = next(norm.parameters()).shape[-1] != plan.head_size
            outs.append(norm(x) if wide or x.dim() == 4 else norm(x.unflatten(-1, (-1, plan.head_size))).flatten(-2))
        return outs[0], outs[1]


def _angles(table: Tensor, kind: Table) -> Tensor:
    if kind == "halves":
        return table[..., : table.shape[-1] // 2]
    return table[..., ::2] if kind == "neighbours" else table


# ---- finding


def attention_matcher(model: Any, device: torch.device) -> Matcher:
    """For one model: its rotary embedding gives the tables that its layers are compared with on `device`."""
    tables = _Tables(model)

    def inputs(module: nn.Module, generator: torch.Generator) -> tuple[Tensor, ...]:
        shape = _shape_of(module)
        assert not isinstance(shape, str)
        width = width_in(module.get_submodule(shape.projections[0]))
        return (torch.randn(1, sum(_LENGTHS), width, generator=generator) + 0.3,)

    def call(part: nn.Module, tensors: list[Tensor]) -> tuple[Tensor, Any]:
        (x,) = tensors
        mask = DocumentMask(Documents.from_lengths(_LENGTHS, x.device))
        with recorded() as calls:
            out = part(hidden_states=x, position_embeddings=tables.of(part, x), attention_mask=mask)[0]
        return out, [c._replace(sinks=c.sinks is not None) for c in calls]  # type: ignore[arg-type]

    def candidates(module: nn.Module) -> list[Candidate] | str:
        return _candidates(module, tables, inputs, device)

    return Matcher(
        "attention block",
        _looks_like_attention,
        candidates,
        inputs,
        call,
        rounding="no worse",
        train_all=False,
        key=_layer_type,
        prepare=without_dropout,
    )


def _layer_type(module: Any) -> str:
    kinds = getattr(getattr(module, "config", None), "layer_types", None)
    index = getattr(module, "layer_idx", None)
    return kinds[index] if kinds and isinstance(index, int) and index < len(kinds) else ""


class _Tables:
    """cos and sin as the model's own rotary embedding makes them, on a copy that has its values."""

    def __init__(self, model: Any):
        self._rotary = getattr(find_base(model), "rotary_emb", None)
        self._made: dict[tuple, tuple[Tensor, Tensor]] = {}

    def why_not(self) -> str | None:
        if self._rotary is None:
            return "its model has no rotary embedding of its own"
        try:
            self._fresh()
        except (TypeError, AttributeError, KeyError, ValueError) as error:
            return f"its rotary embedding cannot be made: {type(error).__name__}: {error}"
        return None

    def _fresh(self) -> Any:
        """A new one from the config: on meta the one at hand has no values."""
        with torch.device("cpu"):
            return type(self._rotary)(config=copy.deepcopy(self._rotary.config))  # type: ignore[misc,union-attr]

    def of(self, module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        kind = _layer_type(module)
        key = (kind, x.device, x.dtype)
        if key not in self._made:
            rotary = self._fresh().to(x.device)
            positions = torch.cat([torch.arange(n, device=x.device) for n in _LENGTHS])[None]
            takes_type = "layer_type" in inspect.signature(type(rotary).forward).parameters
            with torch.no_grad():
                made = rotary(x.detach(), positions, kind) if takes_type else rotary(x.detach(), positions)
            self._made[key] = made
        return self._made[key]

    def kinds(self, module: nn.Module) -> list[Table]:
        """How the table may repeat its angles, by its values."""
        made = self.of(module, torch.zeros(1, sum(_LENGTHS), 8))
        if not isinstance(made, tuple) or len(made) != 2 or not made[0].is_floating_point():
            return []
        cos = made[0]
        half = cos.shape[-1] // 2
        found: list[Table] = ["once"]
        if torch.equal(cos[..., :half], cos[..., half:]):
            found = ["halves"]
        elif torch.equal(cos[..., ::2], cos[..., 1::2]):
            found = ["neighbours"]
        return found


@dataclass(frozen=True)
class _Shape:
    projections: tuple[str, ...]
    output: str
    head_size: int
    heads: tuple[int, int]


def _looks_like_attention(module: nn.Module) -> bool:
    if isinstance(module, AttentionBlock) or type(module).forward is nn.Module.forward:
        return False
    return "position_embeddings" in inspect.signature(module.forward).parameters and len(linears_of(module)) >= 2


def _shape_of(module: nn.Module) -> _Shape | str:
    """Which linear is which, by their usual names and their widths; or why that cannot be told."""
    linears: dict[str, Any] = linears_of(module)
    names = {kind: next((n for n in linears if n in known), None) for kind, known in _NAMES.items()}
    size, output = getattr(module, "head_dim", None), names["o"]
    if not isinstance(size, int) or output is None:
        return "its projections are not those of plain attention"
    width = width_in(linears[output])
    if width % size:
        return "its heads are not of one size"
    separate = tuple(n for n in (names["q"], names["k"], names["v"]) if n is not None)
    if len(separate) == 3 and len(linears) == 4:
        q, k, v = (width_out(linears[n]) for n in separate)
        if q != width or k != v or k % size:
            return "q, k and v are not of the widths of plain attention"
        return _Shape(separate, output, size, (q // size, k // size))
    if names["qkv"] is not None and len(linears) == 2:
        rest = width_out(linears[names["qkv"]]) - width
        if rest <= 0 or rest % (2 * size):
            return "its joint projection is not of the width of plain attention"
        return _Shape((names["qkv"],), output, size, (width // size, rest // (2 * size)))
    return "its projections are not those of plain attention"


_NAMES = {
    "q": ("q_proj",), "k": ("k_proj",), "v": ("v_proj",), "o": ("o_proj", "out_proj", "dense"), "qkv": ("qkv_proj",),
}  # fmt: skip


def _candidates(module: Any, tables: _Tables, inputs: Callable, device: torch.device) -> list[Candidate] | str:
    if getattr(getattr(module, "config", None), "_attn_implementation", None) != NAME:
        return "it does not take attention from the registry"
    shape = _shape_of(module)
    why = shape if isinstance(shape, str) else tables.why_not()
    if isinstance(shape, str) or why:
        return why or ""
    kinds = tables.kinds(module)
    if not kinds:
        return "its rotary tables are not cosines and sines"
    constants = _constants_of(module, tables, inputs, device)
    if isinstance(constants, str):
        return constants
    given, sinks = constants
    norms = _norms_of(module)
    plain = Plan(
        **vars(shape), norms=norms, norm_first=True, rotation=kinds[0], interleaved=False, constants=given, sinks=sinks
    )
    plans = [plain, replace(plain, interleaved=True), replace(plain, rotation=None)]
    if norms is not None:
        plans += [replace(p, norm_first=False) for p in plans]
    return [Candidate(p.describe(), _building(p)) for p in plans]


def _building(plan: Plan) -> Callable[[nn.Module], nn.Module]:
    def build(original: nn.Module) -> nn.Module:
        made = as_class(original, AttentionBlock)
        made.__dict__["rft_plan"] = plan
        return made

    return build


def _norms_of(module: nn.Module) -> tuple[str, str] | None:
    for names in (("q_norm", "k_norm"), ("q_layernorm", "k_layernorm")):
        if all(isinstance(getattr(module, n, None), nn.Module) for n in names):
            return names
    return None


def _constants_of(
    module: nn.Module, tables: _Tables, inputs: Callable, device: torch.device
) -> tuple[CallConstants, str | None] | str:
    """What the layer hands to its attention in training, and the name of the parameter that is its sinks."""
    register()
    part = copy.deepcopy(module).to_empty(device=device).float().train()
    with torch.no_grad():
        for parameter in part.parameters():
            parameter.zero_()
    x = inputs(module, torch.Generator().manual_seed(0))[0].to(device)
    mask = DocumentMask(Documents.from_lengths(_LENGTHS, device))
    with recorded() as calls, torch.no_grad():
        part(hidden_states=x, position_embeddings=tables.of(part, x), attention_mask=mask)
    if len(calls) != 1:
        return f"it calls attention {len(calls)} times"
    (given,) = calls
    sinks = next((n for n, p in part.named_parameters(recurse=False) if p is given.sinks), None)
    if given.sinks is not None and sinks is None:
        return "its sinks are no parameter of its own"
    return given._replace(sinks=None), sinks
