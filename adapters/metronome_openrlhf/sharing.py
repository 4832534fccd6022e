"""What ``--metronome.attention shared_prompt`` needs of OpenRLHF's arguments, and what it refuses."""

from __future__ import annotations

from typing import Any

from metronome_openrlhf.arguments import WHERE, refuse

_HOST = f"{WHERE}.attention host"


def share_prompts(args: Any, part: Any, notes: list[str]) -> None:
    """Rows of one prompt in a micro-batch; says where a micro-batch takes groups apart."""
    name = part.settings.attention
    for flag, on, why in (
        (
            "ds.use_liger_kernel",
            args.ds.use_liger_kernel,
            "Liger's layers aren't tested with a layout",
        ),
        ("ds.load_in_4bit", args.ds.load_in_4bit, "4-bit weights aren't tested with it"),
        ("ds.deepcompile", args.ds.deepcompile, "DeepCompile would compile a graph for each layout"),
        (
            "train.dynamic_batch_enable",
            args.train.dynamic_batch_enable,
            "dynamic batches are balanced by the lengths of rows, which takes groups apart",
        ),
    ):
        refuse(on, f"{WHERE}.attention {name}: {why}", flag, True, f"leave --{flag} out, or {_HOST}")
    for flag, size in (
        ("ds.ring_attn_size", args.ds.ring_attn_size),
        ("ds.tensor_parallel_size", args.ds.tensor_parallel_size),
    ):
        refuse(
            int(size) > 1,
            f"{WHERE}.attention {name}: a row with a layout isn't cut over ranks",
            flag,
            size,
            f"--{flag} 1, or {_HOST}",
        )
    refuse(
        args.ds.lora.rank and float(args.ds.lora.dropout) > 0,
        f"{WHERE}.attention {name}: dropout draws one mask for the prompt instead of G",
        "ds.lora.dropout",
        args.ds.lora.dropout,
        f"--ds.lora.dropout 0, or {_HOST}",
    )
    refuse(
        float(args.actor.aux_loss_coef) > 1e-8,
        f"{WHERE}.attention {name}: router balance losses would count a prompt once instead of G times",
        "actor.aux_loss_coef",
        args.actor.aux_loss_coef,
        f"--actor.aux_loss_coef 0, or {_HOST}",
    )
    refuse(
        int(args.data.max_images_per_prompt) > 0,
        f"{WHERE}.attention {name}: images have positions of several dimensions",
        "data.max_images_per_prompt",
        args.data.max_images_per_prompt,
        f"--data.max_images_per_prompt 0, or {_HOST}",
    )
    size = int(args.rollout.n_samples_per_prompt)
    refuse(
        int(args.train.micro_batch_size) < 2,
        f"{WHERE}.attention {name}: a micro-batch of one row shares no prompt",
        "train.micro_batch_size",
        args.train.micro_batch_size,
        f"--train.micro_batch_size {size} holds a group, or {_HOST}",
    )
    for flag, rows, what in (
        ("train.micro_batch_size", int(args.train.micro_batch_size), "the update"),
        ("rollout.micro_batch_size", int(args.rollout.micro_batch_size), "old and reference log-probs"),
    ):
        if rows % size:
            notes.append(
                f"--{flag} {rows} isn't a multiple of G = {size}: in {what} groups are cut, and a cut group's prompt is"
                " computed once a part"
            )
    if part.mode != "periodic" and int(args.train.batch_size) < int(args.rollout.batch_size) * size:
        notes.append(
            f"an optimiser step takes --train.batch_size {args.train.batch_size} rows of whole groups, where OpenRLHF"
            " draws single rows from the batch"
        )
    notes.append(
        "the actor's and the reference model's attention is metronome's; --ds.attn_implementation serves other models,"
        " and the comparison at the first use"
    )
