"""One resolver for the device: cpu, cuda or npu, its collective backend and its default attention backend."""

from __future__ import annotations

from dataclasses import dataclass

from metronome.errors import ConfigurationError, nearest


@dataclass(frozen=True)
class Device:
    """A device kind and what follows from it.

    Attributes:
        kind: ``cpu``, ``cuda`` or ``npu``; also torch's device type.
        collective: torch.distributed backend: ``gloo``, ``nccl``, ``hccl``.
    """

    kind: str
    collective: str


_DEVICES = {
    "cpu": Device("cpu", "gloo"),
    "cuda": Device("cuda", "nccl"),
    "npu": Device("npu", "hccl"),
}


def device_called(name: str) -> Device:
    """The device kind ``cpu``, ``cuda`` or ``npu``; nobody asks whether it's here: a cluster's driver may have none."""
    return _DEVICES[name]


def resolve_device(name: str = "auto", where: str = "device") -> Device:
    """The device called ``name``; ``auto`` takes an NPU, else a GPU, else the CPU.

    Raises ConfigurationError for an unknown name or a device that torch doesn't see.
    """
    if name != "auto" and name not in _DEVICES:
        raise ConfigurationError("unknown device", found=name, where=where, remedy=nearest(name, ["auto", *_DEVICES]))
    if name == "cpu":
        return _DEVICES["cpu"]
    import torch

    npu = getattr(torch, "npu", None)
    seen = {"npu": bool(npu and npu.is_available()), "cuda": torch.cuda.is_available(), "cpu": True}
    if name == "auto":
        return next(_DEVICES[kind] for kind, there in seen.items() if there)
    if not seen[name]:
        raise ConfigurationError(
            "torch doesn't see this device",
            found=name,
            where=where,
            remedy="device: cpu, or install torch (torch_npu) for it",
        )
    return _DEVICES[name]
