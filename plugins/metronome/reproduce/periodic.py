"""Rows of periodic asynchrony (arXiv 2511.18871)."""

from __future__ import annotations

from collections.abc import Mapping

from metronome.errors import VersionMismatch
from metronome.periodic import closed_form, sources
from metronome.reproduce.rows import Row, Way, at_least, at_most, between, exactly, near, quoted

TECHNIQUE = "Periodic asynchrony"
PAPER = "arXiv 2511.18871"
HARDWARE = "needs the paper's NPUs and its baseline's code; no part of it can be computed"
MODEL = "Simulated: lognormal lengths (sigma 0.6), 256 slots, one decoding speed, a serial trainer."
UNBALANCED = {0.25: 1.24, 0.5: 1.49, 1.5: 1.47, 2.0: 1.37}


def gradient_fp64() -> Mapping[str, float]:
    """Largest difference in float64."""
    import torch

    from metronome.reproduce import gradients

    return {"largest relative difference": gradients.largest_difference(torch.float64, 25)}


def gradient_fp32() -> Mapping[str, float]:
    """The same in float32."""
    import torch

    from metronome.reproduce import gradients

    return {"largest relative difference": gradients.largest_difference(torch.float32, 25)}


def gradient_control() -> Mapping[str, float]:
    """What a host gets that divides each micro-batch by its own tokens."""
    from metronome.reproduce import gradients

    return {"smallest relative difference": gradients.per_micro_batch(25)}


def batch_whitening() -> Mapping[str, float]:
    """Two accumulators at ratio one, and where the ratio is clipped."""
    from metronome.reproduce import gradients

    return {
        "difference at ratio one": gradients.whitening_difference(0.0),
        "difference where ratios are clipped": gradients.whitening_difference(0.5),
    }


def one_version() -> Mapping[str, float]:
    """Groups of another version that the periodic source lets into training, of all pairs of ten versions."""
    source, passed, unnamed = sources.Periodic(), 0, 0
    for version in range(10):
        for training in range(10):
            try:
                source.verdict([version], training)
            except VersionMismatch as error:
                unnamed += f"version {version}" not in str(error)
            else:
                passed += version != training
    return {"other versions trained": passed, "refusals that don't name the version": unnamed}


def bound() -> Mapping[str, float]:
    """The bound over 1,001 balances, and what fine grain reaches of it."""
    shares = [place / 1000 for place in range(1001)]
    bounds = [closed_form.speed_bound(share, 1.0 - share) for share in shares]
    groups = 100_000
    arrivals, work = [(place + 1) / groups for place in range(groups)], [1 / groups] * groups
    reached = closed_form.synchronous_seconds(arrivals, work) / closed_form.periodic_seconds(arrivals, work)
    return {
        "largest bound": max(bounds),
        "generation share where it is reached": shares[bounds.index(max(bounds))],
        "reached by 100,000 evenly spaced groups": reached,
        "one group": closed_form.synchronous_seconds([1.0], [1.0]) / closed_form.periodic_seconds([1.0], [1.0]),
    }


def balanced() -> Mapping[str, float]:
    """Synchronous over periodic seconds where training takes as long as generation."""
    from metronome.reproduce import clusters

    sizes = {64: 6, 256: 4, 1024: 2}
    return {f"{groups} groups x 8": clusters.overlap(groups, 8, steps=steps) for groups, steps in sizes.items()}


def unbalanced() -> Mapping[str, float]:
    """The same for other balances, and where grain is coarse."""
    from metronome.reproduce import clusters

    found = {f"T_t / T_i = {ratio:g}": clusters.overlap(64, 8, ratio) for ratio in UNBALANCED}
    found["4 groups"] = clusters.overlap(4, 8)
    found["slots for all, equal lengths"] = clusters.overlap(32, 8, sigma=0.0)
    return found


def exact_simulation() -> Mapping[str, float]:
    """The closed form on a simulated run's own arrivals and work against its seconds."""
    from metronome.reproduce import clusters

    cluster = clusters.balanced(clusters.cluster(64, 8))
    worst = {"synchronous": 0.0, "periodic": 0.0}
    for source, form in (
        ("synchronous", closed_form.synchronous_seconds),
        ("periodic", closed_form.periodic_seconds),
    ):
        for step in clusters.run(cluster, source).steps:
            worst[source] = max(worst[source], abs(form(step.arrivals, step.work) / step.seconds - 1.0))
    return worst


