"""The local host's gradient against the formula written down directly, in float64.

The float32 islands of the Hugging Face model (its norms) are replaced, so that equalities can be held to 1e-12.
"""

import copy
import random
from types import SimpleNamespace

import pytest
import tiny_local
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from metronome.a3po.loss import A3po
from metronome.a3po.options import A3poOptions, PpoOptions
from metronome.a3po.ppo import Ppo
from metronome.errors import EqualityViolated
from metronome.periodic.normalizer import StreamingNormalizer
from metronome.shared_prompt.cascade import CascadeBackend
from metronome.shared_prompt.options import SharedPromptOptions
from metronome.shared_prompt.plan import SharedPromptPlan
from metronome.shared_prompt.reference import ReferenceBackend
from metronome.shared_prompt.select import SharedPromptAttention
from metronome_local.audit import audit
from metronome_local.gradient import Gradient, Reference, TrainGroup
from metronome_local.logprobs import SeparateLogProbs, SharedPromptLogProbs
from metronome_local.recipe import Lora, Model, Training
from metronome_local.rollouts import Row
from metronome_local.trainer import Period, Trainer

VERSION, LONGEST, TEMPERATURE = 5, 12, 0.8


def exact(made):
    """``made`` in float64, its norms included."""
    for layer in made.modules():
        for name, norm in list(layer.named_children()):
            if type(norm).__name__ == "LlamaRMSNorm":
                plain = torch.nn.RMSNorm(norm.weight.shape, norm.variance_epsilon)
                torch.nn.init.uniform_(plain.weight, 0.5, 1.5, generator=torch.Generator().manual_seed(3))
                setattr(layer, name, plain.requires_grad_(norm.weight.requires_grad))
    return made.double()


def policy(seed=0):
    return exact(tiny_local.model(seed=seed))


def row_log_probs(made, row):
    """Log-probs and entropies of a response from a forward pass of the row alone."""
    logits = made(input_ids=torch.tensor([row.ids]), use_cache=False).logits[0] / TEMPERATURE
    logits = logits[len(row.prompt) - 1 : len(row.ids) - 1].log_softmax(-1)
    return logits.gather(1, torch.tensor(row.response)[:, None])[:, 0], -(logits.exp() * logits).sum(-1)


def groups_for(made, count=4, seed=0, tools=True, drift=0.3, stale=0):
    """Groups of four rollouts: uneven lengths, one rollout of two rows, tool tokens in the middle of a row."""
    rng = random.Random(seed)

    def tokens(length):
        return [rng.randrange(3, 99) for _ in range(length)]

    groups = []
    for index in range(count):
        prompt = tokens(rng.randint(3, 9))
        rollouts = []
        for member in range(4):
            rows = []
            for _ in range(2 if member == 1 else 1):
                row = Row(prompt + (tokens(2) if rows else []), tokens(rng.randint(1, LONGEST)))
                row.trained = [True] * len(row.response)
                if tools and member == 2 and len(row.response) > 3:
                    row.trained[1:3] = [False, False]
                row.versions = [VERSION - rng.randint(0, stale) if kept else -1 for kept in row.trained]
                with torch.no_grad():
                    values = row_log_probs(made, row)[0].tolist()
                row.log_probs = [v + rng.uniform(-drift, drift) for v in values]
                rows.append(row)
            rollouts.append(rows)
        groups.append(TrainGroup(index, rollouts, [rng.uniform(-1, 1) for _ in range(4)]))
    return groups


def log_probs_for(made, shared=True, backend=None):
    if shared:
        return SharedPromptLogProbs(made, backend or SharedPromptAttention(), TEMPERATURE, "float32")
    return SeparateLogProbs(made, TEMPERATURE, "float32")


def gradient_for(made, shared=True, loss=None, reference=None, on_policy=True, backend=None, **training):
    """A Gradient of ``made``."""
    compute = log_probs_for(made, shared, backend)
    refer = None
    if reference is not None:
        refer = Reference(reference, log_probs_for(reference, shared), adapter=False)
    return Gradient(
        made,
        compute,
        loss or Ppo(PpoOptions()),
        Training(**training),
        refer,
        max_tokens=LONGEST,
        on_policy=on_policy,
    )


