"""What a mode needs of AReaL's configuration is set and said, or refused with the key to change."""

from __future__ import annotations

from typing import Any

from areal.api.alloc_mode import ModelAllocation

from metronome.contracts import RunFacts
from metronome.errors import ConfigurationError
from metronome_areal.arguments import WHERE, put, refuse
from metronome_areal.config import Part
from metronome_areal.flow import NEVER
from metronome_areal.queueing import keep_bound, own_batches
from metronome_areal.sharing import of_whole_groups, share_prompts

_KEYS = {"accumulation_dtype": "actor.optimizer_dtype=float32", "dropout": "actor.disable_dropout=true"}


def arrange(config: Any, part: Part) -> list[str]:
    """Sets in ``config`` what the chosen hooks need; returns what was set, as lines to print.

    Raises ConfigurationError for what can't be true together, with the key that mends it.
    """
    notes = _group_sizes(config)
    _versions(config)
    if not part.block:
        return notes
    _engines(config)
    share_prompts(config, part, notes)
    if part.own_loss:
        _loss(config, part, notes)
    if part.mode == "periodic":
        _one_step(config, part, notes)
    if part.owns_rollouts:
        own_batches(config, part)
        notes += keep_bound(config, part)
        bound = config.rollout.max_head_offpolicyness
        owner = "rollout source" if "rollout_source" in part.block else "group controller"
        why = f"metronome's {owner} owns admission"
        if part.mode == "synchronous" and 0 < bound < NEVER:
            why += f"; a batch is of one version: {WHERE}.rollout_source=bounded keeps your {bound}"
        put(config, "rollout.max_head_offpolicyness", NEVER, notes, why)
    return [*notes, *of_whole_groups(config, part)]  # of what the modes left


def _versions(config: Any) -> None:
    for name in ("actor", "rollout", "critic", "ref"):
        refuse(
            getattr(getattr(config, name), "_version", "v1") == "v2",
            "v2's gateway controllers have fixed routes, and no place for our methods",
            f"{name}._version",
            "v2",
            f"{name}._version=v1",
        )


def _group_sizes(config: Any) -> list[str]:
    """Lines about a size of groups that isn't read: statistics are over a prompt's rows."""
    return [
        f"actor.{key}.group_size={norm.group_size} isn't read: a group is the rows of one prompt"
        for key, norm in (("adv_norm", config.actor.adv_norm), ("reward_norm", config.actor.reward_norm))
        if norm is not None
        and "group" in (norm.mean_level, norm.std_level)
        and norm.group_size != config.gconfig.n_samples
    ]


def _engines(config: Any) -> None:
    backend = str(config.actor.backend)
    refuse(
        not backend.startswith("fsdp"),
        "hooks are written for AReaL's FSDP engine",
        "actor.backend",
        backend,
        "fsdp:d<ranks>, or no metronome block",
    )
    refuse(
        config.rollout.return_routed_experts,
        "AReaL's training engines don't replay routed experts, and neither do ours",
        "rollout.return_routed_experts",
        True,
        "leave rollout.return_routed_experts out",
    )


def _loss(config: Any, part: Part, notes: list[str]) -> None:
    actor, name = config.actor, f"{WHERE}.loss={part.settings.loss}"
    for key, on, why in (
        ("use_sapo_loss", actor.use_sapo_loss, "SAPO is another loss"),
        ("m2_threshold", actor.m2_threshold is not None, "M2PO masks by a loss of its own"),
        (
            "enable_tree_training",
            actor.enable_tree_training,
            "a tree's micro-batches don't say how long their rows are",
        ),
        (
            "rejection_sampling",
            actor.rejection_sampling is not None,
            "AReaL's rejection sampling and ours both weigh samples by one ratio",
        ),
        (
            "importance_sampling_level",
            actor.importance_sampling_level != "token",
            "GSPO's ratio of whole rows is another loss",
        ),
    ):
        refuse(on, f"{name}: {why}", f"actor.{key}", getattr(actor, key), f"leave actor.{key} out")
    refuse(config.teacher is not None, f"{name}: a teacher's loss isn't added", "teacher", "set", "teacher=null")
    refuse(
        part.selection.loss.keeps_proximal and actor.ppo_n_minibatches > 1,
        f"{name}: AReaL visits a row once an update, so that a kept proximal policy is that of its own mini-batch",
        "actor.ppo_n_minibatches",
        actor.ppo_n_minibatches,
        f"1, or {WHERE}.a3po.proximal=recompute",
    )
    method = "recompute" if part.selection.loss.needs_proximal_forward else "loglinear"
    put(config, "actor.use_decoupled_loss", True, notes, f"{name} gets the engines' log-probs")
    passes = "a" if method == "recompute" else "no"
    put(config, "actor.prox_logp_method", method, notes, f"{name}: {passes} forward pass")
    if method == "loglinear":
        put(config, "actor.recompute_logprob", False, notes, f"{name}: no forward pass")


