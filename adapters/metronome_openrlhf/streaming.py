"""What ``--metronome.rollout_source periodic`` needs of OpenRLHF's arguments, and what it refuses."""

from __future__ import annotations

from math import lcm
from typing import Any

from metronome_openrlhf.arguments import GROUP_ESTIMATORS, WHERE, put, refuse


def one_step(args: Any, notes: list[str]) -> None:
    """One optimiser step a period, on engines that generate while the trainer trains."""
    synchronous = f"{WHERE}.rollout_source synchronous"
    refuse(
        args.train.colocate_all,
        "generation and training overlap only on devices of their own",
        "train.colocate_all",
        True,
        f"leave --train.colocate_all out, or {synchronous}",
    )
    refuse(
        not args.vllm.num_engines,
        "generation needs engines of its own",
        "vllm.num_engines",
        args.vllm.num_engines,
        "--vllm.num_engines 1 or more",
    )
    refuse(
        int(args.train.max_epochs) != 1,
        "a period has one optimiser step, so every sample is visited once",
        "train.max_epochs",
        args.train.max_epochs,
        "--train.max_epochs 1",
    )
    estimator = args.algo.advantage.estimator
    refuse(
        estimator not in GROUP_ESTIMATORS,
        "this advantage estimator looks at the whole batch (whitening, a mean over it, a critic); a period trains"
        " groups as they finish",
        "algo.advantage.estimator",
        estimator,
        f"--algo.advantage.estimator {' | '.join(GROUP_ESTIMATORS)}, or {synchronous}",
    )
    refuse(
        args.algo.kl.target,
        "an adaptive KL coefficient would move within a batch",
        "algo.kl.target",
        args.algo.kl.target,
        "leave --algo.kl.target out",
    )
    refuse(
        args.train.enable_ema,
        "OpenRLHF moves its average once a micro-batch, which depends on how a batch is cut",
        "train.enable_ema",
        True,
        f"leave --train.enable_ema out, or {synchronous}",
    )
    refuse(
        args.train.dynamic_batch_enable,
        "dynamic batches are cut from a whole batch",
        "train.dynamic_batch_enable",
        True,
        "leave --train.dynamic_batch_enable out",
    )
    for name in ("ring_attn_size", "tensor_parallel_size"):
        refuse(
            int(getattr(args.ds, name)) > 1,
            "parts of a batch over several ranks of one row aren't tested",
            f"ds.{name}",
            getattr(args.ds, name),
            f"--ds.{name} 1, or {synchronous}",
        )
    refuse(
        int(args.ds.zero_stage) != 2,
        "the accumulated gradient is rescaled through the ZeRO-2 optimiser's own scale; other stages aren't tested",
        "ds.zero_stage",
        args.ds.zero_stage,
        f"--ds.zero_stage 2, or {synchronous}",
    )
    refuse(
        args.ds.param_dtype == "fp16",
        "the scale by which the accumulated gradient is rescaled is fp16's own, which moves by itself",
        "ds.param_dtype",
        "fp16",
        f"--ds.param_dtype bf16, or {synchronous}",
    )
    refuse(
        args.actor.optim != "adam",
        "DeepSpeed takes Muon's update, which has no scale, of the sum of parts before it is rescaled",
        "actor.optim",
        args.actor.optim,
        f"--actor.optim adam, or {synchronous}",
    )
    for flag, on, why in (
        ("ds.adam_offload", args.ds.adam_offload, "the rescaling of gradients on the host isn't tested"),
        ("ds.enable_sleep", args.ds.enable_sleep, "the trainer works while groups arrive and can't be put to sleep"),
        ("ds.deepcompile", args.ds.deepcompile, "DeepCompile needs DeepSpeed's own accumulation of gradients"),
    ):
        refuse(on, why, flag, True, f"leave --{flag} out, or {synchronous}")
    refuse(
        float(args.actor.aux_loss_coef) > 1e-8,
        "router balance losses depend on which groups share a micro-batch",
        "actor.aux_loss_coef",
        args.actor.aux_loss_coef,
        f"--actor.aux_loss_coef 0, or {synchronous}",
    )
    refuse(
        int(args.critic.freezing_steps) >= 0,
        "there is no critic to warm up",
        "critic.freezing_steps",
        args.critic.freezing_steps,
        "leave --critic.freezing_steps out",
    )
    refuse(
        int(args.data.max_images_per_prompt) > 0,
        "images in parts of a batch aren't tested",
        "data.max_images_per_prompt",
        args.data.max_images_per_prompt,
        f"--data.max_images_per_prompt 0, or {synchronous}",
    )
    if args.actor.policy_loss_type == "gspo":
        put(args, "actor.loss_agg_mode", "seq-mean-token-mean", notes, "what gspo averages by, whatever is set")
    kl_in_loss = args.algo.kl.use_loss and float(args.algo.kl.init_coef) > 0
    refuse(
        args.actor.loss_agg_mode != "token-mean" and (kl_in_loss or args.actor.entropy_coef),
        "OpenRLHF divides the KL and entropy terms by the tokens of a batch whatever the loss is divided by; no single"
        " rescaling serves rows and tokens",
        "actor.loss_agg_mode",
        args.actor.loss_agg_mode,
        "--actor.loss_agg_mode token-mean, or the KL in the reward (without --algo.kl.use_loss) and no"
        f" --actor.entropy_coef, or {synchronous}",
    )
    generated = args.rollout.vllm_generate_batch_size
    refuse(
        generated and generated != args.rollout.batch_size,
        "a period generates what it trains",
        "rollout.vllm_generate_batch_size",
        generated,
        "leave it out",
    )
    if args.ds.grad_accum_dtype is None:
        put(args, "ds.grad_accum_dtype", "fp32", notes, "sums of gradients in a shorter type depend on their order")
    rows = int(args.rollout.batch_size) * int(args.rollout.n_samples_per_prompt)
    # One step a period whatever this says; DeepSpeed's other engines want a multiple of all their ranks' micro-batches.
    models = [args.actor, args.ref] if args.algo.kl.init_coef > 0 else [args.actor]
    models += [] if args.reward.remote_url or args.train.agent_func_path else [args.reward]
    every = int(args.train.micro_batch_size) * lcm(*(int(one.num_nodes * one.num_gpus_per_node) for one in models))
    put(args, "train.batch_size", -(-rows // every) * every, notes, "one optimiser step a period")
