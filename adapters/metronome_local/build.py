"""Puts a run together: model, task, shared weights, workers, trainer."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import yaml

from metronome.contracts import AttentionBackend
from metronome.device import Device
from metronome.errors import ConfigurationError
from metronome.plugins import Selection, plugin_manager, resolve
from metronome.settings import Settings
from metronome_local.checkpoint import Checkpoints, check_recipe, load_state, load_tensors
from metronome_local.dispatch import Rollouts
from metronome_local.gradient import Gradient, Reference
from metronome_local.importing import from_folder, function_at
from metronome_local.logprobs import LogProbs, log_probs_of
from metronome_local.models import context_limit, load_model, load_tokenizer, policy_model
from metronome_local.placement import Placement, bind_trainer, placement_of
from metronome_local.pool import RolloutPool
from metronome_local.progress import Progress
from metronome_local.recipe import Recipe
from metronome_local.scoring import Scorer
from metronome_local.tasks import load_task
from metronome_local.trainer import Parts, Trainer
from metronome_local.validation import check_prompts, ratio_is_one, refuse_dropout
from metronome_local.weights import SharedWeights
from metronome_local.worker import WorkerConfig


def build(
    recipe: Recipe,
    settings: Settings,
    selection: Selection,
    device: Device,
    folder: Path,
    console: Any,
    *,
    base: Path,
    resume: str | None = None,
    alias: bool = True,
) -> Trainer:
    """Model, task, workers and trainer of a run in ``folder``; relative paths of the recipe start at ``base``.

    ``alias`` lets the trainer's own parameters be the shared buffer where the rollout source allows it.
    """
    torch.manual_seed(recipe.training.seed)
    state = None
    if resume is not None:
        state = load_state(folder)
        check_recipe(folder, recipe.model_dump(mode="json"))
    rollout = recipe.sampling.rollout and from_folder(recipe.sampling.rollout, base)
    if rollout:
        function_at(rollout, "sampling.rollout")  # the workers import it; what can't be is refused here
    tokenizer = load_tokenizer(recipe.model.name)
    task = load_task(recipe.task, tokenizer, recipe.training.seed, base)
    check_prompts(task, recipe)
    model = _policy(recipe, device)
    optimiser, scheduler = _optimiser(model, recipe)
    if state is not None:
        load_tensors(state, model, optimiser, scheduler)
    weights = SharedWeights(model)
    if alias and device.kind == "cpu" and not selection.rollout_source.spans_versions:
        weights.alias(model)  # nobody decodes while the optimiser writes: the period's barrier
    gradient = _gradient(model, recipe, selection, device)
    _make(folder)
    if state is None:
        (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False))
    progress = Progress(folder, console, recipe.training.periods, None if state is None else state["period"])
    placement = placement_of(recipe.machine)  # before this process binds itself to its own cores
    pool = RolloutPool(
        weights,
        _worker_configs(recipe, rollout, device, placement),
        fingerprint_dtype=getattr(torch, recipe.model.dtype),
        timeout=recipe.machine.timeout,
        max_restarts=recipe.machine.max_restarts,
    )
    torch.set_num_threads(placement.threads)
    bind_trainer(placement)
    rollouts = Rollouts(task, Scorer(task, tokenizer), pool, recipe.sampling.max_prompt_tokens, recipe.machine.timeout)
    progress.describe = rollouts.describe
    trainer = Trainer(
        Parts(
            recipe=recipe,
            selection=selection,
            audit_attention=_audit_attention(settings, device, recipe.training.seed),
            model=model,
            optimiser=optimiser,
            scheduler=scheduler,
            gradient=gradient,
            weights=weights,
            pool=pool,
            task=task,
            rollouts=rollouts,
            progress=progress,
            checkpoints=Checkpoints(folder, recipe.checkpoints.keep),
            placement=placement,
        )
    )
    if state is not None:
        trainer.resume(state)
    return trainer


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"the run folder can't be made: {error}",
            found=str(folder),
            where="--output",
            remedy="a folder that can be written",
        ) from error


def _policy(recipe: Recipe, device: Device) -> Any:
    model = policy_model(recipe.model)
    if recipe.model.gradient_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
        model.train()
        refuse_dropout(model)
    _check_context(model, recipe)
    return model.to(device.kind)


def _check_context(model: Any, recipe: Recipe) -> None:
    limit = context_limit(model)
    needed = recipe.sampling.max_prompt_tokens + recipe.sampling.max_tokens
    if limit is not None and needed > limit:
        raise ConfigurationError(
            "prompt and response can be longer than the model's context",
            found=needed,
            where="sampling.max_prompt_tokens + sampling.max_tokens",
            remedy=f"at most {limit} together",
        )


def _gradient(model: Any, recipe: Recipe, selection: Selection, device: Device) -> Gradient:
    def log_probs(of: Any) -> LogProbs:
        return log_probs_of(of, selection.attention, recipe.sampling.temperature, recipe.model.dtype)

    policy = log_probs(model)
    reference = None
    if recipe.training.kl > 0 and recipe.model.lora is not None:
        reference = Reference(model, policy, adapter=True)
    elif recipe.training.kl > 0:
        frozen = load_model(recipe.model.name).to(device.kind).requires_grad_(False)
        reference = Reference(model, log_probs(frozen), adapter=False)
    return Gradient(
        model,
        policy,
        selection.loss,
        recipe.training,
        reference,
        max_tokens=recipe.sampling.max_tokens,
        on_policy=ratio_is_one(recipe, selection),
    )


def _audit_attention(settings: Settings, device: Device, seed: int) -> AttentionBackend:
    """The reference backend where prompts are shared, the selected attention elsewhere."""
    options = dict(settings.options)
    if settings.attention == "shared_prompt":
        options["shared_prompt"] = {**settings.options_of("shared_prompt"), "backend": "reference"}
    return resolve(settings.model_copy(update={"options": options}), device, seed, plugin_manager()).attention


def _worker_configs(recipe: Recipe, rollout: str | None, device: Device, placement: Placement) -> list[WorkerConfig]:
    return [
        WorkerConfig(
            model=recipe.model,
            sampling=recipe.sampling.model_copy(update={"rollout": rollout}),
            device=device.kind,
            threads=placement.threads,
            cores=cores,
            seed=recipe.training.seed,
        )
        for cores in placement.workers
    ]


def _optimiser(model: Any, recipe: Recipe) -> tuple[Any, Any]:
    training = recipe.training
    total = training.periods * training.mini_batches * training.epochs

    def factor(step: int) -> float:
        if step < training.warmup:
            return (step + 1) / (training.warmup + 1)
        done = (step - training.warmup) / max(1, total - training.warmup)
        if training.schedule == "linear":
            return max(0.0, 1.0 - done)
        if training.schedule == "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))
        return 1.0

    optimiser = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad],
        lr=training.lr,
        betas=training.betas,
        weight_decay=training.weight_decay,
        fused=True,
    )
    return optimiser, torch.optim.lr_scheduler.LambdaLR(optimiser, factor)
