"""The local host's door: validates a recipe, builds a run, trains, and ends it cleanly."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from metronome.contracts import RunFacts
from metronome.device import Device, resolve_device
from metronome.errors import ConfigurationError
from metronome.plugins import Selection, offered_names, plugin_manager, resolve
from metronome.settings import Settings, parse_settings
from metronome_local.recipe import Machine, Recipe, parse_recipe

if TYPE_CHECKING:
    from metronome_local.trainer import Trainer


def run(recipe: dict[str, Any], *, where: str, output: str | None, resume: str | None, dry_run: bool) -> int:
    """Trains a recipe; returns 0, or 130 after SIGINT. ``dry_run`` validates, prints and starts nothing."""
    from rich.console import Console

    parsed, settings, selection, device = validate(recipe, where)
    console = Console(stderr=False)
    if dry_run:
        _print_plan(console, parsed, settings, selection)
        return 0
    folder = _run_folder(where, output, resume)
    trainer = build(parsed, settings, selection, device, folder, console, base=Path(where).parent, resume=resume)
    try:
        train(trainer, console)
    finally:
        trainer.close()
        trainer.parts.progress.close()
    return 130 if trainer.interrupted else 0


def compare(recipe: dict[str, Any], vary: tuple[str, list[str]], *, where: str, output: str | None) -> int:
    """Runs the same work once per value and prints the table of ratios."""
    from metronome_local.compare import compare_runs

    if output is not None:
        empty_folder(output)
    return compare_runs(recipe, vary, where=where, output=output)


def validate(
    recipe: dict[str, Any], where: str, *, comparing: bool = False
) -> tuple[Recipe, Settings, Selection, Device]:
    """The recipe, the plug-ins it selects, and the device; every refusal happens here, before anything starts."""
    parsed = parse_recipe(recipe, where)
    manager = plugin_manager()
    settings = parse_settings(parsed.metronome, offered_names(manager), where="metronome", allow_unselected=comparing)
    device = resolve_device(parsed.machine.device, "machine.device")
    selection = resolve(settings, device, parsed.training.seed, manager)
    selection.rollout_source.check(_facts(parsed, selection))
    _refuse_impossible(parsed, selection)
    return parsed, settings, selection, device


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
    import torch

    from metronome_local.checkpoint import Checkpoints, check_recipe, load_state, load_tensors
    from metronome_local.gradient import Gradient, Reference
    from metronome_local.importing import from_folder, function_at
    from metronome_local.logprobs import log_probs_of
    from metronome_local.models import context_limit, load_model, load_tokenizer, policy_model
    from metronome_local.pool import RolloutPool
    from metronome_local.progress import Progress
    from metronome_local.scoring import Scorer
    from metronome_local.tasks import load_task
    from metronome_local.trainer import Parts, Trainer
    from metronome_local.weights import SharedWeights

    torch.manual_seed(recipe.training.seed)
    state = None
    if resume is not None:
        state = load_state(folder)
        check_recipe(folder, recipe.model_dump(mode="json"))
    placement = _placement(recipe.machine)
    rollout = recipe.sampling.rollout and from_folder(recipe.sampling.rollout, base)
    if rollout:
        function_at(rollout, "sampling.rollout")  # the workers import it; what can't be is refused here
    tokenizer = load_tokenizer(recipe.model.name)
    task = load_task(recipe.task, tokenizer, recipe.training.seed, base)
    _check_prompts(task, recipe)
    model = policy_model(recipe.model)
    if recipe.model.gradient_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
        model.train()
        _refuse_dropout(model)
    limit = context_limit(model)
    needed = recipe.sampling.max_prompt_tokens + recipe.sampling.max_tokens
    if limit is not None and needed > limit:
        raise ConfigurationError(
            "prompt and response can be longer than the model's context",
            found=needed,
            where="sampling.max_prompt_tokens + sampling.max_tokens",
            remedy=f"at most {limit} together",
        )
    model.to(device.kind)
    optimiser, scheduler = _optimiser(model, recipe)
    if state is not None:
        load_tensors(state, model, optimiser, scheduler)
    weights = SharedWeights(model)
    if alias and device.kind == "cpu" and not selection.rollout_source.spans_versions:
        weights.alias(model)  # nobody decodes while the optimiser writes: the period's barrier
    log_probs = log_probs_of(model, selection.attention, recipe.sampling.temperature, recipe.model.dtype)
    reference = None
    if recipe.training.kl > 0:
        adapter = recipe.model.lora is not None
        frozen = model if adapter else load_model(recipe.model.name).to(device.kind).requires_grad_(False)
        of = (
            log_probs
            if adapter
            else log_probs_of(frozen, selection.attention, recipe.sampling.temperature, recipe.model.dtype)
        )
        reference = Reference(model, of, adapter)
    gradient = Gradient(
        model,
        log_probs,
        selection.loss,
        recipe.training,
        reference,
        max_tokens=recipe.sampling.max_tokens,
        on_policy=_ratio_is_one(recipe, selection),
    )
    folder.mkdir(parents=True, exist_ok=True)
    if state is None:
        (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False))
    progress = Progress(folder, console, recipe.training.periods, None if state is None else state["period"])
    audit = resolve(
        Settings(**{**settings.model_dump(), "options": {**settings.options, **_reference_options(settings)}}),
        device,
        recipe.training.seed,
        plugin_manager(),
    ).attention
    pool = RolloutPool(
        weights,
        _worker_configs(recipe, rollout, device, placement),
        fingerprint_dtype=getattr(torch, recipe.model.dtype),
        timeout=recipe.machine.timeout,
        max_restarts=recipe.machine.max_restarts,
    )
    progress.describe = pool.describe
    torch.set_num_threads(placement.threads)
    if placement.trainer is not None:
        os.sched_setaffinity(0, placement.trainer)
    trainer = Trainer(
        Parts(
            recipe,
            selection,
            audit,
            model,
            optimiser,
            scheduler,
            gradient,
            weights,
            pool,
            task,
            Scorer(task, tokenizer),
            progress,
            Checkpoints(folder, recipe.checkpoints.keep),
        )
    )
    if state is not None:
        trainer.resume(state)
    return trainer


def train(trainer: Trainer, console: Any) -> None:
    """Runs a built trainer and prints what it comes to."""
    from metronome_local.progress import memory_line

    selection = trainer.parts.selection
    names = ", ".join(
        f"{hook} {getattr(selection, hook).name}"
        for hook in ("rollout_source", "loss", "attention", "group_controller")
    )
    console.print(f"metronome local: {names}; run folder {trainer.parts.progress.folder}", highlight=False)
    started = time.monotonic()
    trainer.run()
    trainer.parts.pool.close()
    console.print(
        f"{trainer.period} periods in {time.monotonic() - started:.0f} s; "
        + memory_line(trainer.parts.pool.peak_memory(), selection.rollout_source),
        highlight=False,
        soft_wrap=True,
    )


class _Placement:
    """Threads of each process, and the cores they are bound to where there is one for each."""

    def __init__(self, threads: int, trainer: tuple[int, ...] | None, workers: list[tuple[int, ...] | None]) -> None:
        self.threads, self.trainer, self.workers = threads, trainer, workers


def _placement(machine: Machine) -> _Placement:
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    processes = machine.workers + 1
    each = machine.threads or max(1, len(cores) // processes)
    if not machine.pin or not hasattr(os, "sched_setaffinity") or each * processes > len(cores):
        return _Placement(each, None, [None] * machine.workers)
    shares = [tuple(cores[i * each : (i + 1) * each]) for i in range(processes)]
    return _Placement(each, shares[-1], list(shares[:-1]))


def _worker_configs(recipe: Recipe, rollout: str | None, device: Device, placement: _Placement) -> list[Any]:
    from metronome_local.worker import WorkerConfig

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
    import torch

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


def _ratio_is_one(recipe: Recipe, selection: Selection) -> bool:
    """One visit per sample on policy: the anchor may be the policy's own detached log-probs."""
    training = recipe.training
    one_visit = training.mini_batches * training.epochs == 1
    return selection.rollout_source.max_staleness == 0 and one_visit


