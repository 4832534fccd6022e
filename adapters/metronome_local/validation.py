"""What is refused before anything starts: keys, plug-ins, and combinations that can't be true."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from metronome.contracts import RunFacts
from metronome.device import Device, resolve_device
from metronome.errors import ConfigurationError
from metronome.plugins import Selection, offered_names, plugin_manager, resolve
from metronome.settings import Settings, parse_settings
from metronome_local.recipe import Dataset, Recipe, parse_recipe
from metronome_local.tasks.dataset import read_records


def validate(
    recipe: dict[str, Any], where: str, *, comparing: bool = False
) -> tuple[Recipe, Settings, Selection, Device]:
    """The recipe, the plug-ins it selects, and the device; every refusal happens here, before anything starts."""
    parsed = parse_recipe(recipe, where)
    manager = plugin_manager()
    settings = parse_settings(parsed.metronome, offered_names(manager), where="metronome", allow_unselected=comparing)
    device = resolve_device(parsed.machine.device, "machine.device")
    selection = resolve(settings, device, parsed.training.seed, manager)
    _check_source(selection, _facts(parsed, selection))
    _refuse_impossible(parsed, selection)
    return parsed, settings, selection, device


_KEYS = {  # facts in a source's remedy -> the recipe's keys
    "optimiser_steps: 1": "training.mini_batches: 1 and training.epochs: 1",
    "in_flight: finish": "training.in_flight: finish",
    "advantage_scope: group": "training.advantage: group-std",
}


def _check_source(selection: Selection, facts: RunFacts) -> None:
    try:
        selection.rollout_source.check(facts)
    except ConfigurationError as error:
        remedy = error.remedy or ""
        for fact, key in _KEYS.items():
            remedy = remedy.replace(fact, key)
        raise ConfigurationError(error.what, found=error.found, where=error.where, remedy=remedy) from error


def ratio_is_one(recipe: Recipe, selection: Selection) -> bool:
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
        ratio_is_one=ratio_is_one(recipe, selection) and selection.loss.name == "ppo",
        dropout=0.0,
        in_flight=training.in_flight,
    )


def _refuse_impossible(recipe: Recipe, selection: Selection) -> None:
    training = recipe.training
    if training.advantage == "batch" and not (ratio_is_one(recipe, selection) and selection.loss.name == "ppo"):
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
        _refuse_audit(recipe, getattr(selection.rollout_source, "audit_tolerance", 1e-4))


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


def refuse_dropout(model: Any) -> None:
    """Raises ConfigurationError if dropout acts in the training mode that gradient checkpointing needs."""
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


def check_prompts(task: Any, recipe: Recipe) -> None:
    """Raises ConfigurationError if the first or a held-out prompt is empty or too long."""
    limit = recipe.sampling.max_prompt_tokens
    for prompt in [task.prompt(0), *task.held_out()[: recipe.evaluation.max_prompts]]:
        if not prompt.ids or len(prompt.ids) > limit:
            raise ConfigurationError(
                "a prompt is empty or has more tokens than the limit",
                found=len(prompt.ids),
                where="sampling.max_prompt_tokens",
                remedy=f"raise the limit of {limit}, or change the prompt",
            )


def check_files(recipe: Recipe, base: Path, resume: str | None) -> None:
    """What a dry run can tell of files without loading a model: directories, data, functions, the run to resume."""
    from metronome_local.importing import from_folder, function_at
    from metronome_local.models import SMOLLM2, model_directory

    if recipe.model.name != SMOLLM2:
        model_directory(recipe.model.name)
    if recipe.sampling.rollout:
        function_at(from_folder(recipe.sampling.rollout, base), "sampling.rollout")
    if isinstance(recipe.task, Dataset):
        function_at(from_folder(recipe.task.reward, base), "task.reward")
        read_records(base / Path(recipe.task.path).expanduser())
    if resume is not None:
        from metronome_local.checkpoint import check_recipe, load_state

        load_state(Path(resume))
        check_recipe(Path(resume), recipe.model_dump(mode="json"))
