"""Publication of weights through one shared-memory buffer, with a fingerprint of what is published.

The rollout workers' parameters *are* views of the buffer where device and dtype allow it, so a publication copies
nothing on their side; it is safe because nobody decodes while the buffer is written: behind the period's barrier,
or while the workers are paused.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch

_SAMPLES = 65_536  # elements that a fingerprint reads, spread over all trained parameters


@dataclass(frozen=True)
class _Slot:
    name: str
    offset: int
    shape: torch.Size
    trained: bool


class SharedWeights:
    """All parameters of a model in one float32 shared-memory tensor; picklable to a spawned process."""

    def __init__(self, model: Any) -> None:
        self._slots: list[_Slot] = []
        offset = 0
        for name, parameter in model.named_parameters():
            self._slots.append(_Slot(name, offset, parameter.shape, parameter.requires_grad))
            offset += parameter.numel()
        self.buffer = torch.empty(offset, dtype=torch.float32).share_memory_()
        self._samples = self._sample_places()
        self.write(model, everything=True)

    def alias(self, model: Any) -> None:
        """Makes the model's parameters views of the buffer."""
        for slot, parameter in self._pairs(model):
            parameter.data = self._view(slot)

    @torch.no_grad()
    def write(self, model: Any, everything: bool = False) -> None:
        """Copies the trained parameters (or all) into the buffer; nothing to do for an aliased model."""
        for slot, parameter in self._pairs(model):
            if (slot.trained or everything) and parameter.data_ptr() != self._view(slot).data_ptr():
                self._view(slot).copy_(parameter)

    @torch.no_grad()
    def read(self, model: Any) -> None:
        """Copies the buffer into a model of another dtype or device."""
        for slot, parameter in self._pairs(model):
            if parameter.data_ptr() != self._view(slot).data_ptr():
                parameter.copy_(self._view(slot))

    def fingerprint(self, dtype: torch.dtype = torch.float32) -> str:
        """A hash of samples of every trained parameter as ``dtype`` holds it; any optimiser step changes it."""
        return _hash([self._view(slot).flatten()[places].to(dtype) for slot, places in self._samples])

    def fingerprint_of(self, model: Any) -> str:
        """The same hash, read from a model's own parameters."""
        parameters = dict(model.named_parameters())
        return _hash([parameters[slot.name].detach().flatten()[places] for slot, places in self._samples])

    def _view(self, slot: _Slot) -> torch.Tensor:
        return self.buffer[slot.offset : slot.offset + slot.shape.numel()].view(slot.shape)

    def _pairs(self, model: Any) -> list[tuple[_Slot, torch.nn.Parameter]]:
        parameters = dict(model.named_parameters())
        return [(slot, parameters[slot.name]) for slot in self._slots]

    def _sample_places(self) -> list[tuple[_Slot, torch.Tensor]]:
        trained = [slot for slot in self._slots if slot.trained]
        each = max(8, _SAMPLES // max(1, len(trained)))
        sizes = [(slot, slot.shape.numel()) for slot in trained]
        return [(slot, torch.arange(min(each, size)) * size // min(each, size)) for slot, size in sizes]


def _hash(samples: list[torch.Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for sample in samples:
        digest.update(sample.float().cpu().numpy().tobytes())
    return digest.hexdigest()
