"""Publishing a model with LoRA: its adapted weights with their adapters added, under the base model's names.

OpenRLHF sends every parameter of the wrapped model under PEFT's names (``base_model.model...base_layer.weight``,
``...lora_A...``), which vLLM refuses. Here the weights of adapted layers are sent as ``W + (alpha / r) B A``, summed in
float32 and rounded to the type of ``W``, one at a time; the engines hold the others from the start. Not run on a card.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from metronome.errors import ConfigurationError
from metronome_openrlhf.arguments import WHERE, refuse


def check_adapters(args: Any) -> None:
    """Refuses weights from which a sum can't be formed.

    Raises ConfigurationError for those that are cut over ranks or quantised.
    """
    if not args.ds.lora.rank:
        return
    for flag, on, found, remedy in (
        ("ds.zero_stage", int(args.ds.zero_stage) == 3, 3, "--ds.zero_stage 2"),
        (
            "ds.tensor_parallel_size",
            int(args.ds.tensor_parallel_size) > 1,
            args.ds.tensor_parallel_size,
            "--ds.tensor_parallel_size 1",
        ),
        ("ds.load_in_4bit", args.ds.load_in_4bit, True, "leave --ds.load_in_4bit out"),
    ):
        what = f"{WHERE} publishes adapters added to whole weights, which no rank holds with this"
        refuse(on, what, flag, found, f"{remedy}, or no --ds.lora.rank")


class Merged:
    """What OpenRLHF's broadcast reads of a parameter; the sum is formed when it is sent.

    Args:
        layer: PEFT's, around a linear layer.
    """

    requires_grad = True

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self._base = layer.get_base_layer().weight
        self.shape, self.dtype = self._base.shape, self._base.dtype

    @property
    def data(self) -> Any:
        """``W + (alpha / r) B A`` in the type of ``W``."""
        layer, total = self._layer, self._base.detach().float()
        for name in layer.active_adapters:
            down, up = (part[name].weight.detach().float() for part in (layer.lora_A, layer.lora_B))
            total = total + layer.scaling[name] * (up @ down)
        return total.to(self.dtype)


def merged(model: Any) -> list[tuple[str, Merged]]:
    """Each adapted weight of PEFT's ``model`` by its name in the base model.

    Raises ConfigurationError for an adapter of anything but a linear layer.
    """
    from peft.tuners.lora import Linear, LoraLayer

    found = []
    for name, module in model.get_base_model().named_modules():
        if not isinstance(module, LoraLayer):
            continue
        plain = isinstance(module, Linear) and not module.fan_in_fan_out and not getattr(module, "lora_variant", None)
        if not plain:
            raise ConfigurationError(
                "this adapter isn't a plain LoRA of a linear layer, and can't be added to its weights",
                found=f"{name}: {type(module).__name__}",
                where="--ds.lora.target_modules",
                remedy="leave it out of --ds.lora.target_modules",
            )
        found.append((f"{name}.weight", Merged(module)))
    return found


@contextmanager
def merging(trainer: Any) -> Iterator[None]:
    """While OpenRLHF's ``broadcast_to_vllm`` runs, ``trainer.actor`` has the sums for parameters."""
    actor = trainer.actor
    sums = merged(actor.model.module)
    shown = SimpleNamespace(named_parameters=lambda: iter(sums))
    trainer.actor = SimpleNamespace(model=SimpleNamespace(module=shown), is_vlm=getattr(actor, "is_vlm", False))
    try:
        yield
    finally:
        trainer.actor = actor