def flat(gradient):
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in gradient.parameters])


def accumulate(gradient, portions, expected_rows=16, version=VERSION):
    """The gradient of ``portions``, lists of groups that are added one list at a time."""
    gradient.begin(expected_rows)
    for portion in portions:
        gradient.add(portion, version)
    metrics = gradient.finish()
    return flat(gradient), metrics


def relative(found, wanted):
    return float((found - wanted).norm() / wanted.norm())


def directly(made, groups, normaliser, kl=0.0, entropy=0.0, reference=None, advantages=None, masked=True):
    """REINFORCE with KL (k3) and entropy, row by row, as docs/techniques and the papers write it."""
    rows = [row for group in groups for row in group.rows]
    values = advantages or [a for group in groups for a in group.row_advantages]
    lengths = [sum(row.trained) if masked else len(row.response) for row in rows]
    total = torch.zeros((), dtype=torch.float64)
    for row, advantage, length in zip(rows, values, lengths, strict=True):
        log_probs, entropies = row_log_probs(made, row)
        mask = torch.tensor(row.trained if masked else [True] * len(row.response))
        token = -advantage * (log_probs - log_probs.detach()).exp() - entropy * entropies
        if reference is not None:
            with torch.no_grad():
                gap = row_log_probs(reference, row)[0]
            gap = gap - log_probs
            token = token + kl * (gap.exp() - gap - 1)
        weight = {
            "seq-mean": 1 / (len(rows) * length),
            "token-mean": 1 / sum(lengths),
            "dr-grpo": 1 / (len(rows) * LONGEST),
            "seq-mean-token-sum": 1 / len(rows),
        }[normaliser]
        total = total + weight * (token * mask).sum()
    parameters = [p for p in made.parameters() if p.requires_grad]
    found = torch.autograd.grad(total, parameters)
    return torch.cat([g.flatten() for g in found])


MADE, REFERENCE = policy(), policy(seed=4)
GROUPS = groups_for(MADE)


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "separate"])
@pytest.mark.parametrize("normaliser", StreamingNormalizer.MODES)
def test_the_gradient_is_the_formulas_with_kl_and_entropy(normaliser, shared):
    options = {"normaliser": normaliser, "kl": 0.2, "entropy": 0.05}
    gradient = gradient_for(MADE, shared, reference=REFERENCE, **options)
    found, metrics = accumulate(gradient, [[one] for one in GROUPS])
    assert relative(found, directly(MADE, GROUPS, normaliser, 0.2, 0.05, REFERENCE)) < 1e-12
    assert metrics["kl"] > 0
    assert metrics["entropy"] > 0
    for kl, entropy, reference in ((0.0, 0.05, None), (0.2, 0.0, REFERENCE)):
        assert relative(found, directly(MADE, GROUPS, normaliser, kl, entropy, reference)) > 1e-3
    other = next(mode for mode in StreamingNormalizer.MODES if mode != normaliser)
    assert relative(found, directly(MADE, GROUPS, other, 0.2, 0.05, REFERENCE)) > 1e-3


@given(data=st.data())
@settings(max_examples=15, deadline=None)
@pytest.mark.parametrize("normaliser", StreamingNormalizer.MODES)
def test_any_order_and_split_of_the_groups_gives_the_same_gradient(normaliser, data):
    options = {"normaliser": normaliser, "kl": 0.2, "entropy": 0.05}
    plain = gradient_for(MADE, reference=REFERENCE, micro_batch_tokens=100_000, **options)
    wanted, _ = accumulate(plain, [GROUPS])
    order = data.draw(st.permutations(GROUPS))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(GROUPS) - 1))))
    portions = [order[start:end] for start, end in zip([0, *cuts], [*cuts, len(order)], strict=True)]
    budget = data.draw(st.sampled_from([1, 40, 90, 150, 2048]))
    gradient = gradient_for(MADE, data.draw(st.booleans()), reference=REFERENCE, micro_batch_tokens=budget, **options)
    expected = data.draw(st.integers(1, 64))  # a scale, nothing more
    found, _ = accumulate(gradient, portions, expected)
    assert relative(found, wanted) < 1e-12


