"""Weights of decoder layers lie in host memory and visit the device for as long as their layer is worked on.

Forward: while a layer computes, the next one's weights are on their way. Backward: a layer that is computed again has its weights fetched, with those of
the layer before it behind; what the optimizer has changed by then (a step in backward) is sent home when the pass has gone on to the layer before. A
parameter keeps its shape all the while: its storage is emptied and filled. Copies run on streams of their own, and the host waits for none of
them. On a CPU the copies are plain ones, so that everything else is the same.

Every layer has to be computed again (recompute), or what autograd saved of it would hold weights that are no longer there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rft.pinned import HostMemory


@dataclass(eq=False)
class _Away:
    """A weight that lies on the host."""

    parameter: nn.Parameter
    host: Tensor
    memory: HostMemory
    layer: int
    changed: bool = False
    """On the device, since it was fetched."""


class WeightStream:
    """For one model on one device. Its matrices in `layers` are on the host once they were taken."""

    def __init__(self, layers: Sequence[nn.Module], device: torch.device):
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self._layers, self._device = list(layers), device
        cuda = device.type == "cuda"
        self._there = torch.cuda.Stream(device) if cuda else None
        self._back = torch.cuda.Stream(device) if cuda else None
        self._held: list[list[_Away]] = [[] for _ in self._layers]
        self._away: dict[int, _Away] = {}
        self._here: dict[int, Any] = {}
        """Layers on the device, or on their way there -> event of their arrival."""
        self._leaving: list[tuple[int, Any]] = []
        self._sent: dict[int, Any] = {}
        self.most_layers_here = 0
        for index, layer in enumerate(self._layers):
            layer.register_forward_pre_hook(lambda *_, i=index: self._arrive(i, i + 1))

    def covered(self) -> dict[int, int]:
        """id of each parameter that lies on the host, or will -> its layer. Vectors stay: they are small."""
        return {
            id(p): i
            for i, layer in enumerate(self._layers)
            for p in layer.parameters()
            if p.dim() >= 2 and not _is_adapter(layer, p)
        }

    def take(self, parameter: nn.Parameter, layer: int) -> None:
        """Move it to the host, from wherever it lies; on the device only its shape is left."""
        memory = HostMemory(parameter.numel() * parameter.element_size(), pinned=self._there is not None)
        host = memory.tensor(parameter.numel(), parameter.dtype).view(parameter.shape)
        host.copy_(parameter.detach())
        parameter.data = torch.empty_like(parameter.data, device=self._device)
        parameter.data.untyped_storage().resize_(0)
        away = _Away(parameter, host, memory, layer)
        self._held[layer].append(away)
        self._away[id(parameter)] = away

    def take_frozen(self) -> int:
        """Every covered one that is not trained; the optimizer takes the others. How many."""
        places = self.covered()
        frozen = [p for layer in self._layers for p in layer.parameters() if not p.requires_grad and id(p) in places]
        for parameter in frozen:
            self.take(parameter, places[id(parameter)])
        return len(frozen)

    def describe(self) -> str:
        size = sum(a.memory.size for a in self._away.values())
        return f"{size / 2**30:.2f} GiB of {'pinned ' if self._there else ''}host memory, fetched a layer ahead"

    # ---- on their way

    def again(self, index: int) -> _Again:
        """Context around the recomputation of a layer: from here on its backward."""
        return _Again(self, index)

    def _arrive(self, index: int, following: int) -> None:
        """Have a layer's weights here, and the following one's on their way; any others leave."""
        self._drain()
        for other in [i for i in self._here if i not in (index, following)]:
            self._leave(other)
        self._bring(index)
        if (arrived := self._here[index]) is not None:
            torch.cuda.current_stream(self._device).wait_event(arrived)
        if 0 <= following < len(self._layers):
            self._bring(following)
        self.most_layers_here = max(self.most_layers_here, len(self._here) + len(self._leaving))

    def _bring(self, index: int) -> None:
        if index in self._here:
            return
        for away in self._held[index]:
            # allocated on the computing stream, where its memory may still be in use
            away.parameter.data.untyped_storage().resize_(away.host.numel() * away.host.element_size())
        if self._there is None:
            for away in self._held[index]:
                away.parameter.data.copy_(away.host)
            self._here[index] = None
            return
        self._there.wait_stream(torch.cuda.current_stream(self._device))
        if index in self._sent:  # it may not overtake its own way home
            self._there.wait_event(self._sent[index])
        with torch.cuda.stream(self._there):
            for away in self._held[index]:
                away.parameter.data.copy_(away.host, non_blocking=True)
            self._here[index] = self._there.record_event()

    def _leave(self, index: int) -> None:
        """Send home what was changed; the memory is given back once that is done."""
        arrived = self._here.pop(index)
        changed = [a for a in self._held[index] if a.changed]
        for away in changed:
            away.changed = False
        if self._back is None:
            for away in changed:
                away.host.copy_(away.parameter.data)
            self._empty(index)
            return
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(arrived)  # nothing where it was used; a step that was given up may have sent for it in vain
        if not changed:
            self._empty(index)
            return
        self._back.wait_stream(stream)
        with torch.cuda.stream(self._back):
            for away in changed:
                away.host.copy_(away.parameter.data, non_blocking=True)
            self._sent[index] = self._back.record_event()
        self._leaving.append((index, self._sent[index]))

    def _drain(self) -> None:
        for index, sent in self._leaving:
            torch.cuda.current_stream(self._device).wait_event(sent)
            self._empty(index)
        self._leaving = []

    def _empty(self, index: int) -> None:
        for away in self._held[index]:
            away.parameter.data.untyped_storage().resize_(0)

    # ---- for the optimizer

    def changed(self, parameter: nn.Parameter) -> None:
        """Its values on the device are newer than those at home."""
        if (away := self._away.get(id(parameter))) is not None:
            assert away.layer in self._here, "a weight is changed while its layer is here"
            away.changed = True

    def home_of(self, parameter: nn.Parameter) -> Tensor | None:
        """Where its values lie, up to date and free to be read or written; None where it is not on the host."""
        away = self._away.get(id(parameter))
        if away is None:
            return None
        self.settle()
        return away.host

    def settle(self) -> None:
        """Everything at home and nothing on its way. The host waits."""
        for index in list(self._here):
            self._leave(index)
        self._drain()
        if self._back is not None:
            self._back.synchronize()


class _Again:
    """May be entered again: a graph that is kept is computed again for every backward."""

    def __init__(self, stream: WeightStream, index: int):
        self._stream, self._index = stream, index

    def __enter__(self) -> None:
        self._stream._arrive(self._index, self._index - 1)

    def __exit__(self, *_: object) -> None:
        """The weights stay: the layer's backward follows."""


def _is_adapter(layer: nn.Module, parameter: nn.Parameter) -> bool:
    return any(p is parameter and ("lora_" in f".{n}" or "modules_to_save" in n) for n, p in layer.named_parameters())