def scaling() -> Mapping[str, float]:
    """Speed of 64 devices over that of 16, as a share of 4."""
    from metronome.reproduce import clusters

    small = clusters.balanced(clusters.cluster(256, 8, slots=16, engines=8, ranks=8, steps=2))
    grown = small.with_split(32, 32).model_copy(update={"prompts_per_step": 1024})
    lossy = grown.model_copy(update={"trainer": grown.trainer.model_copy(update={"efficiency": 0.9})})
    base = clusters.run(small, "periodic").tokens_per_second
    return {
        "batch grows with the devices": clusters.run(grown, "periodic").tokens_per_second / base / 4,
        "the same batch": clusters.run(small.with_split(32, 32), "periodic").tokens_per_second / base / 4,
        "batch grows, ranks scale at 0.9": clusters.run(lossy, "periodic").tokens_per_second / base / 4,
    }


ROWS = (
    Row(
        "periodic-gradient-fp64",
        TECHNIQUE,
        "the gradient is the synchronous one, in any order of arrival and any split",
        f"{PAPER}, the equivalence claim of its abstract (v5); the conditions are ours",
        Way.EQUALITY,
        (at_most("largest relative difference", 1e-12, paper=0.0),),
        "Given the same rollouts, and only under conditions (a)-(h) of docs/techniques/periodic.md. Four normalisers, "
        "25 orders of arrival through the shipped stream, splits that cut through groups, uneven lengths, float64.",
        gradient_fp64,
        needs=("torch",),
    ),
    Row(
        "periodic-gradient-fp32",
        TECHNIQUE,
        "the same in float32",
        f"{PAPER}, as above",
        Way.EQUALITY,
        (at_most("largest relative difference", 1e-5, paper=0.0),),
        "Up to the order of additions.",
        gradient_fp32,
        needs=("torch",),
    ),
    Row(
        "periodic-gradient-control",
        TECHNIQUE,
        "negative control: a token-mean per micro-batch is not the synchronous gradient",
        "ours; the paper doesn't speak of token-mean, the default of verl and OpenRLHF",
        Way.EQUALITY,
        (at_least("smallest relative difference", 1e-3),),
        "The smallest of 25 orders: the equality above isn't one that anything would pass.",
        gradient_control,
        needs=("torch",),
    ),
    Row(
        "periodic-batch-whitening",
        TECHNIQUE,
        "advantages whitened over the batch: exact by two accumulators at ratio one, wrong where ratios are clipped",
        "ours",
        Way.EQUALITY,
        (at_most("difference at ratio one", 1e-11), at_least("difference where ratios are clipped", 0.05)),
        "The reason why any other ratio is refused. With a KL-like term in an accumulator of its own.",
        batch_whitening,
        needs=("torch",),
    ),
    Row(
        "periodic-one-version",
        TECHNIQUE,
        "no rollout of another version is trained, and the refusal names it",
        f"{PAPER}, its algorithm: one policy in a period",
        Way.EQUALITY,
        (exactly("other versions trained", 0.0, paper=0.0), exactly("refusals that don't name the version", 0.0)),
        "All pairs of ten versions.",
        one_version,
    ),
    Row(
        "periodic-bound",
        TECHNIQUE,
        "periodic over synchronous gains at most 2x",
        f"{PAPER}, its theoretical maximum; the closed form is ours",
        Way.ARITHMETIC,
        (
            exactly("largest bound", 2.0, "x", paper=2.0),
            exactly("generation share where it is reached", 0.5),
            near("reached by 100,000 evenly spaced groups", 2.0, 1e-4, "x"),
            exactly("one group", 1.0, "x"),
        ),
        "Against a disaggregated synchronous run, one half of which always idles. Against a colocated run on the same "
        "devices with free resharding, perfect scaling and no tail the bound is 1.0x.",
        bound,
    ),
    Row(
        "periodic-closed-form",
        TECHNIQUE,
        "T = max_j(a_(j) + sum_{m >= j} w_(m)) is what a simulated cluster takes",
        "ours",
        Way.EQUALITY,
        (at_most("synchronous", 1e-9), at_most("periodic", 1e-9)),
        "Largest relative difference of a step's seconds. The simulation knows nothing of the formula.",
        exact_simulation,
        needs=("simpy",),
    ),
    Row(
        "periodic-1.92x",
        TECHNIQUE,
        "Qwen3-8B against its own synchronous baseline",
        f"{PAPER}, its results (tokens per second and device)",
        Way.SIMULATION,
        (
            near("64 groups x 8", 1.69, 0.04, "x"),
            near("256 groups x 8", 1.80, 0.04, "x"),
            near("1024 groups x 8", 1.92, 0.03, "x", paper=1.92),
        ),
        f"{MODEL} Balanced: training takes as long as generation, which the paper's row doesn't say. That our finest "
        "grain gives the paper's figure is agreement, not a reproduction.",
        balanced,
        needs=("simpy",),
    ),
    Row(
        "periodic-unbalanced",
        TECHNIQUE,
        "what is left of it where the two sides take unequal times or grain is coarse",
        "ours",
        Way.SIMULATION,
        (
            *(near(f"T_t / T_i = {ratio:g}", gain, 0.04, "x") for ratio, gain in UNBALANCED.items()),
            between("4 groups", 1.0, 1.4, "x"),
            near("slots for all, equal lengths", 1.0, 1e-9, "x"),
        ),
        f"{MODEL} 64 groups x 8.",
        unbalanced,
        needs=("simpy",),
    ),
    Row(
        "periodic-scaling",
        TECHNIQUE,
        "near linear from 16 to 64 devices",
        f"{PAPER}, its scaling figure",
        Way.SIMULATION,
        (
            at_least("batch grows with the devices", 0.93, "%"),
            between("the same batch", 0.5, 0.9, "%"),
            between("batch grows, ranks scale at 0.9", 0.85, 0.97, "%"),
        ),
        "Share of a linear speed-up (beyond it where more groups make the grain finer). Simulated: half of the devices "
        "generate (16 slots each, lognormal lengths). ASSUMED, not shown: that trainer ranks scale without loss, that "
        "engines don't disturb one another, that publication costs nothing. With the same batch of 256 x 8 on four "
        "times the slots the tail decides. The paper's batch and figures aren't known to us.",
        scaling,
        needs=("simpy",),
    ),
    Row(
        "periodic-3.12x",
        TECHNIQUE,
        "Qwen3-8B against MindSpeed-RL",
        f"{PAPER}, its results",
        Way.NOT_HERE,
        (quoted("speed", 3.12, "x"),),
        f"Another framework on other devices: {HARDWARE}. It holds shared prompts and kernels beside the schedule.",
    ),
    Row(
        "periodic-5.05x",
        TECHNIQUE,
        "DeepSeek-R1-Distill-32B on 48 NPUs against MindSpeed-RL on 64",
        f"{PAPER}, its results",
        Way.NOT_HERE,
        (quoted("speed per device", 5.05, "x"),),
        f"Another framework on other devices: {HARDWARE}. The unit is per device: 48 against 64 isn't counted twice.",
    ),
    Row(
        "periodic-gpu-3x",
        TECHNIQUE,
        "speed-ups of up to 3x on GPUs",
        f"{PAPER}, abstract of v6 and later",
        Way.NOT_HERE,
        (quoted("speed", 3.0, "x"),),
        "Needs the paper's GPUs and baselines. Earlier versions said 3x to 5x on NPUs; what the schedule alone can "
        "give is the bound above.",
    ),
    Row(
        "periodic-accuracy",
        TECHNIQUE,
        "AIME24 and GSM8K accuracy comparable, reward curves overlap",
        f"{PAPER}, its results",
        Way.NOT_HERE,
        (),
        "Needs the training of 8B and 32B models. Instead: the gradient is the same (periodic-gradient-fp64), so the "
        "curves are, given the same rollouts.",
    ),
)
