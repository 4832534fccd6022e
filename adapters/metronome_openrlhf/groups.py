"""What ``--metronome.group_controller`` needs of OpenRLHF's arguments, and what it refuses."""

from __future__ import annotations

from typing import Any

from metronome.controller_check import checked_size
from metronome_openrlhf.arguments import GROUP_ESTIMATORS, WHERE, put, refuse
from metronome_openrlhf.windows import windows


def own_groups(args: Any, part: Any, notes: list[str]) -> None:
    """G and P by the controller; ``--rollout.batch_size`` is the prompts of its largest G."""
    controller = part.selection.group_controller
    name = part.settings.group_controller
    refuse(
        args.rollout.vllm_generate_batch_size not in (None, 0, args.rollout.batch_size),
        "oversampled groups would be trained with another G than the batch's",
        "rollout.vllm_generate_batch_size",
        args.rollout.vllm_generate_batch_size,
        "leave it out",
    )
    size = checked_size(controller, f"{WHERE}.group_controller")
    put(args, "rollout.n_samples_per_prompt", size, notes, f"G of {name}")
    if name == "fixed" and part.mode == "bounded":
        return
    refuse(
        args.algo.advantage.estimator == "gae",
        "a critic's accumulation window doesn't follow a batch that the controller fills",
        "algo.advantage.estimator",
        "gae",
        f"--rollout.n_samples_per_prompt {size}, and leave {WHERE}.group_controller out",
    )
    if name != "fixed":
        refuse(
            part.mode == "bounded",
            "batches in flight were dispatched with the G of their time; one G a batch isn't kept over the queue",
            "metronome.group_controller",
            name,
            f"{WHERE}.rollout_source periodic or synchronous",
        )
        refuse(
            args.algo.advantage.estimator not in GROUP_ESTIMATORS,
            "G says nothing to an advantage estimator that doesn't look at single groups",
            "algo.advantage.estimator",
            args.algo.advantage.estimator,
            f"--algo.advantage.estimator {' | '.join(GROUP_ESTIMATORS)}",
        )
        refuse(
            args.train.dynamic_batch_enable,
            "OpenRLHF sizes dynamic batches by the G that it was started with",
            "train.dynamic_batch_enable",
            True,
            "leave --train.dynamic_batch_enable out",
        )
        refuse(
            not (args.reward.remote_url or args.train.agent_func_path),
            "a reward model's rewards come after the group that the controller is told of",
            "reward.remote_url",
            args.reward.remote_url,
            "--reward.remote_url or --train.agent_func_path",
        )
    found = windows(args, controller.largest(), part.mode == "periodic")
    options = part.settings.options_of(name)
    for one in sorted({size, controller.largest(), *options.get("sizes", ())}):
        found.check(one)