def _one_step(config: Any, part: Part, notes: list[str]) -> None:
    name = f"{WHERE}.rollout_source=periodic"
    actor = config.actor
    put(config, "actor.ppo_n_minibatches", 1, notes, f"{name}: one optimiser step a period")
    for key, norm in (("actor.adv_norm", actor.adv_norm), ("actor.reward_norm", actor.reward_norm)):
        if norm is not None:
            levels = (norm.mean_level, norm.std_level)
            refuse(
                "batch" in levels,
                f"{name}: statistics over the batch aren't known before its last group",
                f"{key}.mean_level, {key}.std_level",
                ", ".join(str(level) for level in levels),
                f"group, or none, and {key}.group_size={config.gconfig.n_samples}",
            )
    refuse(config.critic is not None, f"{name}: a critic learns over the batch", "critic", "set", "critic=null")
    refuse(config.teacher is not None, f"{name}: a teacher isn't tested with parts", "teacher", "set", "teacher=null")
    refuse(
        actor.enable_tree_training,
        f"{name}: tree training isn't tested with parts of a batch",
        "actor.enable_tree_training",
        True,
        f"false, and {WHERE}.attention=shared_prompt",
    )
    refuse(
        actor.offload or config.rollout.scheduling_strategy.type == "colocation",
        f"{name}: generation and training overlap only on devices of their own",
        "rollout.scheduling_strategy",
        "colocation",
        "separation",
    )
    for key in ("per_layer_optim_step", "offload_params"):
        refuse(
            getattr(actor.fsdp, key), f"{name}: isn't tested with parts of a batch", f"actor.fsdp.{key}", True, "false"
        )
    refuse(
        actor.mask_no_eos_with_zero,
        f"{name}: AReaL takes the widest rows of a batch for unfinished, and a part's widest aren't the batch's",
        "actor.mask_no_eos_with_zero",
        True,
        "false",
    )
    size = ModelAllocation.from_str(str(actor.backend), name="actor").parallel
    refuse(
        size.tensor_parallel_size * size.context_parallel_size > 1,
        f"{name}: tensor and context parallelism aren't tested with parts of a batch",
        "actor.backend",
        str(actor.backend),
        f"fsdp:d{size.world_size}",
    )
    refuse(
        actor.m2_threshold is not None,
        f"{name}: M2PO chooses its tokens within a micro-batch, and those depend on arrival",
        "actor.m2_threshold",
        actor.m2_threshold,
        "leave actor.m2_threshold out",
    )
    refuse(
        actor.mb_spec.granularity > 1,
        f"{name}: a part has as many rows as its groups",
        "actor.mb_spec.granularity",
        actor.mb_spec.granularity,
        "1",
    )
    audits = getattr(part.selection.rollout_source, "audit_every", 0)
    refuse(audits, f"{name}: AReaL's workers don't audit", f"{WHERE}.periodic.audit_every", audits, "leave it out")
    refuse(config.dynamic_bs, f"{name}: what is trained would depend on arrival", "dynamic_bs", True, "false")
    _check_promise(part, facts_of(config))


def facts_of(config: Any) -> RunFacts:
    """What the run does, as far as periodic asynchrony's promise depends on it."""
    actor = config.actor
    return RunFacts(
        optimiser_steps=int(actor.ppo_n_minibatches),
        normaliser="token-mean",
        dropout=0.0 if actor.disable_dropout else 0.1,
        accumulation_dtype=str(actor.optimizer_dtype),
    )


def _check_promise(part: Part, facts: RunFacts) -> None:
    try:
        part.selection.rollout_source.check(facts)
    except ConfigurationError as error:
        fact = str(error.remedy).partition(":")[0]
        raise ConfigurationError(
            error.what, where=f"{WHERE}.rollout_source={part.mode}", remedy=_KEYS.get(fact, error.remedy)
        ) from None
