"""Our losses in AReaL's place: the same where both mean the same, and the importance weight where theirs drops it."""

import pytest

pytest.importorskip("areal", reason="the AReaL adapter's tests need AReaL (requirements/areal.txt)")

import areal_room as room
import torch
from areal.api.cli_args import RejectionSamplingConfig
from areal.trainer.ppo.actor import compute_prox_logp_approximations, grpo_loss_fn
from areal.utils import stats_tracker
from areal.utils.functional import ppo_actor_loss_fn

from metronome.a3po.loss import A3po
from metronome.a3po.options import A3poOptions, PpoOptions
from metronome.a3po.ppo import Ppo
from metronome.contracts import TokenLoss
from metronome.errors import ConfigurationError, VersionMismatch
from metronome_areal.clip import told_of_clip
from metronome_areal.config import part_of, read, told
from metronome_areal.loss import HostLoss, staleness_of

LENGTHS, PROMPT, VERSION = (9, 14, 6), 3, 5


@pytest.fixture(autouse=True)
def metrics():
    """AReaL's tracker, emptied."""
    stats_tracker.export_all()
    yield stats_tracker
    stats_tracker.export_all()


def packed(seed=0, oldest=0):
    """One micro-batch as AReaL's engine hands it to a loss: packed rows, everything a place to the left."""
    draw = torch.Generator().manual_seed(seed)
    tokens = sum(LENGTHS)
    cu = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    mask = torch.zeros(tokens, dtype=torch.bool)
    for first, last in zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True):
        mask[first + PROMPT - 1 : last - 1] = True
    mask[cu[1] + 5] = False  # a tool's token between trained ones
    theirs = -4 * torch.rand(tokens, generator=draw)
    versions = torch.randint(oldest, VERSION + 1, (tokens,), generator=draw)
    data = {
        "logprobs": theirs * mask,
        "advantages": torch.randn(tokens, generator=draw),
        "loss_mask": mask.float(),
        "versions": torch.where(mask, versions, -1),
        "cu_seqlens": cu,
        "attention_mask": {"full_attention": None},
        "input_ids": torch.zeros(1, tokens),
    }
    log_probs = (theirs + 0.4 * torch.randn(tokens, generator=draw)).requires_grad_()
    return log_probs, data


def ours(loss, log_probs, data, version=VERSION):
    host = HostLoss(loss)
    host.version = version
    value = host(log_probs, torch.zeros_like(log_probs), data)
    (gradient,) = torch.autograd.grad(value, log_probs)
    return value.detach(), gradient, host


def theirs(log_probs, data, proximal, **named):
    value, stat = ppo_actor_loss_fn(
        logprobs=log_probs,
        proximal_logprobs=proximal,
        old_logprobs=data["logprobs"],
        advantages=data["advantages"],
        loss_mask=data["loss_mask"].bool(),
        **{"eps_clip": 0.2} | named,
    )
    (gradient,) = torch.autograd.grad(value, log_probs)
    return value.detach(), gradient, stat


def same(one, other):
    return all(
        torch.allclose(mine, their, atol=1e-6, rtol=1e-6) for mine, their in zip(one[:2], other[:2], strict=True)
    )


CLIPS = [({}, {}), ({"eps_clip_higher": 0.28}, {"clip_high": 0.28}), ({"c_clip": 1.3}, {"dual_clip": 1.3})]


