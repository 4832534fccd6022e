"""Tiny random models of many families, each through one shared row and through separate rows.

``python tests/hosts/model_families.py --write`` regenerates docs/techniques/families.md.
"""

import copy
import dataclasses
import math
import sys
from pathlib import Path

import torch
import transformers
from family_configs import FAMILIES, FLOAT64, SINGLE, TINY

from metronome.errors import ConfigurationError
from metronome.shared_prompt.huggingface import attach
from metronome.shared_prompt.options import SharedPromptOptions
from metronome.shared_prompt.plan import SharedPromptPlan
from metronome.shared_prompt.reference import ReferenceBackend
from metronome.shared_prompt.select import SharedPromptAttention, choose, tensor_need

PAGE = Path(__file__).parents[2] / "docs/techniques/families.md"
GROUPS = ((40, (9, 5, 0, 23, 1)), (7, (6,)), (20, (3, 3)))  # prompts longer than windows, K = 1, an empty response
VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "depth": 1,
    "num_heads": 2,
    "embed_dim": 32,
    "out_hidden_size": 48,
}


def _known(config, settings):
    names = {*config.to_dict(), *type(config).attribute_map}
    return {key: value for key, value in settings.items() if key in names}


def build(family, dtype=torch.float64):
    """The family's model with random weights, in training mode; in float64 its experts run one by one."""
    model_type = family.name.partition(",")[0]
    default = transformers.AutoConfig.for_model(model_type)
    if family.vision is None:
        config = type(default)(**{**_known(default, TINY), **family.changes})
        auto = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
    else:
        text = default.text_config
        text_type = family.text_type or text.model_type
        like = transformers.AutoConfig.for_model(text_type) if family.text_type else text
        config = transformers.AutoConfig.for_model(
            model_type,
            vision_config={
                "model_type": default.vision_config.model_type,
                **_known(default.vision_config, VISION),
                **family.vision,
            },
            text_config={"model_type": text_type, **_known(like, TINY), **family.changes},
            **family.own,
        )
        auto = transformers.AutoModelForImageTextToText
    torch.manual_seed(1)
    how = {"experts_implementation": "eager"} if dtype == torch.float64 else {}  # grouped_mm takes no float64
    model = auto.from_config(config, **how)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.1)
        elif "sink" in name:
            torch.nn.init.normal_(parameter)
    for name, buffer in model.named_buffers():
        if "correction_bias" in name:
            buffer.copy_(torch.randn_like(buffer) / 10)
    return model.to(dtype).train()


class Noting(SharedPromptAttention):
    """``auto``, which notes what it picks."""

    def __init__(self):
        super().__init__()
        self.picked = set()

    def attend(self, q, k, v, plan, scale, *, window=None, sinks=None):
        need = tensor_need(q, k, v, window is not None, sinks is not None, bool(plan.first_query))
        self.picked.add(choose("auto", need, plan)[0].name)
        return super().attend(q, k, v, plan, scale, window=window, sinks=sinks)


class SiblingsSeen(ReferenceBackend):
    """Causal attention over packed indices: the mask between responses is dropped."""

    def attend(self, q, k, v, plan, scale, *, window=None, sinks=None):
        whole = SharedPromptPlan.build([(1, [plan.tokens - 1])])
        return super().attend(q, k, v, whole, scale, window=window, sinks=sinks)


def row():
    """The plan, the packed tokens, and each response as ``(tokens of its separate row, prompt length)``."""
    draw = torch.Generator().manual_seed(0)
    packed, separate = [], []
    for prompt_len, lengths in GROUPS:
        prompt, *responses = (torch.randint(3, 90, (n,), generator=draw) for n in (prompt_len, *lengths))
        prompt[3] = TINY["pad_token_id"]  # a prompt token that equals the pad id is a real token
        packed += [prompt, *responses]
        separate += [(torch.cat([prompt, response]), prompt_len) for response in responses if len(response)]
    return SharedPromptPlan.build(GROUPS), torch.cat(packed), separate


def separate_log_probs(model, rows):
    """Log-probs of every response token, each row through the model's unchanged forward."""
    found = []
    for tokens, prompt_len in rows:
        logits = model(input_ids=tokens[None], use_cache=False).logits[0, prompt_len - 1 : -1]
        found.append(torch.log_softmax(logits, -1).gather(1, tokens[prompt_len:, None])[:, 0])
    return torch.cat(found)


def gradients(model, log_probs):
    model.zero_grad()
    weights = torch.randn(len(log_probs), generator=torch.Generator().manual_seed(5))
    (log_probs * weights.to(log_probs.dtype)).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@dataclasses.dataclass(frozen=True)
class Trial:
    """What came of a family: differences if it was served, or where and why it was refused."""

    backend: str = ""
    log_probs: float = 0.0
    gradients: float = 0.0
    refused: ConfigurationError | None = None
    at_attach: bool = False
    restarted: float = 0.0  # how wrong log-probs become where positions go on instead
    masked: float = 0.0  # and where siblings see each other
    changed_buffers: tuple = ()