@pytest.mark.parametrize("loss", [A3po(A3poOptions(proximal="recompute")), Ppo(PpoOptions())], ids=["a3po", "ppo"])
def test_a_group_larger_than_a_micro_batch_computes_its_prompt_once(loss):
    group, found = GROUPS[0], []
    prompt, tokens = len(group.rows[0].prompt), log_probs_for(MADE).tokens(group.rows)
    for budget in (tokens, 1):
        gradient = gradient_for(
            MADE, loss=loss, reference=REFERENCE, kl=0.1, entropy=0.01, on_policy=False, micro_batch_tokens=budget
        )
        value, _ = accumulate(gradient, [[group]])
        found.append((value, gradient.log_probs.computed_tokens, gradient.loss_calls))
    assert relative(found[1][0], found[0][0]) < 1e-12
    assert [calls for _, _, calls in found] == [1, 4]
    passes = 2 if loss.needs_proximal_forward else 1  # a recomputed proximal policy reads the same cached prompt
    assert found[0][1] == passes * tokens
    assert found[1][1] == prompt + passes * (tokens - prompt)


def test_a_mean_per_micro_batch_is_another_gradient():
    wanted, _ = accumulate(gradient_for(MADE, algorithm="dapo"), [GROUPS])
    parts = [accumulate(gradient_for(MADE, algorithm="dapo"), [[one]])[0] for one in GROUPS]
    assert relative(sum(parts) / len(parts), wanted) > 1e-3


def test_tool_tokens_are_in_the_context_and_out_of_the_loss():
    found, _ = accumulate(gradient_for(MADE), [GROUPS])
    assert relative(found, directly(MADE, GROUPS, "seq-mean")) < 1e-12
    assert relative(found, directly(MADE, GROUPS, "seq-mean", masked=False)) > 1e-2
    changed = copy.deepcopy(GROUPS)
    for row in (row for one in changed for row in one.rows):
        row.log_probs = [p if kept else float("nan") for p, kept in zip(row.log_probs, row.trained, strict=True)]
    off_policy = gradient_for(MADE, loss=Ppo(PpoOptions(anchor="behavior")), on_policy=False)
    assert torch.equal(accumulate(off_policy, [changed])[0], accumulate(off_policy, [GROUPS])[0])
    for row in (row for one in changed for row in one.rows):
        row.response = [t if kept else 3 for t, kept in zip(row.response, row.trained, strict=True)]
    assert relative(accumulate(gradient_for(MADE), [changed])[0], found) > 1e-3


@pytest.mark.parametrize("advantage", ["group-std", "batch"])
def test_groups_without_advantages_are_left_out_of_the_passes_and_counted_in_the_mean(advantage):
    groups = copy.deepcopy(GROUPS)
    groups[1].advantages = [0.0] * 4
    gradient = gradient_for(MADE, advantage=advantage)
    found, _ = accumulate(gradient, [[one] for one in groups])
    values = None
    if advantage == "batch":
        values = whitened(groups)
        assert any(values[5:10])  # whitened by the batch, that group has advantages after all
    else:
        assert gradient.loss_calls == 3
    assert relative(found, directly(MADE, groups, "seq-mean", advantages=values)) < 1e-12
    assert relative(found, directly(MADE, [groups[0], *groups[2:]], "seq-mean")) > 1e-3


def test_parts_that_share_more_than_their_group_does_share_it_and_stay_within_the_budget():
    rng = random.Random(5)
    rollouts = []
    for prompt in ([1, *(rng.randrange(3, 99) for _ in range(30))] for _ in range(2)):
        for _ in range(3):  # two agents' prompts have their first token in common
            length = rng.randint(1, 6)
            response = [rng.randrange(3, 99) for _ in range(length)]
            rollouts.append([Row(prompt, response, [True] * length, [-1.0] * length, [VERSION] * length)])
    groups = [TrainGroup(0, rollouts, [rng.uniform(-1, 1) for _ in range(6)])]
    gradient = gradient_for(MADE, reference=REFERENCE, kl=0.2, micro_batch_tokens=60)
    sizes = []
    hook = MADE.model.layers[0].register_forward_hook(lambda _m, inputs, _o: sizes.append(inputs[0].shape[1]))
    found, _ = accumulate(gradient, [groups])
    hook.remove()
    assert relative(found, directly(MADE, groups, "seq-mean", 0.2, reference=REFERENCE)) < 1e-12
    assert max(sizes) <= 60
    assert gradient.log_probs.computed_tokens < 0.5 * gradient.log_probs.separate_tokens


