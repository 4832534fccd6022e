"""The plug-in: ``attention: host`` and ``attention: shared_prompt``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from metronome.contracts import AttentionBackend, Offer
from metronome.device import Device
from metronome.errors import ConfigurationError
from metronome.hookspecs import hookimpl
from metronome.settings import Options, parse_options
from metronome.shared_prompt.host import HostAttention
from metronome.shared_prompt.options import SharedPromptOptions

_DEVICES = {"cascade": "cpu", "varlen": "cuda", "flex": "cuda", "npu": "npu", "npu_cascade": "npu"}


class HostOptions(Options):
    """``attention: host`` has no options."""


@hookimpl
def attention(name: str, settings: Mapping[str, Any], device: Device) -> AttentionBackend | None:
    """``host`` or ``shared_prompt``; None for any other name."""
    if name == "host":
        parse_options(HostOptions, settings, where="metronome.host")
        return HostAttention()
    if name != "shared_prompt":
        return None
    options = parse_options(SharedPromptOptions, settings, where="metronome.shared_prompt")
    wanted = _DEVICES.get(options.backend, device.kind)
    if wanted != device.kind:
        raise ConfigurationError(
            f"the {options.backend} backend calls a kernel of {wanted}",
            found=device.kind,
            where="metronome.shared_prompt.backend",
            remedy="backend: auto",
        )
    from metronome.shared_prompt.select import SharedPromptAttention

    return SharedPromptAttention(options)


@hookimpl
def describe() -> list[Offer]:
    """Both names with their options."""
    return [
        Offer("attention", "host", "the host's own attention, rows unchanged", {}),
        Offer(
            "attention",
            "shared_prompt",
            "a group's prompt is computed once, its responses attend to it",
            SharedPromptOptions().model_dump(),
        ),
    ]
