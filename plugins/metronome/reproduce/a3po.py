"""Rows of what A-3PO is (arXiv 2512.06547); its time and tables stand in ``a3po_time``."""

from __future__ import annotations

import math
from collections.abc import Mapping

from metronome.reproduce.rows import Row, Way, at_least, at_most, exactly, near

TECHNIQUE = "A-3PO"
PAPER = "arXiv 2512.06547"
DRIFT = 0.3  # deviation of log w, ours
BANDS = {(0.2, 1): (0.8, 1.2), (0.2, 2): (0.64, 1.44), (0.2, 4): (0.4096, 2.0736), (0.2, 8): (0.16777216, 4.29981696)}
CLIPPED = {1: 0.2717, 2: 0.1121, 4: 0.0075, 8: 0.0}  # chance that a normal log w exceeds d * log(1.2), at DRIFT


def alpha_table() -> Mapping[str, float]:
    """alpha at whole and fractional staleness."""
    import torch

    from metronome.a3po import proximal

    found = {}
    for staleness in (0.0, 0.25, 1.0, 2.0, 4.0, 8.0):
        whole = math.floor(staleness)
        share = proximal.alpha(torch.tensor([whole]), staleness - whole, dtype=torch.float64)
        found[f"d = {staleness:g}"] = float(share[0])
    found["d = 0, fresh: target"] = float(proximal.alpha(torch.tensor([0]), fresh="target")[0])
    return found


def band() -> Mapping[str, float]:
    """Gradients against PPO on w with a widened band."""
    from metronome.reproduce import identities

    return {
        "largest difference": identities.band_difference(0.2, 0.3, widened=True),
        "with the band not widened": identities.band_difference(0.2, 0.3, widened=False),
    }


def band_edges() -> Mapping[str, float]:
    """The w at which the loss stops training a token, found by bisection."""
    from metronome.reproduce import identities

    found = {}
    for clip, staleness in BANDS:
        loss = identities.a3po(clip_low=clip, clip_high=clip)
        found[f"d = {staleness}, low"] = identities.edge(loss, -1.0, staleness, -12.0)
        found[f"d = {staleness}, high"] = identities.edge(loss, 1.0, staleness, 12.0)
    return found


def identity() -> Mapping[str, float]:
    """A-3PO against plain PPO."""
    from metronome.reproduce import identities

    return {
        "at staleness 0 and 1": identities.plain_ppo_difference([0, 1]),
        "at staleness 2": identities.plain_ppo_difference([2]),
    }


def caps() -> Mapping[str, float]:
    """Where a cap of 5 drops a token, and what truncation does."""
    from metronome.reproduce import identities

    masking = identities.a3po(cap=5.0)
    return {
        "w dropped from, d = 2": identities.edge(masking, -1.0, 2, 12.0),
        "w dropped from, d = 4": identities.edge(masking, -1.0, 4, 12.0),
        "dropped at d = 1, w = 10,000": float(not identities.trained(masking, math.log(1e4), -1.0, 1)),
        "truncation against min(w, cap w^alpha)": identities.truncation_difference(5.0),
    }


def sandwich() -> Mapping[str, float]:
    """The two theorems."""
    from metronome.reproduce import identities

    outside, contraction = identities.proximal_properties()
    return {"log prox outside the two policies": outside, "|log r| against |log w| / d": contraction}


def clipped() -> Mapping[str, float]:
    """Clipped fraction against staleness, positive advantages, eps 0.2."""
    from metronome.reproduce import identities

    log_w, found = identities.policies(DRIFT, 200_000), {}
    for staleness in CLIPPED:
        found[f"d = {staleness}"] = identities.clipped(identities.a3po(), identities.batch(log_w, 1.0, staleness))
    tokens = identities.batch(log_w, 1.0, 4)
    found["plain PPO, d = 4"] = identities.clipped(identities.a3po(proximal="behavior"), tokens)
    tokens.proximal_log_probs = tokens.log_probs.detach()
    found["recompute, one mini-batch, d = 4"] = identities.clipped(identities.a3po(proximal="recompute"), tokens)
    return found


def fresh() -> Mapping[str, float]:
    """Clipped fraction at staleness 0 under the two readings of the paper."""
    from metronome.reproduce import identities

    tokens = identities.batch(identities.policies(DRIFT, 200_000), 1.0, 0)
    return {
        "prose and released code (default)": identities.clipped(identities.a3po(), tokens),
        "the formula (fresh: target)": identities.clipped(identities.a3po(fresh="target"), tokens),
    }


def variance() -> Mapping[str, float]:
    """Variance of the ratio and of the weight that acts, by the loss's own gradients, nothing clipped."""
    from metronome.reproduce import identities

    log_w, found = identities.policies(DRIFT, 200_000), {}
    for staleness in CLIPPED:
        tokens = identities.batch(log_w, -1.0, staleness)
        loss = identities.a3po(clip_low=0.999, clip_high=1e9)
        free = identities.a3po(clip_low=0.999, clip_high=1e9, importance_weight=False)
        found[f"ratio, d = {staleness}"] = float(identities.gradient(free, tokens).var())
        found[f"effective weight, d = {staleness}"] = float(identities.gradient(loss, tokens).var())
    return found