def whitened(groups):
    rows = [row for group in groups for row in group.rows]
    raw = [a for group in groups for a in group.row_advantages]
    tokens = [a for a, row in zip(raw, rows, strict=True) for _ in range(sum(row.trained))]
    tokens = torch.tensor(tokens, dtype=torch.float64)
    mean, deviation = tokens.mean(), tokens.std(correction=0) + 1e-8
    return [float((a - mean) / deviation) for a in raw]


@pytest.mark.parametrize("kl", [0.0, 0.2])
def test_advantages_whitened_over_the_batch_equal_the_direct_computation(kl):
    reference = REFERENCE if kl else None
    for portions in ([GROUPS], [[one] for one in reversed(GROUPS)]):
        gradient = gradient_for(MADE, reference=reference, advantage="batch", kl=kl, micro_batch_tokens=60)
        found, _ = accumulate(gradient, portions)
        wanted = directly(MADE, GROUPS, "seq-mean", kl, reference=reference, advantages=whitened(GROUPS))
        assert relative(found, wanted) < 1e-11
    assert relative(found, directly(MADE, GROUPS, "seq-mean", kl, reference=reference)) > 1e-2


def test_all_groups_without_advantages_leave_no_gradient():
    groups = copy.deepcopy(GROUPS)
    for one in groups:
        one.advantages = [0.0] * 4
    gradient = gradient_for(MADE)
    accumulate(gradient, [groups])
    assert all(p.grad is None for p in gradient.parameters)


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "separate"])
def test_lora_trains_its_adapter_alone_with_the_base_as_reference(tiny_model, shared):
    from metronome_local.models import policy_model

    torch.manual_seed(2)
    made = policy_model(Model(name=str(tiny_model), lora=Lora(rank=4, targets=["q_proj", "v_proj"])))
    made = exact(made)
    for name, parameter in made.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    compute = log_probs_for(made, shared)
    training = Training(kl=0.2)
    gradient = Gradient(
        made, compute, Ppo(), training, Reference(made, compute, True), max_tokens=LONGEST, on_policy=True
    )
    found, metrics = accumulate(gradient, [[one] for one in GROUPS])
    names = [name for name, p in made.named_parameters() if p.requires_grad]
    assert names
    assert all("lora_" in name for name in names)
    base = exact(tiny_local.model())  # the weights that the folder holds
    assert metrics["kl"] > 1e-4
    assert relative(found, directly(made, GROUPS, "seq-mean", 0.2, reference=base)) < 1e-12
    assert relative(found, directly(made, GROUPS, "seq-mean")) > 1e-3


def several(loss, steps=2, epochs=1, tokens=2048, stale=3, **training):
    """The weights after ``epochs`` visits of ``steps`` mini-batches, and the last metrics."""
    made = policy()
    groups = groups_for(made, 4, stale=stale)
    gradient = gradient_for(
        made,
        loss=loss,
        on_policy=False,
        mini_batches=steps,
        epochs=epochs,
        micro_batch_tokens=tokens,
        **training,
    )
    optimiser = torch.optim.SGD(gradient.parameters, lr=0.5)
    parts = SimpleNamespace(
        recipe=SimpleNamespace(training=gradient.training, machine=SimpleNamespace(timeout=1.0)),
        selection=SimpleNamespace(rollout_source=None, group_controller=None),
        pool=SimpleNamespace(hold=lambda: None),
        rollouts=SimpleNamespace(prompt_at=None, describe=str),
        gradient=gradient,
        optimiser=optimiser,
        scheduler=torch.optim.lr_scheduler.LambdaLR(optimiser, lambda _: 1.0),
        progress=SimpleNamespace(phase=lambda *_: None),
        model=made,
    )
    clock = SimpleNamespace(work=[], step_seconds=0.0)
    period = Period(VERSION, 4, 4, 0, clock, trained=list(reversed(groups)))
    metrics = Trainer(parts)._several_steps(period)
    return torch.cat([p.detach().flatten() for p in made.parameters()]), metrics


