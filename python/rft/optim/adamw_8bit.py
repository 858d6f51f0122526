"""AdamW with 8-bit moments, by the functions of bitsandbytes or of torchao. States are plain tensors, so that they are saved like any other.

bitsandbytes' kernel updates weights of either type and rounds to nearest: bf16 weights are given to it as fp32 chunks and rounded
stochastically here. torchao's quantiser works on whole tensors; AdamW's own sums are done here in fp32.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor

from rft.errors import Refused
from rft.optim.rounding import Noise, store_
from rft.optim.rule import Item, chunks

SMALLEST = 4096
"""Tensors under this many numbers keep fp32 moments, as in both libraries."""
BLOCK = {"bitsandbytes": 256, "torchao": 256}
"""Numbers that share a scale."""


def why_not(library: str, device: torch.device, *, paged: bool) -> str | None:
    """Why the library cannot serve here, or None."""
    if importlib.util.find_spec(library) is None:
        how = "pip install 'rft-llm[torchao]'" if library == "torchao" else "pip install bitsandbytes"
        return f"{library} is not installed ({how})"
    if paged and device.type != "cuda":
        return f"paged moments need CUDA's managed memory, this is a {device.type}"
    if paged and library != "bitsandbytes":
        return "only bitsandbytes has paged moments"
    return None


class BitsAndBytes:
    """codes u8 of the weight's shape and a scale for every 256 numbers, for both moments."""

    sharded = False  # blocks of a shard are no blocks of the whole: another number of ranks could not resume
    takes_factor = False

    def __init__(self, betas: tuple[float, float], eps: float, *, paged: bool, device: torch.device):
        if why := why_not("bitsandbytes", device, paged=paged):
            do = "leave out optim.paged" if paged and why.startswith("paged") else 'set optim.name = "adamw"'
            raise Refused('optim.name = "adamw_8bit"', why, do=do)
        from bitsandbytes import functional

        self.betas, self.eps, self.paged = betas, eps, paged
        self._library: Any = functional
        self._signed = functional.create_dynamic_map(signed=True).to(device)
        self._unsigned = functional.create_dynamic_map(signed=False).to(device)

    def init(self, weight: Tensor) -> dict[str, Tensor]:
        blocks = -(-weight.numel() // BLOCK["bitsandbytes"])
        return {
            "exp_avg_codes": self._codes(weight),
            "exp_avg_scale": torch.zeros(blocks, dtype=torch.float32, device=weight.device),
            "exp_avg_sq_codes": self._codes(weight),
            "exp_avg_sq_scale": torch.zeros(blocks, dtype=torch.float32, device=weight.device),
        }

    def _codes(self, weight: Tensor) -> Tensor:
        if not self.paged:
            return torch.zeros(weight.shape, dtype=torch.uint8, device=weight.device)
        made = self._library.get_paged(*weight.shape, dtype=torch.uint8, device=weight.device)
        self._library.fill(made, 0)
        return made

    def update(self, items: list[Item], lr: float, weight_decay: float, noise: Noise) -> None:
        for item in items:
            generator = noise.at(item.name, item.step, item.weight.device)
            state = item.state
            codes = (state["exp_avg_codes"], state["exp_avg_sq_codes"])
            if self.paged:  # the library knows paged tensors by an attribute that slices of them lack
                for code in codes:
                    self._library.prefetch_tensor(code)
                parts: list[tuple[Tensor, ...]] = [(item.weight, item.gradient, *codes)]
            else:
                parts = list(chunks(item.weight, item.gradient.contiguous(), *codes))
            at = 0
            for weight, gradient, first, second in parts:
                w = weight.float()
                blocks = slice(at, at + -(-weight.numel() // BLOCK["bitsandbytes"]))
                at = blocks.stop
                self._library.optimizer_update_8bit_blockwise(
                    "adam", gradient.float(), w, first, second, *self.betas, 0.0, 0.0, self.eps, item.step, lr,
                    self._signed, self._unsigned, state["exp_avg_scale"][blocks], state["exp_avg_sq_scale"][blocks], weight_decay,
                )  # fmt: skip
                store_(weight, w, generator)
        if self.paged:
            torch.cuda.current_stream().synchronize()  # CUDA may be moving pages that the host would free; as the library does


class TorchAO:
    """The same in torchao's format, for tensors of whole blocks."""

    sharded = False
    takes_factor = False

    def __init__(self, betas: tuple[float, float], eps: float, *, paged: bool, device: torch.device):
        if why := why_not("torchao", device, paged=paged):
            raise Refused(
                'optim.library = "torchao"',
                why,
                do='leave out optim.library (bitsandbytes), or set optim.name = "adamw"',
            )
        from torchao.optim import quant_utils

        self.betas, self.eps = betas, eps
        self._library: Any = quant_utils
        maps = (quant_utils.create_dynamic_map(signed) for signed in (True, False))
        self._signed, self._unsigned = (torch.tensor(m, dtype=torch.float32, device=device) for m in maps)

    def init(self, weight: Tensor) -> dict[str, Tensor]:
        blocks = weight.numel() // BLOCK["torchao"]
        made = {}
        for name in ("exp_avg", "exp_avg_sq"):
            made[f"{name}_codes"] = torch.zeros(weight.shape, dtype=torch.uint8, device=weight.device)
            made[f"{name}_scale"] = torch.zeros(blocks, dtype=torch.float32, device=weight.device)
        return made

    def update(self, items: list[Item], lr: float, weight_decay: float, noise: Noise) -> None:
        (beta1, beta2), block = self.betas, BLOCK["torchao"]
        for item in items:
            t, state = item.step, item.state
            generator = noise.at(item.name, t, item.weight.device)
            tensors = (item.weight, item.gradient.contiguous(), state["exp_avg_codes"], state["exp_avg_sq_codes"])
            at = 0
            for weight, gradient, first, second in chunks(*tensors):
                blocks = slice(at, at := at + weight.numel() // block)
                scales = (state["exp_avg_scale"][blocks], state["exp_avg_sq_scale"][blocks])
                w, g = weight.float(), gradient.float()
                m = self._read(first, scales[0], self._signed).lerp_(g, 1 - beta1)
                v = self._read(second, scales[1], self._unsigned).mul_(beta2).addcmul_(g, g, value=1 - beta2)
                w.mul_(1 - lr * weight_decay)
                w.addcdiv_(m, v.sqrt().div_((1 - beta2**t) ** 0.5).add_(self.eps), value=-lr / (1 - beta1**t))
                self._write(first, scales[0], m, self._signed)
                self._write(second, scales[1], v, self._unsigned)
                store_(weight, w, generator)

    def _read(self, codes: Tensor, scale: Tensor, values: Tensor) -> Tensor:
        return self._library.dequant_with_qmap(codes, values, scale)

    def _write(self, codes: Tensor, scale: Tensor, numbers: Tensor, values: Tensor) -> None:
        scaled, found = self._library.scale_tensor(numbers, BLOCK["torchao"])
        codes.copy_(self._library.quantize_8bit_with_qmap(scaled, values))
        scale.copy_(found)
