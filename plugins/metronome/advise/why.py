"""One sentence or two for each technique: why it would pay in this run, or not."""

from __future__ import annotations

import numpy as np

from metronome.advise.calibrate import Base
from metronome.advise.candidates import Candidate
from metronome.advise.gain import Calibration, Gain
from metronome.advise.measure import TAU, Facts
from metronome.periodic.closed_form import speed_bound
from metronome.sagc.options import SagcOptions
from metronome.shared_prompt.cost import token_ratio
from metronome.simulate.cluster import Cluster


def sentence(
    candidate: Candidate,
    found: Gain | None,
    over: Gain | None,
    base: Base,
    facts: Facts,
    fits: Calibration,
    split: Cluster | None,
) -> str:
    """Why ``candidate`` gets its verdict."""
    if candidate.reason:
        return candidate.reason
    if candidate.key == "periodic":
        text = _periodic(base, split)
    elif candidate.key.startswith("bounded"):
        text = _bounded(candidate, over, split if base.colocated else None)
    elif candidate.key == "a3po":
        text = _a3po(base, facts)
    elif candidate.key == "shared_prompt":
        text = _shared(base)
    elif candidate.key.startswith("sagc"):
        text = _sagc(candidate, facts, base)
    else:
        text = "what the techniques leave each other, gains don't multiply" + _over(candidate, over)
        if base.colocated and split is not None:
            text += f"; it needs a split: {_devices(split)}"
    if found is not None and found.low is None:
        text += "; not enough steps for an interval"
    if not fits.trusted:
        text += "; the model doesn't describe this run, don't rely on the gain"
    return text


def _periodic(base: Base, split: Cluster | None) -> str:
    training = float(np.mean([one.training + one.proximal for one in base.times]))
    recorded = float(np.mean(base.seconds))
    serial = float(np.mean([one.serial + one.publication for one in base.times]))
    if base.policy.source != "synchronous":
        return f"groups are trained while others are generated; training takes {training:.3g} s of a step"
    generation = max(0.0, recorded - training - serial)
    bound = speed_bound(generation, training)
    sides = f"generation takes {generation:.3g} s and training {training:.3g} s of a step"
    if base.colocated:
        if split is None:
            return sides
        return (
            f"{sides} on the same devices in turns, so that overlap alone gives at most 1.0x; it needs a split, "
            f"and the best simulated one is {_devices(split)}"
        )
    return f"{sides}, one side always waits: overlap gives at most {bound:.2f}x, and less where groups are few"


def _devices(split: Cluster) -> str:
    return f"{split.engines.count} for generation and {split.trainer.ranks} for training"


def _bounded(candidate: Candidate, over: Gain | None, split: Cluster | None) -> str:
    """``split``: of a colocated run's devices."""
    text = "no barrier, so engines fill the slots that the tail leaves empty; never held against a run"
    if split is not None:
        text += f"; it needs a split of the devices: {_devices(split)}"
    text += _over(candidate, over)
    if candidate.policy is not None and candidate.policy.bound < 2:
        text += "; A-3PO acts from staleness 2 on, here it is plain PPO"
    return text


def _over(candidate: Candidate, over: Gain | None) -> str:
    if over is None:
        return ""
    interval = "" if over.low is None else f" ({over.low:.2f} to {over.high:.2f})"
    return f"; over {candidate.than} it gains {over.value:.2f}x{interval}"


def _a3po(base: Base, facts: Facts) -> str:
    share = f"{100 * (facts.proximal_share or 0.0):.1f} %"
    text = f"the recomputed proximal policy takes {share} of the steps' seconds"
    if base.policy.source != "bounded" or base.policy.bound < 2:
        text += "; nothing here is two versions old, where A-3PO is plain PPO"
    return text


def _shared(base: Base) -> str:
    ratios = [token_ratio(group.prompt_tokens, group.responses) for step in base.steps for group in step.groups]
    text = f"a prompt computed once leaves 1/{float(np.mean(ratios)):.2f} of the trained tokens"
    if base.cluster.trainer.padded:
        text += ", and no padding"
    if not base.attention_known:
        text += " (linear layers alone; the share of attention isn't known)"
    if not base.policy.shared_prompt:
        text += "; what its attention costs beyond the tokens isn't in the record, the gain may come out smaller"
    return text + _bound(base)


def _bound(base: Base) -> str:
    if base.cost is None:
        return "; a pass costs something whatever its tokens, so that the gain is an upper bound"
    return f"; {base.cluster.trainer.seconds_per_group:.3g} s of each group's training are taken as fixed"


def _sagc(candidate: Candidate, facts: Facts, base: Base) -> str:
    delta = SagcOptions().delta
    if facts.straggling_steps is None or facts.straggler_ratio is None:
        text = "stragglers are those of drawn lengths"
    else:
        text = (
            f"the longest response is {facts.straggler_ratio:.2f} times the median; in "
            f"{100 * facts.straggling_steps:.0f} % of the steps the mean ratio is above {TAU:g} (SAGC aims at "
            f"{100 * delta:.0f} %, both ours)"
        )
    if candidate.equal_steps:
        text += "; the gain is seconds of a step, which trains fewer rollouts" + _bound(base)
    return text
