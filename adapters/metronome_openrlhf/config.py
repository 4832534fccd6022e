"""OpenRLHF's arguments and ours: what the user chose, what a mode needs besides, and what every process is told.

``arrange`` runs between OpenRLHF's parser and its own checks. What it leaves in ``args.metronome`` travels with
``strategy.args`` into every Ray actor; ``part_of`` reads it there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from metronome.contracts import RunFacts
from metronome.device import device_called
from metronome.errors import ConfigurationError, nearest
from metronome.plugins import Selection, offered_names, plugin_manager, resolve
from metronome.settings import SELECTORS, Settings, parse_settings
from metronome_openrlhf.arguments import WHERE, put, refuse
from metronome_openrlhf.groups import own_groups
from metronome_openrlhf.lora import check_adapters
from metronome_openrlhf.queueing import over_publications
from metronome_openrlhf.sharing import share_prompts
from metronome_openrlhf.streaming import one_step

MODES = ("synchronous", "periodic", "bounded")
IN_FLIGHT = ("finish", "abort", "resume")

_DTYPES = {"fp32": "float32", "float": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}

_FLAGS = {"accumulation_dtype": "--ds.grad_accum_dtype fp32", "dropout": "--ds.lora.dropout 0"}


@dataclass(frozen=True)
class Part:
    """What a process of a run knows of us.

    Attributes:
        mode: ``synchronous``, ``periodic`` or ``bounded``.
        settings: the parsed block.
        selection: the four objects.
        block: the block as written.
        in_flight: what a publication does to running requests.
        device: ``cpu``, ``cuda`` or ``npu``.
    """

    mode: str
    settings: Settings
    selection: Selection
    block: Mapping[str, Any]
    in_flight: str
    device: str

    @property
    def own_loss(self) -> bool:
        """Whether the policy loss is ours: ``--metronome.loss`` was given."""
        return "loss" in self.block

    @property
    def owns_groups(self) -> bool:
        """Whether G is ours to choose."""
        return "group_controller" in self.block

    @property
    def shares_prompt(self) -> bool:
        """Whether a group's prompt stands once."""
        return bool(self.selection.attention.shares_prompt)


def part_of(args: Any) -> Part:
    """The part of this process, from OpenRLHF's ``args``.

    Raises ConfigurationError where the launcher left none.
    """
    left = getattr(args, "metronome", None)
    if left is None:
        raise ConfigurationError(
            "a metronome class got no settings",
            where="strategy.args.metronome",
            remedy="start with python -m metronome_openrlhf",
        )
    return _resolved(left["block"], left["in_flight"], left["device"], int(args.train.seed))


def arrange(args: Any, block: dict[str, Any], device: str) -> list[str]:
    """Sets in ``args`` what the chosen mode needs; returns what was set, as lines to print.

    Args:
        args: OpenRLHF's arguments, nested, before its own checks.
        block: the ``metronome:`` block with ``in_flight``, from ``flags.take``.
        device: ``cpu``, ``cuda`` or ``npu``.

    Raises ConfigurationError for what can't be true together, with the flag that mends it.
    """
    notes: list[str] = []
    block = dict(block)
    in_flight = block.pop("in_flight", None)
    block = _with_clip(args, block, notes)
    mode = str(block.get("rollout_source", "synchronous"))
    in_flight = _in_flight(in_flight, mode)
    part = _resolved(block, in_flight, device, int(args.train.seed))
    if part.mode not in MODES:
        raise ConfigurationError(
            "this rollout source has no trainer in OpenRLHF",
            found=part.mode,
            where=f"{WHERE}.rollout_source",
            remedy=nearest(part.mode, MODES),
        )
    for flag in ("rollout.batch_size", "rollout.micro_batch_size", "train.batch_size", "train.micro_batch_size"):
        section, name = flag.split(".")
        rows = int(getattr(getattr(args, section), name))
        refuse(rows < 1, "there is nothing to divide by", flag, rows, f"--{flag} 1 or more")
    _trainer(args, part)
    check_adapters(args)
    if part.owns_groups:
        own_groups(args, part, notes)
    if part.mode == "bounded":
        over_publications(args, part, notes)
    if part.mode == "periodic":
        audits = getattr(part.selection.rollout_source, "audit_every", 0)
        what = "OpenRLHF's workers don't audit periods"
        refuse(audits, what, "metronome.periodic.audit_every", audits, "leave it out")
        one_step(args, notes)
        _check_promise(part, facts_of(args))
        if device != "cpu" and not args.train.full_determinism_enable:
            notes.append(
                "rollouts don't follow seeds by prompt: the gradient is that of one batch of these rollouts, another"
                " run samples others  (--train.full_determinism_enable seeds every request)"
            )
    if part.own_loss:
        _loss(args, part, notes)
    if part.shares_prompt:
        share_prompts(args, part, notes)
    args.metronome = {"block": block, "in_flight": in_flight, "device": device}
    active = ", ".join(f"{key} {block[key]}" for key in SELECTORS if key in block)
    return [f"active: {active}", *notes] if active else notes


def _check_promise(part: Part, facts: RunFacts) -> None:
    """The schedule's own check, with our remedy in OpenRLHF's flags."""
    try:
        part.selection.rollout_source.check(facts)
    except ConfigurationError as error:
        fact = str(error.remedy).partition(":")[0]
        raise ConfigurationError(
            error.what, where=f"{WHERE}.rollout_source {part.mode}", remedy=_FLAGS.get(fact, error.remedy)
        ) from None


