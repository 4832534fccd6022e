"""What ``metronome.attention=shared_prompt`` needs of AReaL's configuration, and what it refuses."""

from __future__ import annotations

from typing import Any

from areal.api.alloc_mode import ModelAllocation

from metronome_areal.arguments import WHERE, put, refuse


def share_prompts(config: Any, part: Any, notes: list[str]) -> None:
    """Rows of one prompt in a micro-batch, in the actor, the reference model and a teacher that is trained like one.

    Raises ConfigurationError for what a row with a layout can't go through.
    """
    if not part.shares_prompt:
        return
    host = f"{WHERE}.attention={part.settings.attention}"
    for name in ("actor", "ref"):
        if getattr(config, name) is not None:
            _engine(config, name, host, notes)
    teacher = config.teacher
    if teacher is not None and teacher.engine_type == "train":
        _engine(config, "teacher.train", host, notes)


def of_whole_groups(config: Any, part: Any) -> list[str]:
    """A line where a step gets other rows than stock AReaL's."""
    count = config.actor.ppo_n_minibatches
    if not part.shares_prompt or count <= 1:
        return []
    what = "minibatches are made of whole groups, a group is cut where there are fewer"
    return [f"actor.ppo_n_minibatches={count}: {what}"]


def _engine(config: Any, name: str, host: str, notes: list[str]) -> None:
    engine = config
    for part in name.split("."):
        engine = getattr(engine, part)
    remedy = f"leave {name}.{{}} out, or {WHERE}.attention=host"
    for key, why in (
        ("enable_tree_training", "tree training shares prompts by a layout of its own"),
        ("use_kernels", "kernels from the hub stand in the place of layers that aren't tested with a layout"),
    ):
        refuse(getattr(engine, key), f"{host}: {why}", f"{name}.{key}", True, remedy.format(key))
    backend = str(engine.backend)
    size = ModelAllocation.from_str(backend, name=name).parallel
    refuse(
        size.tensor_parallel_size * size.context_parallel_size > 1,
        f"{host}: a row with a layout isn't cut over ranks",
        f"{name}.backend",
        backend,
        f"fsdp:d{size.world_size}, or {WHERE}.attention=host",
    )
    why = f"{host}: rows without a layout, the first-use check's, go through it"
    put(config, f"{name}.attn_impl", "sdpa", notes, why)
    put(config, f"{name}.pad_to_maximum", False, notes, f"{host}: rows are as long as their tokens")
    put(config, f"{name}.mb_spec.granularity", 1, notes, f"{host}: groups stay together whatever their size")
    why = f"{host}: whole groups, longest first"
    put(config, f"{name}.mb_spec.packing_algorithm", "ffd", notes, why)