LOSSES = {mode: A3po(A3poOptions(proximal=mode, cap=None)) for mode in ("loglinear", "recompute", "reuse")}
LOSSES["behavior"] = A3po(A3poOptions(proximal="behavior"))


@pytest.mark.parametrize("mode", LOSSES)
def test_every_proximal_mode_trains_stale_groups_in_several_mini_batches(mode):
    start = torch.cat([p.detach().flatten() for p in policy().parameters()])
    weights, metrics = several(LOSSES[mode], epochs=2)
    assert torch.isfinite(weights).all()
    assert (weights - start).norm() > 1e-3
    assert metrics["staleness_max"] == 3
    assert metrics["grad_norm"] > 0
    for other in set(LOSSES) - {mode, "recompute", "reuse"}:
        assert relative(several(LOSSES[other], epochs=2)[0] - start, weights - start) > 1e-6


@pytest.mark.parametrize("tokens", [2048, 30], ids=["whole groups", "split groups"])
def test_kept_proximal_log_probs_equal_recomputed_ones_on_the_first_step_and_stay_on_later_visits(tokens):
    kept, _ = several(LOSSES["reuse"], steps=1, epochs=3, tokens=tokens)
    computed, _ = several(LOSSES["recompute"], steps=1, epochs=3, tokens=tokens)
    assert relative(kept, computed) < 1e-12
    once, _ = several(LOSSES["reuse"], steps=1, epochs=1, tokens=tokens)
    assert relative(kept, once) > 1e-6
    forgotten = A3po(A3poOptions(proximal="reuse", cap=None))
    forgotten.keeps_proximal = False  # what forgetting them would give
    assert relative(several(forgotten, steps=1, epochs=3, tokens=tokens)[0], kept) > 1e-9


class DropsTheMask(CascadeBackend):
    """Lets responses see one another."""

    name = "drops the mask"

    def __init__(self):
        self.options = SharedPromptOptions(self_check=False)

    def attend(self, q, k, v, plan, scale, *, window=None, sinks=None):
        return super().attend(q, k, v, SharedPromptPlan.build([(plan.tokens, [0])]), scale)


def audited(backend=None, spoil=lambda gradient: None):
    """The difference that an audit finds in a streamed gradient that ``spoil`` may change."""
    made = policy()
    groups = groups_for(made)
    gradient = gradient_for(made, backend=backend, kl=0.0)
    trained = [groups[2], groups[0], groups[3], groups[1]]
    accumulate(gradient, [[one] for one in trained])
    spoil(gradient)
    before = flat(gradient)
    difference = audit(
        gradient, trained, VERSION, ReferenceBackend(), expected_rows=16, tolerance=1e-4, where="period 0"
    )
    assert torch.equal(flat(gradient), before)  # an audit leaves the streamed gradient in place
    return difference


def test_an_audit_passes_the_streamed_gradient():
    assert audited() < 1e-12


def test_an_audit_stops_a_backend_that_drops_the_mask():
    with pytest.raises(EqualityViolated, match=r"audit of period 0.*audit_every"):
        audited(DropsTheMask())


def scaled(gradient):
    for parameter in gradient.parameters:
        parameter.grad.mul_(1.001)


def lost(gradient):
    gradient.parameters[3].grad = None


def invented(gradient):
    gradient.parameters[3].grad.add_(1e-2)


@pytest.mark.parametrize("spoil", [scaled, lost, invented])
def test_an_audit_stops_a_gradient_that_was_changed(spoil):
    with pytest.raises(EqualityViolated, match="another gradient"):
        audited(spoil=spoil)