def _facts(recipe: Recipe, selection: Selection) -> RunFacts:
    training = recipe.training
    return RunFacts(
        optimiser_steps=training.mini_batches * training.epochs,
        normaliser=str(training.normaliser),
        advantage_scope="batch" if training.advantage == "batch" else "group",
        ratio_is_one=_ratio_is_one(recipe, selection) and selection.loss.name == "ppo",
        dropout=0.0,
        in_flight=training.in_flight,
    )


def _refuse_impossible(recipe: Recipe, selection: Selection) -> None:
    training = recipe.training
    if training.advantage == "batch" and not (_ratio_is_one(recipe, selection) and selection.loss.name == "ppo"):
        raise ConfigurationError(
            "batch-whitened advantages are exact only where the ratio is one",
            found=f"loss {selection.loss.name}, source {selection.rollout_source.name}",
            where="training.advantage",
            remedy="advantage: group-std, or loss: ppo with an on-policy source and one optimiser step",
        )
    if training.mini_batches > training.prompts:
        raise ConfigurationError(
            "more mini-batches than prompts",
            found=training.mini_batches,
            where="training.mini_batches",
            remedy=f"at most {training.prompts}",
        )
    if recipe.model.lora is not None and recipe.model.trained_layers is not None:
        raise ConfigurationError(
            "LoRA and trained_layers exclude one another",
            found=recipe.model.trained_layers,
            where="model.trained_layers",
            remedy="remove one of them",
        )
    if getattr(selection.rollout_source, "audit_every", 0):
        _refuse_audit(recipe, selection.rollout_source.audit_tolerance)  # type: ignore[attr-defined]


