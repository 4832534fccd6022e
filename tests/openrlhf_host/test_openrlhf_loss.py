"""Our losses in OpenRLHF's place: its own numbers where they are the same, the core's where they aren't."""

import pytest

pytest.importorskip("openrlhf", reason="the OpenRLHF adapter's tests need openrlhf (requirements/openrlhf.txt)")

import torch
import workers
from openrlhf.models.loss import PolicyLoss

from metronome.contracts import TokenLoss
from metronome.errors import ConfigurationError, MetronomeError, PluginError, VersionMismatch
from metronome_openrlhf.config import bypasses, part_of
from metronome_openrlhf.loss import HostLoss

TOLERANCE = 1e-6
TRAINED = 5  # the version in training
INFO = {"dp_size": 2, "batch_num_tokens": 37.0, "global_batch_size": 5.0}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return workers.model(tmp_path_factory.mktemp("assets")).model


def made(block, token_level=True, bypassed=None, **flags):
    """Our loss as an actor worker has it."""
    args = workers.arguments(block, **flags)
    part = part_of(args)
    found = HostLoss(part, token_level, bypasses(args, part) if bypassed is None else bypassed)
    found.version = TRAINED
    return found


def matrices(seed=0, rows=4, length=14, spread=0.4):
    """Rows with a prompt, tool tokens inside (row 1), padding, and one row without a trained token."""
    draw = torch.Generator().manual_seed(seed)
    mask = torch.zeros(rows, length, dtype=torch.long)
    for row in range(rows - 1):
        mask[row, 2 + row : 9 + row] = 1
    mask[1, 5:8] = 0
    near = [-3 + spread * torch.randn(rows, length, generator=draw) for _ in range(3)]
    advantages = torch.randn(rows, 1, generator=draw).expand(rows, length)
    return {
        "log_probs": near[0].requires_grad_(),
        "old_log_probs": near[1] * mask,
        "advantages": advantages,
        "action_mask": mask,
        "rollout_log_probs": near[2] * mask,
    }


def sampled(loss, versions):
    loss.experience = workers.VersionedExperience(versions=versions)
    return loss


