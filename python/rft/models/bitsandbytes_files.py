"""Checkpoints that bitsandbytes quantised: NF4 with double quantisation, or int8 by row. Read by name as any other, codes on demand.

Beside `x.weight` (uint8 codes, two numbers each) such a file holds `x.weight.absmax` (8-bit levels of the blocks' scales), `nested_absmax`,
`nested_quant_map`, `quant_map` and `quant_state.bitsandbytes__nf4`: JSON with shape, block sizes and the scales' mean. int8: `x.SCB`.
"""

from __future__ import annotations

import json
from typing import Any, Literal

import torch
from torch import Tensor

from rft.errors import ModelError
from rft.kernels import int8, nf4
from rft.models.tensor_reader import Slices, TensorReader

_STATE = ".quant_state.bitsandbytes__nf4"
_PARTS = (".absmax", ".nested_absmax", ".nested_quant_map", ".quant_map", _STATE)


class BitsandbytesReader:
    """Gives every weight under its plain name, dequantised (fp32) where it is read as numbers."""

    def __init__(self, inner: TensorReader, where: str):
        self._inner, self._where = inner, where
        names = inner.names()
        other = sorted({n.rpartition("__")[2] for n in names if ".quant_state.bitsandbytes__" in n} - {"nf4"})
        if other:
            raise ModelError(
                where,
                f"is quantised by bitsandbytes as {', '.join(other)}",
                wanted="NF4 or int8 weights",
                do="use the original weights",
            )
        self._nf4 = {n.removesuffix(_STATE) for n in names if n.endswith(_STATE)}
        self._int8 = {n.removesuffix("SCB") + "weight" for n in names if n.endswith(".SCB")}
        self._states: dict[str, dict[str, Any]] = {}
        self._last = ("", torch.empty(0))

    def names(self) -> list[str]:
        beside = {n + part for n in self._nf4 for part in _PARTS}
        beside |= {n.removesuffix("weight") + part for n in self._int8 for part in ("SCB", "weight_format")}
        return [n for n in self._inner.names() if n not in beside]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._state(name)["shape"]) if name in self._nf4 else self._inner.shape(name)

    def read(self, name: str, part: Slices | None = None) -> Tensor:
        if name not in self._nf4 and name not in self._int8:
            return self._inner.read(name, part)
        if self._last[0] != name:  # a tensor may be asked for a few rows at a time
            made = self.packed(name)
            assert made is not None
            self._last = (name, made.dequantised())
        whole = self._last[1]
        return whole[part] if part else whole

    def packed(self, name: str) -> nf4.Weight | int8.Weight | None:
        """The codes as they are in the file; None for a weight that is not quantised."""
        read = self._inner.read
        if name in self._int8:
            return int8.Weight(read(name), read(name.removesuffix("weight") + "SCB").float())
        if name not in self._nf4:
            return None
        state = self._state(name)
        rows, columns = state["shape"]
        for part, table in ((".quant_map", nf4.levels), (".nested_quant_map", nf4.scale_levels)):
            if not torch.equal(read(name + part).float(), table(torch.device("cpu"))):
                raise ModelError(
                    self._where, f"{name}{part} is not the table of NF4", wanted="a checkpoint as bitsandbytes saves it"
                )
        return nf4.Weight(
            read(name).view(rows, columns // 2),
            read(name + ".absmax"),
            read(name + ".nested_absmax").float(),
            torch.tensor(state["nested_offset"], dtype=torch.float32),
        )

    def _state(self, name: str) -> dict[str, Any]:
        if name not in self._states:
            state = json.loads(bytes(self._inner.read(name + _STATE).tolist()))
            blocks = (state.get("blocksize"), state.get("nested_blocksize"))
            if blocks != (nf4.BLOCK, nf4.NESTED) or len(state.get("shape", ())) != 2 or state["shape"][1] % 2:
                raise ModelError(
                    self._where,
                    f"{name} has blocks of {blocks[0]} and scales {'of ' + str(blocks[1]) if blocks[1] else 'that are not quantised'}",
                    wanted=f"blocks of {nf4.BLOCK} with double quantisation (bnb_4bit_use_double_quant)",
                    do="use the original weights: rft quantises them as they are read",
                )
            self._states[name] = state
        return self._states[name]


class RoundedReader:
    """Weights of a plain checkpoint as a base in fewer bits would hold them: each linear quantised as it is read, and dequantised."""

    def __init__(self, inner: TensorReader, names: set[str], kind: Literal["nf4", "int8"]):
        """names: of the weights that such a base holds in fewer bits; all others are given as they are."""
        self._inner, self._names = inner, names
        self._quantise: Any = (nf4 if kind == "nf4" else int8).quantise
        self._last = ("", torch.empty(0))

    def names(self) -> list[str]:
        return self._inner.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._inner.shape(name)

    def read(self, name: str, part: Slices | None = None) -> Tensor:
        if name not in self._names:
            return self._inner.read(name, part)
        if self._last[0] != name:
            weight = self._inner.read(name)
            self._last = (name, self._quantise(weight).dequantised().to(weight.dtype))
        whole = self._last[1]
        return whole[part] if part else whole