def facts_of(args: Any) -> RunFacts:
    """What the run does, as far as periodic asynchrony's promise depends on it."""
    return RunFacts(
        optimiser_steps=int(args.train.max_epochs),
        normaliser="token-mean" if args.actor.loss_agg_mode == "token-mean" else "seq-mean",
        ratio_is_one=True,
        dropout=float(args.ds.lora.dropout) if args.ds.lora.rank else 0.0,
        router_losses=float(args.actor.aux_loss_coef) > 1e-8,
        accumulation_dtype=_DTYPES.get(str(args.ds.grad_accum_dtype), str(args.ds.grad_accum_dtype)),
        seeds_per_prompt=True,
    )


def bypasses(args: Any, part: Part) -> bool:
    """Whether the engines' log-probs stand for the old policy's: our loss, no proximal forward, no KL in the reward."""
    kl_in_reward = args.algo.kl.init_coef > 0 and not args.algo.kl.use_loss
    return part.own_loss and not part.selection.loss.needs_proximal_forward and not kl_in_reward


def _resolved(block: dict[str, Any], in_flight: str, device: str, seed: int) -> Part:
    manager = plugin_manager()
    settings = parse_settings(block, offered_names(manager), where=WHERE)
    # Not whether torch sees it: the launcher and OpenRLHF's trainer process may have no GPU
    selection = resolve(settings, device_called(device), seed, manager)
    return Part(settings.rollout_source, settings, selection, block, in_flight, device)


def _in_flight(found: Any, mode: str) -> str:
    allowed = IN_FLIGHT if mode == "bounded" else ("finish",)
    if found is None:
        return "finish"
    if found not in allowed:
        raise ConfigurationError(
            f"nothing runs at a publication in mode {mode}" if mode != "bounded" else "unknown value",
            found=found,
            where=f"{WHERE}.in_flight",
            remedy=nearest(str(found), allowed),
        )
    return str(found)


def _trainer(args: Any, part: Part) -> None:
    refuse(
        args.train.async_enable and part.mode != "bounded",
        f"mode {part.mode} has no batches in flight over a publication",
        "train.async_enable",
        True,
        f"leave --train.async_enable out, or {WHERE}.rollout_source bounded",
    )


def _with_clip(args: Any, block: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    """``block`` with OpenRLHF's own clip for our losses, where the user set none of ours."""
    name = block.get("loss")
    low, high = args.actor.eps_clip_low_high or (args.actor.eps_clip, args.actor.eps_clip)
    hosts = {"clip_low": low, "clip_high": high, "dual_clip": args.actor.dual_clip}
    own = block.get(str(name)) or {}
    if name not in ("ppo", "a3po") or not isinstance(own, dict):
        return block
    taken = {key: float(value) for key, value in hosts.items() if key not in own and value is not None}
    if taken:
        shown = " ".join(f"{WHERE}.{name}.{key} {value:g}" for key, value in taken.items())
        notes.append(f"{shown}  (--actor.eps_clip, --actor.dual_clip)")
    return {**block, str(name): {**own, **taken}}


def _loss(args: Any, part: Part, notes: list[str]) -> None:
    """Our loss in the place of OpenRLHF's, with the rollout engine's log-probs."""
    name = f"{WHERE}.loss {part.settings.loss}"
    advantage = args.algo.advantage
    refuse(
        advantage.is_correction_level != "off",
        f"OpenRLHF's importance correction and {name} both weigh samples by one ratio",
        "algo.advantage.is_correction_level",
        advantage.is_correction_level,
        f"leave it out (a3po has a cap of its own, {WHERE}.a3po.cap), or {WHERE}.loss",
    )
    for flag, usual in (("mode", "mask"), ("gating", "ratio"), ("threshold", [0.5, 5.0])):
        found = getattr(advantage, f"is_correction_{flag}")
        refuse(
            found != usual,
            f"{name} takes the place of OpenRLHF's importance correction, whose options then do nothing",
            f"algo.advantage.is_correction_{flag}",
            found,
            f"leave it out ({WHERE}.a3po.cap, {WHERE}.a3po.cap_mode), or {WHERE}.loss",
        )
    refuse(
        args.actor.policy_loss_type != "ppo",
        f"{name} takes the place of OpenRLHF's policy loss",
        "actor.policy_loss_type",
        args.actor.policy_loss_type,
        "leave it out",
    )
    if float(args.rollout.top_p) < 1 and bypasses(args, part):
        notes.append(
            f"--rollout.top_p {args.rollout.top_p:g}: the engines' log-probs are those of the cut distribution, so that"
            f" ratios begin between {args.rollout.top_p:g} and 1  ({WHERE}.a3po.proximal recompute begins at 1)"
        )
    put(args, "algo.advantage.is_correction_level", "token", notes, "the engines return log-probs; the loss is ours")
    if _is_plain(part):
        notes.append(
            f"staleness is 0 here, so that a3po is PPO; it acts with {WHERE}.rollout_source bounded, from staleness 2"
        )
    if part.selection.loss.needs_proximal_forward:
        notes.append(f"a forward pass of the actor gives old log-probs: {name} asks for them, as its options are")
    elif not bypasses(args, part):
        notes.append(
            f"a forward pass of the actor gives old log-probs, since a KL of --algo.kl.init_coef"
            f" {args.algo.kl.init_coef:g} is in the reward; --algo.kl.use_loss or --algo.kl.init_coef 0 leaves it out"
        )


def _is_plain(part: Part) -> bool:
    """Whether a3po's proximal policy is the engines' for every token: none is of an old version."""
    options = part.settings.options_of("a3po")
    interpolates = options.get("proximal", "loglinear") == "loglinear" and options.get("fresh") != "target"
    return part.settings.loss == "a3po" and part.mode != "bounded" and interpolates