@pytest.mark.parametrize(("named", "options"), CLIPS, ids=["clip", "clip higher", "dual clip"])
@pytest.mark.parametrize("recomputed", [False, True], ids=["behaviour", "recomputed"])
def test_ppo_is_areals(named, options, recomputed):
    log_probs, data = packed()
    proximal = data["logprobs"]
    if recomputed:
        draw = torch.Generator().manual_seed(3)
        proximal = data["prox_logp"] = (data["logprobs"] + 0.3 * torch.randn(len(proximal), generator=draw)).float()
    found = ours(Ppo(PpoOptions(**options)), log_probs, data)
    reference = theirs(log_probs, data, proximal, **named)
    assert same(found, reference)
    assert not same(ours(Ppo(PpoOptions(clip_low=0.1)), log_probs, data), reference)
    stat, metrics = reference[2], found[2].meter.result()
    trained = float(data["loss_mask"].sum())
    assert metrics["clipped"] == pytest.approx(float(stat["clip_mask"].sum()) / trained)
    assert metrics["clipped"] > 0
    if options.get("dual_clip"):
        assert metrics["dual_clipped"] == pytest.approx(float(stat["dual_clip_mask"].sum()) / trained)
        assert metrics["dual_clipped"] > 0


WEIGHED = RejectionSamplingConfig(level="token", action="mask", metric="ratio", upper=1e9)


def interpolated(log_probs, data, version=VERSION):
    return compute_prox_logp_approximations(
        data["logprobs"], log_probs.detach(), data["versions"], version, method="loglinear"
    )["loglinear"]


@pytest.mark.parametrize(
    ("sampling", "options"),
    [
        (WEIGHED, {"cap": None}),
        (RejectionSamplingConfig("token", "mask", "ratio", upper=1.3), {"cap": 1.3}),
        (RejectionSamplingConfig("token", "clamp", "ratio", upper=1.3), {"cap": 1.3, "cap_mode": "truncate"}),
        (None, {"importance_weight": False}),
    ],
    ids=["weighed", "masked", "truncated", "no weight, by name"],
)
def test_a3po_is_areals_interpolation_and_loss_where_both_mean_the_same(sampling, options):
    if sampling is not None and sampling.upper < 1e9:
        sampling = RejectionSamplingConfig(level="token", action=sampling.action, metric="ratio", upper=1.3)
    log_probs, data = packed()
    reference = theirs(log_probs, data, interpolated(log_probs, data), rejection_sampling=sampling)
    found = ours(A3po(A3poOptions(**options)), log_probs, data)
    assert same(found, reference)
    metrics = found[2].meter.result()
    assert 0 < metrics["off_behavior"] < 1
    if options.get("cap"):
        assert metrics["capped"] > 0


def test_without_rejection_sampling_areal_drops_the_importance_weight_and_we_dont():
    log_probs, data = packed()
    weightless = theirs(log_probs, data, interpolated(log_probs, data))
    found = ours(A3po(A3poOptions(cap=None)), log_probs, data)
    assert not same(found, weightless)
    assert same(found, theirs(log_probs, data, interpolated(log_probs, data), rejection_sampling=WEIGHED))
    assert found[2].meter.result()["importance_weight"] != pytest.approx(1, abs=1e-3)


def test_the_whole_of_areals_loss_function_gives_the_same(metrics):
    log_probs, data = packed()
    value = grpo_loss_fn(
        log_probs,
        torch.zeros_like(log_probs),
        data,
        eps_clip=0.2,
        eps_clip_higher=None,
        c_clip=None,
        rejection_sampling=WEIGHED,
        current_version=VERSION,
        prox_logp_method="loglinear",
        use_decoupled_loss=True,
    )
    theirs_recorded = metrics.export_all()
    found, _, _ = ours(A3po(A3poOptions(cap=None)), log_probs, data)
    assert float(found) == pytest.approx(float(value), abs=1e-6)
    recorded = metrics.export_all()
    shared = set(recorded) & set(theirs_recorded)
    assert {"importance_weight/avg", "approx_kl/avg", "new_logp/avg", "actor_loss/avg", "n_valid_tokens"} <= shared
    for name in shared:
        assert recorded[name] == pytest.approx(theirs_recorded[name], abs=1e-5), name


def test_staleness_below_two_is_plain_ppo_and_from_two_on_the_proximal_policy_moves():
    log_probs, data = packed(oldest=VERSION - 1)
    fresh, _, host = ours(A3po(), log_probs, data)
    assert host.meter.result()["off_behavior"] == 0
    assert float(fresh) == pytest.approx(float(ours(Ppo(), log_probs, data)[0]), abs=1e-6)
    _, _, host = ours(A3po(), log_probs, data, version=VERSION + 1)
    stale = (VERSION + 1 - data["versions"])[data["loss_mask"].bool()] >= 2
    assert host.meter.result()["off_behavior"] == pytest.approx(float(stale.float().mean()))