def of_three_versions(mask):
    """Each row's tokens were sampled by three versions, of which the newest is the one in training."""
    versions = torch.zeros(mask.shape, dtype=torch.long)
    for row, trained in enumerate(mask.bool()):
        places = trained.nonzero().flatten()
        for number, place in enumerate(places):
            versions[row, place] = TRAINED - (3, 1, 0)[min(2, number * 3 // len(places))]
    return versions


def gradient(loss, given):
    given["log_probs"].grad = None
    loss.backward()
    return given["log_probs"].grad.clone()


# --- OpenRLHF's own loss --------------------------------------------------------------------------------

HOSTS = {
    "plain": {},
    "bounds apart": {"clip_eps_low": 0.1, "clip_eps_high": 0.3},
    "dual clip": {"dual_clip": 1.5},
}


def flags_of(options):
    bounds = [options.get("clip_eps_low", 0.2), options.get("clip_eps_high", 0.2)]
    return {"actor__eps_clip_low_high": bounds, "actor__dual_clip": options.get("dual_clip")}


@pytest.mark.parametrize("token_level", [True, False])
@pytest.mark.parametrize("name", HOSTS)
def test_ppo_is_openrlhfs_own_loss(name, token_level):
    for seed in range(3):
        given = matrices(seed)
        theirs = PolicyLoss(token_level_loss=token_level, is_correction_level="off", **HOSTS[name])
        ours = made({"loss": "ppo"}, token_level, bypassed=False, **flags_of(HOSTS[name]))
        wanted, clip, kl, *_ = theirs(**given, **INFO)
        found, our_clip, our_kl, drift, filtered = ours(**given, **INFO)
        assert float(found) == pytest.approx(float(wanted), rel=TOLERANCE)
        difference = gradient(found, given) - gradient(wanted, given)
        assert float(difference.abs().max()) < TOLERANCE
        assert float(our_clip) == pytest.approx(float(clip))
        assert clip > 0
        assert float(our_kl) == pytest.approx(float(kl), rel=1e-5)
        corrected = PolicyLoss(is_correction_level="token", is_correction_threshold=[0.0, 1e9])
        assert float(drift) == pytest.approx(float(corrected(**given, **INFO)[3]), rel=1e-5)
        assert float(filtered) == 0


@pytest.mark.parametrize("other", [{"clip_eps_high": 0.4}, {"dual_clip": 1.2}, {"token_level_loss": False}])
def test_with_another_setting_openrlhfs_loss_is_another(other):
    given = matrices()
    found, *_ = made({"loss": "ppo"}, bypassed=False)(**given, **INFO)
    assert abs(float(found) - float(PolicyLoss(**other)(**given, **INFO)[0])) > 1e-4


def test_where_the_old_policy_is_the_engines_it_is_the_anchor_and_no_drift_is_told():
    given = matrices()
    given["old_log_probs"] = given["rollout_log_probs"]
    found, _, _, drift, filtered = made({"loss": "ppo"})(**given, **INFO)
    assert float(found) == pytest.approx(float(PolicyLoss()(**given, **INFO)[0]), rel=TOLERANCE)
    assert drift is None
    assert filtered is None


def test_what_isnt_trained_changes_nothing_and_gets_no_gradient():
    given = matrices()
    mask = given["action_mask"].bool()
    ours = sampled(made({"loss": "a3po"}), of_three_versions(mask))
    wanted, *_ = ours(**given, **INFO)
    there = gradient(wanted, given)
    assert not there[~mask].any()
    assert there[mask].any()
    with torch.no_grad():
        given["log_probs"][~mask] = float("nan")
    given["rollout_log_probs"] = given["rollout_log_probs"].masked_fill(~mask, float("inf"))
    found, *_ = ours(**given, **INFO)
    assert float(found) == float(wanted)
    assert torch.equal(gradient(found, given), there)
    # Tool tokens that were trained would show
    given = matrices()
    tools = given["action_mask"].clone()
    tools[1, 5:8] = 1
    found, *_ = made({"loss": "a3po"})(**{**given, "action_mask": tools}, **INFO)
    assert abs(float(found) - float(wanted)) > 1e-4


def test_rows_without_a_trained_token_have_no_loss_and_metrics_that_are_numbers():
    given = matrices()
    given["action_mask"] = torch.zeros_like(given["action_mask"])
    for level in (True, False):
        found = made({"loss": "a3po"}, level, bypassed=False)(**given, **INFO)
        assert [float(one) for one in found] == [0.0] * 5
        assert not gradient(found[0], given).any()


# --- A-3PO ----------------------------------------------------------------------------------------------


def by_hand(given, versions, fraction=0.0, cap=5.0, mode="mask", low=0.2, high=0.2):
    """A-3PO from its formulas, token by token, in float64: the loss of the matrix and its gradient."""
    total, mask = 0.0, given["action_mask"]
    slopes = torch.zeros(mask.shape, dtype=torch.float64)
    for row, place in mask.nonzero().tolist():
        now, behavior, advantage = (
            float(given[name][row, place]) for name in ("log_probs", "rollout_log_probs", "advantages")
        )
        age = TRAINED - int(versions[row, place]) + fraction
        share = 1.0 if age == 0 else min(1.0, 1.0 / age)
        proximal = share * behavior + (1 - share) * now
        ratio, weight = torch.tensor([now - proximal, proximal - behavior], dtype=torch.float64).exp().tolist()
        if weight > cap and mode == "mask":
            continue
        weight = min(weight, cap)
        clipped = min(max(ratio, 1 - low), 1 + high)
        objective = min(ratio * advantage, clipped * advantage)
        total -= weight * objective
        if ratio * advantage <= clipped * advantage:
            slopes[row, place] = -weight * ratio * advantage
    scale = INFO["dp_size"] / INFO["batch_num_tokens"]
    return total * scale, slopes * scale


@pytest.mark.parametrize("fraction", [0.0, 0.5])
@pytest.mark.parametrize("mode", ["mask", "truncate"])
def test_a3po_weighs_each_token_by_its_own_version(mode, fraction):
    given = matrices(spread=1.0)
    versions = of_three_versions(given["action_mask"])
    block = {"loss": "a3po", "a3po": {"cap": 1.5, "cap_mode": mode}}
    ours = sampled(made(block), versions)
    ours.step_fraction = fraction
    found, *_ = ours(**given, **INFO)
    wanted, slopes = by_hand(given, versions, fraction, 1.5, mode)
    assert float(found) == pytest.approx(wanted, rel=1e-5)
    assert float((gradient(found, given) - slopes).abs().max()) < TOLERANCE
    told = ours.meter.result()
    assert told["staleness_max"] == 3
    assert told["staleness"] > 1
    assert told["off_behavior"] > 0
    assert told["capped"] > 0
    # Ages of a whole row, or of none, give another loss
    for other in (versions.amin(1, keepdim=True).expand_as(versions), torch.full_like(versions, TRAINED)):
        assert abs(by_hand(given, other, fraction, 1.5, mode)[0] - wanted) > 1e-3


def test_at_staleness_0_and_1_a3po_is_ppo_on_the_engines_policy_and_from_2_it_isnt():
    given = matrices()
    given["old_log_probs"] = given["rollout_log_probs"]
    wanted = float(PolicyLoss()(**given, **INFO)[0])
    for age, same in ((0, True), (1, True), (2, False)):
        ours = sampled(made({"loss": "a3po"}), torch.full(given["action_mask"].shape, TRAINED - age))
        found, *_ = ours(**given, **INFO)
        assert (abs(float(found) - wanted) < TOLERANCE) is same
        assert (ours.meter.result()["off_behavior"] > 0) is not same


def test_the_share_above_the_cap_is_openrlhfs_filter_ratio():
    given = matrices(spread=1.0)
    block = {"loss": "a3po", "a3po": {"proximal": "recompute", "cap": 1.5}}
    ours = made(block)
    assert not ours.bypassed
    found = ours(**given, **INFO)
    mask = given["action_mask"].bool()
    above = (given["old_log_probs"] - given["rollout_log_probs"]).exp()[mask] > 1.5
    assert float(found[4]) == pytest.approx(float(above.float().mean()))
    assert above.any()


def test_a_token_of_an_unknown_version_is_counted_and_a_later_one_stops_the_run():
    given = matrices()
    versions = of_three_versions(given["action_mask"])
    unknown = versions.clone()
    unknown[0] = -1
    ours = sampled(made({"loss": "a3po"}), unknown)
    ours(**given, **INFO)
    counts = given["action_mask"].sum(1)
    assert ours.meter.result()["version_unknown"] == pytest.approx(float(counts[0] / counts.sum()))
    versions[0, 2] = TRAINED + 1
    with pytest.raises(VersionMismatch):
        sampled(ours, versions)(**given, **INFO)


# --- in the worker --------------------------------------------------------------------------------------

KL = {"algo__kl__use_loss": True, "algo__kl__init_coef": 0.1, "algo__kl__estimator": "k3"}


def on_the_engines_policy(batch):
    """OpenRLHF's old policy is the engines', as where no forward pass runs for it."""
    for row in [row for group in batch for row in group]:
        row.action_log_probs = row.rollout_log_probs * row.action_mask
    return batch


def trained(model, batch, block, kl=0.0, version=0, **flags):
    worker = workers.policy(workers.arguments(block, **flags), model)
    if block.get("loss"):
        worker.metronome_version(version)
    return worker, workers.whole_step(worker, batch, kl)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_openrlhf_adds_kl_and_entropy_once(model, mode):
    flags = {"actor__loss_agg_mode": mode, "actor__entropy_coef": 0.05, **KL}
    batch = on_the_engines_policy(workers.groups())
    stock = workers.stock(workers.arguments(**flags), model)
    said = workers.whole_step(stock, batch, 0.1)
    worker, status = trained(model, batch, {"loss": "ppo"}, 0.1, **flags)
    wanted = workers.moments(stock)
    assert float((workers.moments(worker) - wanted).norm() / wanted.norm()) < 2e-6
    for name in ("policy_loss", "kl", "entropy_loss", "ppo_kl", "ppo_clip_ratio"):
        assert status[name] == pytest.approx(said[name], rel=1e-4, abs=1e-6), name
    for less in ({"actor__entropy_coef": None}, {"algo__kl__init_coef": 0}):
        other, _ = trained(model, batch, {"loss": "ppo"}, 0.1, **{**flags, **less})
        assert float((workers.moments(other) - wanted).norm() / wanted.norm()) > 1e-3


def test_metrics_are_the_same_however_a_batch_falls_into_micro_batches(model):
    batch = workers.groups(version=1)
    for row in batch[0]:
        row.versions = torch.full_like(row.versions, -1)
    for row in batch[1]:
        row.versions = torch.zeros_like(row.versions)
    tokens = [sum(int(row.action_mask.sum()) for row in group) for group in batch]
    found = []
    for micro in (2, 4, 8):
        _, status = trained(model, batch, {"loss": "a3po"}, version=3, train__micro_batch_size=micro)
        found.append({name: value for name, value in status.items() if name.startswith("metronome/loss/")})
        assert found[-1].pop("metronome/loss/calls") == 16 / micro
    for other in found[1:]:
        assert other == pytest.approx(found[0], rel=1e-4)
    mean = (3 * tokens[1] + 2 * (tokens[2] + tokens[3])) / sum(tokens[1:])
    assert found[0]["metronome/loss/staleness"] == pytest.approx(mean)
    assert found[0]["metronome/loss/version_unknown"] == pytest.approx(tokens[0] / sum(tokens))
    assert found[0]["metronome/loss/off_behavior"] == pytest.approx(sum(tokens[1:]) / sum(tokens))
    assert found[0]["metronome/loss/staleness_max"] == 3
    assert "metronome/loss/clipped" in found[0]


def watched(worker):
    """What the loss is given, call by call."""
    seen, own = [], worker.trainer.actor_loss_fn.loss

    class Watching:
        name, needs_proximal_forward, keeps_proximal = own.name, own.needs_proximal_forward, own.keeps_proximal

        def __call__(self, batch):
            seen.append(batch)
            return own(batch)

    worker.trainer.actor_loss_fn.loss = Watching()
    return seen


def test_every_optimiser_step_of_a_batch_is_older_by_its_share(model):
    worker = workers.policy(workers.arguments({"loss": "a3po"}, train__batch_size=4, train__max_epochs=2), model)
    worker.metronome_version(2)
    seen = watched(worker)
    workers.whole_step(worker, workers.groups())
    assert [one.step_fraction for one in seen] == [step / 8 for step in range(8) for _ in range(2)]
    workers.whole_step(worker, workers.groups())
    assert seen[16].step_fraction == 0


@pytest.mark.parametrize("sharing", [{}, {"attention": "shared_prompt"}])
def test_reuse_takes_the_log_probs_of_a_rows_first_visit(model, sharing):
    block = {"loss": "a3po", "a3po": {"proximal": "reuse"}, **sharing}
    worker = workers.policy(workers.arguments(block, train__max_epochs=2, train__batch_size=8), model)
    worker.metronome_version(0)
    seen = watched(worker)
    status = workers.whole_step(worker, workers.groups())
    assert len(seen) == 16
    assert all(one.proximal_log_probs is None for one in seen[:8])
    first, rows = {}, []
    for one in seen:
        cut = one.cu_seqlens.diff().tolist()
        parts = zip(one.behavior_log_probs.split(cut), one.log_probs.detach().split(cut), strict=True)
        rows += [(tuple(behavior.tolist()), now) for behavior, now in parts]
    for behavior, now in rows[:16]:
        first[behavior] = now
    kept = [part for one in seen[8:] for part in one.proximal_log_probs.split(one.cu_seqlens.diff().tolist())]
    moved = False
    for (behavior, now), proximal in zip(rows[16:], kept, strict=True):
        assert torch.equal(proximal, first[behavior])
        moved = moved or not torch.equal(proximal, now)
    assert len(first) == 16
    assert moved
    assert not [name for name in status if "metronome_row" in name]


def test_in_a_period_a3po_is_openrlhfs_own_gradient_on_the_engines_policy(model):
    batch = on_the_engines_policy(workers.groups())
    stock = workers.stock(workers.arguments(), model)
    workers.whole_step(stock, batch)
    worker = workers.policy(workers.arguments({"rollout_source": "periodic", "loss": "a3po"}), model)
    worker.metronome_version(0)
    for group in batch:
        worker.metronome_accumulate([workers.together(group[:2]), workers.together(group[2:])], 16, 0.0)
    status = worker.metronome_step(16)
    wanted = workers.moments(stock)
    assert float((workers.moments(worker) - wanted).norm() / wanted.norm()) < 2e-6
    assert status["metronome/loss/staleness_max"] == 0
    assert status["metronome/loss/off_behavior"] == 0


# --- what stops a run -----------------------------------------------------------------------------------


def test_without_the_engines_log_probs_or_a_version_there_is_no_loss():
    given = matrices()
    with pytest.raises(ConfigurationError, match="log-probs that the rollout engine sampled with"):
        made({"loss": "a3po"})(**{**given, "rollout_log_probs": None}, **INFO)
    ours = made({"loss": "a3po"})
    ours.version = None
    with pytest.raises(MetronomeError, match="which version is trained"):
        ours(**given, **INFO)


def test_a_strangers_loss_of_another_shape_is_named():
    class Short:
        name, needs_proximal_forward, keeps_proximal = "short", False, False

        def __call__(self, batch):
            return TokenLoss(batch.log_probs[1:])

    ours = made({"loss": "a3po"})
    ours.loss = Short()
    with pytest.raises(PluginError, match="'short' must return a loss of shape"):
        ours(**matrices(), **INFO)


@pytest.mark.parametrize(
    "block, kl, skipped",
    [
        ({"loss": "a3po"}, {}, True),
        ({"loss": "ppo"}, KL, True),
        ({"loss": "a3po", "a3po": {"proximal": "recompute"}}, {}, False),
        ({"loss": "a3po"}, {"algo__kl__init_coef": 0.1}, False),
        ({}, {}, False),
    ],
)
def test_the_actors_forward_runs_only_for_a_proximal_policy_a_kl_in_the_reward_or_openrlhfs_loss(block, kl, skipped):
    args = workers.arguments(block, **kl)
    assert bypasses(args, part_of(args)) is skipped
