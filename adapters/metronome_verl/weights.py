"""Whether an optimiser step moved the weights, and whether what is published moved with them: sums over bits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from metronome.errors import MetronomeError

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def fingerprint(module: Any) -> list[int]:
    """One integer a trained parameter: the sum of this rank's values, their bits read as integers.

    Exact where one value changes, whatever the precision; several changes of one parameter cancel only by chance.
    ``module`` is a module or, as Megatron keeps them, a list of them. No copy of the weights is made.
    """
    modules = module if isinstance(module, (list, tuple)) else [module]
    sums = []
    for parameter in (one for part in modules for one in part.parameters() if one.requires_grad):
        sums.append(_bits(parameter.to_local() if hasattr(parameter, "to_local") else parameter))
    return _listed(sums)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(_BITS[tensor.element_size()]).sum(dtype=torch.int64)


def _listed(sums: list[torch.Tensor]) -> list[int]:
    return torch.stack([one.to(sums[0].device) for one in sums]).tolist() if sums else []


class Movement:
    """What happened to the weights since ``begin``: whether they moved, and the largest learning rate used.

    Attributes:
        moves: updates that moved this rank's weights, from the start; ``begin`` leaves it.
    """

    def __init__(self) -> None:
        self.moves = 0
        self.begin()

    def begin(self) -> None:
        """Forgets what was."""
        self.changed, self.lr = False, 0.0

    @contextmanager
    def watched(self, engine: Any) -> Iterator[None]:
        """Around an optimiser step, with the weights where they are trained; looks until one step moved them."""
        rates = [float(group["lr"]) for group in getattr(engine.optimizer, "param_groups", []) if "lr" in group]
        self.lr = max([self.lr, *rates])
        before = None if self.changed else fingerprint(engine.module)
        yield
        if before is not None:
            self.changed = before != fingerprint(engine.module)
            self.moves += self.changed


class Publication:
    """verl's ``get_per_tensor_param`` of an engine, held against what it gave before.

    The tensors on their way to the rollout engine aren't those that are trained: shards are put together, adapters
    merged and rounded to bfloat16, or left out. Looks at what the sender sends; each transport delivers it or fails.
    """

    def __init__(self, send: Callable[..., tuple[Any, Any]], movement: Movement) -> None:
        self._send, self._movement = send, movement
        self._last: dict[str, tuple[int, list[int]]] = {}

    def __call__(self, *positional: Any, **options: Any) -> tuple[Any, Any]:
        """verl's weights and adapter configuration; the weights raise MetronomeError at their end, if none changed."""
        weights, adapter = self._send(*positional, **options)
        return self._watched(weights, repr((positional, sorted(options.items())))), adapter

    def _watched(self, weights: Iterable[tuple[str, torch.Tensor]], kind: str) -> Iterator[tuple[str, torch.Tensor]]:
        moves, sums = self._movement.moves, []
        for name, tensor in weights:
            sums.append(_bits(tensor))
            yield name, tensor
        before, sent = self._last.get(kind), _listed(sums)
        self._last[kind] = moves, sent
        if before is not None and before[0] < moves and before[1] == sent:
            raise MetronomeError(
                "the optimiser step moved weights, and what is published is what was published before",
                found=f"{len(sent)} tensors, every one bit for bit",
                where="actor_rollout_ref.rollout.checkpoint_engine",
                remedy="with LoRA actor_rollout_ref.model.lora.merge=True, and a learning rate whose steps don't vanish"
                " where verl rounds merged weights to bfloat16",
            )