ROWS = (
    Row(
        "a3po-alpha-table",
        TECHNIQUE,
        "alpha = 1/d for d >= 1",
        f"{PAPER}, its interpolation; d = 0 and d below 1 are ours",
        Way.EQUALITY,
        (
            exactly("d = 0", 1.0),
            exactly("d = 0.25", 1.0),
            exactly("d = 1", 1.0, paper=1.0),
            exactly("d = 2", 0.5, paper=0.5),
            exactly("d = 4", 0.25, paper=0.25),
            exactly("d = 8", 0.125, paper=0.125),
            exactly("d = 0, fresh: target", 0.0, paper=0.0),
        ),
        "At d = 0 the paper contradicts itself: its formula says 0, its prose and its authors' code make the behaviour "
        "policy the anchor (alpha 1), which is the default here.",
        alpha_table,
        needs=("torch",),
    ),
    Row(
        "a3po-band-identity",
        TECHNIQUE,
        "without a cap the gradient is PPO's on w with the band [(1 - eps)^d, (1 + eps)^d]",
        "ours",
        Way.EQUALITY,
        (at_most("largest difference", 1e-12), at_least("with the band not widened", 1e-3)),
        "4,000 seeded tokens at staleness 0, 1, 2, 3, 4, 8 and unknown, eps 0.2 and 0.3, float64, against plain "
        "Python. The second figure is the negative control.",
        band,
        needs=("torch",),
    ),
    Row(
        "a3po-band-edges",
        TECHNIQUE,
        "the band at eps 0.2 widens with staleness",
        "ours",
        Way.EQUALITY,
        tuple(
            near(f"d = {staleness}, {side}", value, 1e-9)
            for (_, staleness), edges in BANDS.items()
            for side, value in zip(("low", "high"), edges, strict=True)
        ),
        "Found from outside: by bisection for the w at which the shipped loss has no gradient.",
        band_edges,
        needs=("torch",),
    ),
    Row(
        "a3po-plain-ppo",
        TECHNIQUE,
        "at staleness 0 and 1, so under periodic asynchrony, A-3PO is plain PPO",
        "ours",
        Way.EQUALITY,
        (exactly("at staleness 0 and 1", 0.0), at_least("at staleness 2", 1e-3)),
        "Bit by bit. A test that claims that A-3PO acted needs staleness 2.",
        identity,
        needs=("torch",),
    ),
    Row(
        "a3po-cap",
        TECHNIQUE,
        "a cap on iw drops w > cap^(1/(1 - alpha)), or gives min(w, cap w^alpha)",
        "ours; the cap of 5 is the authors' example's",
        Way.EQUALITY,
        (
            near("w dropped from, d = 2", 25.0, 1e-9),
            near("w dropped from, d = 4", 5.0 ** (4 / 3), 1e-9),
            exactly("dropped at d = 1, w = 10,000", 0.0),
            at_most("truncation against min(w, cap w^alpha)", 1e-12),
        ),
        "Found by bisection as the band's edges.",
        caps,
        needs=("torch",),
    ),
    Row(
        "a3po-sandwich-contraction",
        TECHNIQUE,
        "log prox lies between both policies; |log r| = |log w| / d",
        f"{PAPER}, its two theorems",
        Way.EQUALITY,
        (
            at_most("log prox outside the two policies", 1e-14, paper=0.0),
            at_most("|log r| against |log w| / d", 1e-12, paper=0.0),
        ),
        "20,000 seeded tokens, float64.",
        sandwich,
        needs=("torch",),
    ),
    Row(
        "a3po-clipped",
        TECHNIQUE,
        "fewer tokens are clipped as staleness grows",
        f"{PAPER}, its claim; the figures are ours",
        Way.SIMULATION,
        (
            *(near(f"d = {staleness}", value, 0.004, "%") for staleness, value in CLIPPED.items()),
            near("plain PPO, d = 4", CLIPPED[1], 0.004, "%"),
            exactly("recompute, one mini-batch, d = 4", 0.0, "%"),
        ),
        f"Positive advantages, eps 0.2, log w normal with deviation {DRIFT} (ours) at each staleness. It holds against "
        "plain PPO; recompute with one mini-batch never clips at all.",
        clipped,
        needs=("torch",),
    ),
    Row(
        "a3po-fresh",
        TECHNIQUE,
        "at staleness 0 the paper's formula switches clipping off",
        f"{PAPER}, its formula against its prose",
        Way.SIMULATION,
        (
            near("prose and released code (default)", CLIPPED[1], 0.004, "%"),
            exactly("the formula (fresh: target)", 0.0, "%"),
        ),
        "Why the default follows the prose.",
        fresh,
        needs=("torch",),
    ),
    Row(
        "a3po-variance",
        TECHNIQUE,
        "the ratio's variance shrinks with staleness, that of the weight that acts doesn't",
        "ours, on the paper's claim of controlled ratios",
        Way.SIMULATION,
        (
            *(
                near(f"ratio, d = {d}", value, 0.03 * value)
                for d, value in ((1, 0.103), (2, 0.0231), (4, 0.00567), (8, 0.00141))
            ),
            *(near(f"effective weight, d = {d}", 0.103, 0.003) for d in (1, 2, 4, 8)),
        ),
        f"log w normal with deviation {DRIFT}, nothing clipped, 200,000 tokens.",
        variance,
        needs=("torch",),
    ),
)