def attempt(family, dtype=torch.float64, controls=False):
    """Shared row against separate rows; differences are relative in float32, see ``FLOAT64`` and ``FLOAT32``."""
    model = build(family, dtype)
    plan, tokens, rows = row()
    backend = Noting()
    try:
        shared = attach(model, backend)
    except ConfigurationError as error:
        return Trial(refused=error, at_attach=True)
    buffers = {name: copy.deepcopy(buffer) for name, buffer in model.named_buffers()}
    try:
        found = shared.log_probs(tokens, plan)[0]
    except ConfigurationError as error:
        return Trial(refused=error)
    found_gradients = gradients(model, found)
    changed = tuple(name for name, buffer in model.named_buffers() if not torch.equal(buffer, buffers[name]))
    shared.detach()
    wanted = separate_log_probs(model, rows)
    wanted_gradients = gradients(model, wanted)
    assert found_gradients.keys() == wanted_gradients.keys()
    largest = max(gradient.abs().max() for gradient in wanted_gradients.values())
    distance = (found - wanted).abs().max()
    differences = []
    for name, gradient in wanted_gradients.items():
        scale = gradient.abs().max().clamp_min(1e-5 * largest) if dtype == torch.float64 else largest
        differences.append((found_gradients[name] - gradient).abs().max() / scale)
    if dtype != torch.float64:
        distance = distance / wanted.abs().max()
    restarted = masked = 0.0
    if controls:
        unchecked = SharedPromptOptions(self_check=False)
        going_on = dataclasses.replace(plan, position_ids=torch.arange(plan.tokens))
        with torch.no_grad():
            wrong = attach(model, backend, unchecked).log_probs(tokens, going_on)[0]
            restarted = (wrong - wanted).abs().max().item()
            shared.detach()
            wrong = attach(model, SiblingsSeen(), unchecked).log_probs(tokens, plan)[0]
            masked = (wrong - wanted).abs().max().item()
            shared.detach()
    return Trial(
        ", ".join(sorted(backend.picked)),
        distance.item(),
        max(differences).item(),
        restarted=restarted,
        masked=masked,
        changed_buffers=changed,
    )


def bound(figure, limit):
    """What the table says of a figure: the first step that it stays under by a factor of two, or the limit."""
    return min(next(step for step in (1e-12, 1e-9, 1e-7, 1e-6, 1e-5, math.inf) if 2 * figure <= step), limit)


def limits(family):
    """Largest differences that pass: log-probs and gradients in float64, both in float32."""
    return (*(SINGLE if family.single else FLOAT64), family.float32)


def figures(double, single):
    """What was measured, in the order of ``limits``."""
    return double.log_probs, double.gradients, max(single.log_probs, single.gradients)


HEAD = """# Which Hugging Face models read shared prompts

Generated by `python tests/hosts/model_families.py --write` with transformers {version}; `test_model_families.py`
fails if this page isn't what the code does.

Every family is tried as a tiny model with random weights, in training mode: one shared row (three groups of K = 5,
1 and 2 responses of uneven lengths, one of them empty, prompts longer than the windows) against a separate row for
every response through the model's own attention (sdpa, or eager where the model has no sdpa). *Served* means that
the log-probs of all response tokens and the gradients of all parameters agree, with `backend: auto` and the
first-use check on; with positions that go on instead of restarting, or with siblings that see each other, the same
comparison fails. *Refused* means a ConfigurationError with this reason: from `attach()`, or from the first forward
pass, before any result is handed out.

Figures are upper bounds: float64 log-probs, absolute; float64 gradients, relative to the largest value of the
parameter's gradient; float32, the larger of both, relative to the largest log-prob and gradient of the model.
Float64 figures above 1e-12 are the models' own float32 parts: norms and rotary tables (gradients), the routers of
models with a routing bias and eager softmax (log-probs too). In float64 experts run one after another, since
grouped_mm takes no float64; in float32 they run as transformers runs them.

Other decoders that use transformers' AttentionInterface usually work: the reasons below are found in the
configuration or the class, not in a list of names (but for `phimoe` and `hyperclovax`), and the first-use check
decides in each run. Wrappers that also read images are served for rows of text.

Mixtures of experts: experts here drop no token, and routing biases (`e_score_correction_bias`) aren't updated by a
forward pass (the test holds all buffers still). A router loss is part of the model's own loss, which shared rows
don't run: `output_router_logits: true` is refused, and so is router noise (`router_jitter_noise` and its like).

"""
COLUMNS = ("family", "kind", "served", "backend on CPU", "log-probs", "gradients", "float32", "reason")


def cells(family, double, single):
    """The family's row in the table, from its trials in float64 and float32."""
    if double.refused is not None:
        reason = double.refused.what.partition(": ")[2]
        return [family.name, family.kind, "at attach" if double.at_attach else "first pass", "", "", "", "", reason]
    bounds = [
        f"{bound(*one):.0e}".replace("e-0", "e-") for one in zip(figures(double, single), limits(family), strict=True)
    ]
    return [family.name, family.kind, "yes", double.backend, *bounds, ""]


def page(served, refused):
    """The whole page from the rows of both tables."""

    def table(columns, rows):
        lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
        return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])

    return (
        HEAD.format(version=".".join(transformers.__version__.split(".")[:2]))
        + f"## Served\n\n{table([*COLUMNS[:2], *COLUMNS[3:7]], [[*row[:2], *row[3:7]] for row in served])}\n\n"
        + "## Refused\n\n"
        + table(["family", "kind", "refused", "reason"], [[*row[:3], row[7]] for row in refused])
        + "\n"
    )


def main():
    rows = []
    for family in FAMILIES:
        double = attempt(family)
        rows.append(cells(family, double, attempt(family, torch.float32) if double.refused is None else None))
    served = [row for row in rows if row[2] == "yes"]
    PAGE.write_text(page(served, [row for row in rows if row[2] != "yes"]), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(__doc__)
    main()