def test_recompute_needs_a_forward_pass_and_a_loss_needs_versions():
    log_probs, data = packed()
    recompute = A3po(A3poOptions(proximal="recompute"))
    with pytest.raises(ConfigurationError, match="prox_logp_method"):
        ours(recompute, log_probs, data)
    data["prox_logp"] = data["logprobs"] - 0.1
    reference = theirs(log_probs, data, data["prox_logp"], rejection_sampling=WEIGHED)
    found = ours(A3po(A3poOptions(proximal="recompute", cap=None)), log_probs, data)
    assert same(found, reference)
    del data["versions"]
    with pytest.raises(ConfigurationError, match="version of every token"):
        ours(A3po(), log_probs, data)


def test_versions_of_the_future_and_unknown_ones():
    assert staleness_of(torch.tensor([5, 3, -1, 6, 7]), 5).tolist() == [0, 2, -1, -2, -3]
    log_probs, data = packed()
    with pytest.raises(VersionMismatch):
        ours(A3po(), log_probs, data, version=VERSION - 1)
    data["versions"][:] = -1
    _, _, host = ours(A3po(), log_probs, data)
    assert host.meter.result()["version_unknown"] == 1


def test_tool_tokens_are_between_trained_ones_and_train_nothing():
    log_probs, data = packed()
    seen = []

    class Noting:
        name, needs_proximal_forward, keeps_proximal = "noting", False, False

        def __call__(self, batch):
            seen.append(batch)
            return TokenLoss(torch.where(batch.mask, -batch.advantages * batch.log_probs, 0.0))

    _, gradient, host = ours(Noting(), log_probs, data)
    (batch,) = seen
    rows = [length - PROMPT for length in LENGTHS]
    assert batch.cu_seqlens.diff().tolist() == rows
    assert int(batch.mask.sum()) == sum(rows) - 1
    assert ((gradient != 0) == data["loss_mask"].bool()).all()
    assert "off_behavior" not in host.meter.result()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("loss")


@pytest.mark.parametrize(
    ("keys", "clip"),
    [
        ({}, (0.2, 0.2, None)),
        ({"actor.eps_clip": 0.1, "actor.eps_clip_higher": 0.28, "actor.c_clip": 3.0}, (0.1, 0.28, 3.0)),
        ({"actor.eps_clip": 0.4}, (0.4, 0.4, None)),
        ({"actor.eps_clip": 0.4, "metronome.LOSS.clip_low": 0.3}, (0.3, 0.4, None)),
    ],
)
@pytest.mark.parametrize("name", ["ppo", "a3po"])
def test_areals_clip_reaches_our_losses_unless_ours_is_given(folder, name, keys, clip):
    keys = {key.replace("LOSS", name): value for key, value in keys.items()} | {"metronome.loss": name}
    config = room.configuration(folder, keys)
    part = read(config)
    for found in (part, part_of(told(config.actor, part, 1))):
        options = found.selection.loss.options
        assert (options.clip_low, options.clip_high, options.dual_clip) == clip
    (note,) = told_of_clip(config.actor, config.metronome, part)
    assert f"metronome.{name}.clip_high={clip[1]:g}" in note
    assert ("clip_low" in note) == (f"metronome.{name}.clip_low" not in keys)


def test_another_plug_ins_loss_and_no_loss_get_no_clip(folder):
    config = room.configuration(folder, {})
    part = read(config)
    assert not part.own_loss
    assert told_of_clip(config.actor, config.metronome, part) == []
    with pytest.raises(ConfigurationError, match="clip_low"):
        read(room.configuration(folder, {"metronome.loss": "a3po", "actor.eps_clip": 1.5}))