def _refuse_audit(recipe: Recipe, tolerance: float) -> None:
    where = "metronome.periodic.audit_every"
    if recipe.training.mini_batches * recipe.training.epochs > 1:
        raise ConfigurationError(
            "an audit compares the one gradient of a period, and this recipe makes several steps",
            found=recipe.training.mini_batches * recipe.training.epochs,
            where=where,
            remedy="training.mini_batches: 1 and training.epochs: 1, or audit_every: 0",
        )
    if recipe.model.dtype != "float32" and tolerance < 0.01:
        raise ConfigurationError(
            f"in {recipe.model.dtype} rounding alone makes gradients differ by more than the audit's tolerance",
            found=tolerance,
            where=where,
            remedy="audit_tolerance: 0.1 (a wrong mask differs by more), or model.dtype: float32",
        )


def _refuse_dropout(model: Any) -> None:
    import torch

    active = {name: m.p for name, m in model.named_modules() if isinstance(m, torch.nn.Dropout) and m.p > 0}
    settings = model.config.get_text_config().to_dict()  # attention's own dropout is a function, not a module
    active |= {k: p for k, p in settings.items() if k.endswith(("dropout", "pdrop")) and isinstance(p, float) and p > 0}
    if active:
        raise ConfigurationError(
            "gradient checkpointing needs the training mode, in which this model's dropout acts",
            found=dict(list(active.items())[:2]),
            where="model.gradient_checkpointing",
            remedy="gradient_checkpointing: false, or dropout 0 in the model's config.json",
        )


def _check_prompts(task: Any, recipe: Recipe) -> None:
    limit = recipe.sampling.max_prompt_tokens
    for prompt in [task.prompt(0), *task.held_out()[: recipe.evaluation.max_prompts]]:
        if not prompt.ids or len(prompt.ids) > limit:
            raise ConfigurationError(
                "a prompt is empty or has more tokens than the limit",
                found=len(prompt.ids),
                where="sampling.max_prompt_tokens",
                remedy=f"raise the limit of {limit}, or change the prompt",
            )


def _reference_options(settings: Settings) -> dict[str, dict[str, Any]]:
    """Options of the audit's attention: the reference backend where prompts are shared."""
    if settings.attention != "shared_prompt":
        return {}
    return {"shared_prompt": {**settings.options_of("shared_prompt"), "backend": "reference"}}


def _run_folder(where: str, output: str | None, resume: str | None) -> Path:
    if resume is not None and output is not None:
        raise ConfigurationError(
            "a resumed run goes on in its own folder", found=output, where="--output", remedy="leave --output out"
        )
    if resume is not None:
        return Path(resume)
    if output is not None:
        return empty_folder(output)
    return Path("runs") / f"{Path(where).stem}-{time.strftime('%Y%m%d-%H%M%S')}"


def empty_folder(output: str) -> Path:
    """``output`` as a folder to make or to fill; raises ConfigurationError if something stands there."""
    folder = Path(output)
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ConfigurationError(
            "the run folder isn't empty" if folder.is_dir() else "the run folder is a file",
            found=output,
            where="--output",
            remedy="another folder, or --resume to continue a run",
        )
    if not next(parent for parent in folder.absolute().parents if parent.exists()).is_dir():
        raise ConfigurationError(
            "a file stands in the run folder's path", found=output, where="--output", remedy="another folder"
        )
    return folder


def _print_plan(console: Any, recipe: Recipe, settings: Settings, selection: Selection) -> None:
    plan = recipe.model_dump(mode="json")
    plan["metronome"] = {**{key: getattr(settings, key) for key in Settings.model_fields if key != "options"}}
    plan["metronome"].update({name: dict(options) for name, options in settings.options.items()})
    console.print(yaml.safe_dump(plan, sort_keys=False), highlight=False)
    source = selection.rollout_source
    console.print(
        f"effective staleness bound {source.max_staleness}; group size {selection.group_controller.size()}; "
        f"{recipe.machine.workers} rollout workers and a trainer. Nothing was started.",
        highlight=False,
        soft_wrap=True,
    )
