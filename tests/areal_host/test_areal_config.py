"""What each mode sets of AReaL's configuration is printed, what can't be true together is refused, the page says both.

AReaL's own classes read every case.
"""

import ast
import contextlib
import importlib
import inspect
import io
import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("areal", reason="the AReaL adapter's tests need AReaL (requirements/areal.txt)")

import areal_room  # noqa: F401  (the room, before AReaL chooses its platform)

from metronome.errors import ConfigurationError
from metronome_areal.command import arguments_of, arranged
from metronome_areal.cpu import assets
from metronome_areal.launch import HELP

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs" / "areal.md"
MODULES = ("arrange", "sharing", "queueing", "cpu.arguments")
PLAIN = {"train_dataset.path": "x.jsonl", "actor.path": "m", "rollout.backend": "vllm:d4"}

PERIODIC = {"metronome.rollout_source": "periodic"}
BOUNDED = {"metronome.rollout_source": "bounded"}
SHARED = {"metronome.attention": "shared_prompt"}
A3PO = {"metronome.loss": "a3po"}
SAGC = {"metronome.group_controller": "sagc"}
ROOM = {"metronome.cpu": True, "scheduler.type": None}
REJECTION = {"actor.rejection_sampling": {"level": "token", "action": "mask", "metric": "ratio", "upper": 5.0}}
NAMES = {"experiment_name": "x", "trial_name": "x"}


def check(keys):
    """AReaL's configuration as our trainer would have it, and the lines that are printed."""
    block = {key.partition(".")[2]: value for key, value in keys.items() if key.startswith("metronome.")}
    args = PLAIN | {key: value for key, value in keys.items() if not key.startswith("metronome.")}
    return arranged(arguments_of(args, block), "recipe")


def _teacher(kind):
    inside = {"backend": "fsdp:d4" if kind == "train" else "vllm:d1", **NAMES}
    return {"teacher.engine_type": kind, "teacher.path": "m", f"teacher.{kind}": inside}


# What is refused: keys, what, where, remedy.
REFUSED = [
    *(
        (A3PO | {f"{name}._version": "v2"}, "gateway controllers", f"{name}._version", f"{name}._version=v1")
        for name in ("actor", "rollout")
    ),
    (A3PO | {"actor.backend": "megatron:d4"}, "FSDP engine", "actor.backend", "fsdp:d"),
    (
        SHARED | {"rollout.return_routed_experts": True},
        "replay routed experts",
        "rollout.return_routed_experts",
        "leave rollout.return_routed_experts out",
    ),
    # loss
    (
        A3PO | {"actor.use_sapo_loss": True, "actor.use_decoupled_loss": False},
        "SAPO is another loss",
        "actor.use_sapo_loss",
        "leave actor.use_sapo_loss out",
    ),
    (
        A3PO | {"metronome.a3po.proximal": "reuse", "actor.ppo_n_minibatches": 2},
        "visits a row once",
        "actor.ppo_n_minibatches",
        "recompute",
    ),
    (A3PO | {"actor.m2_threshold": 0.1}, "M2PO", "actor.m2_threshold", "leave actor.m2_threshold out"),
    (A3PO | {"actor.enable_tree_training": True}, "how long their rows", "actor.enable_tree_training", "leave"),
    (A3PO | REJECTION, "both weigh samples", "actor.rejection_sampling", "leave actor.rejection_sampling out"),
    (
        A3PO | {"actor.importance_sampling_level": "sequence"},
        "GSPO",
        "actor.importance_sampling_level",
        "leave actor.importance_sampling_level out",
    ),
    (A3PO | _teacher("train"), "teacher's loss", "teacher", "teacher=null"),
    # any source of groups
    (SAGC | {"dynamic_bs": True}, "groups that were asked for", "dynamic_bs", "dynamic_bs=false"),
    (BOUNDED | {"rollout.agent.mode": "online"}, "users' sessions", "rollout.agent.mode", "inline"),
    (
        BOUNDED | {"rollout.scheduling_strategy": {"type": "colocation", "target": "actor"}},
        "devices of its own",
        "rollout.scheduling_strategy",
        "separation",
    ),
    # periodic
    *(
        (PERIODIC | {f"{key}.mean_level": "batch"}, "before its last group", key, "group_size=8")
        for key in ("actor.adv_norm", "actor.reward_norm")
    ),
    (
        PERIODIC | {"critic": {"backend": "fsdp:d4", "path": "m", "is_critic": True, **NAMES}},
        "a critic learns over the batch",
        "critic",
        "critic=null",
    ),
    (PERIODIC | _teacher("train"), "a teacher isn't tested", "teacher", "teacher=null"),
    (
        PERIODIC | {"actor.enable_tree_training": True},
        "tree training isn't tested",
        "actor.enable_tree_training",
        "shared_prompt",
    ),
    (
        PERIODIC | {"rollout.scheduling_strategy": {"type": "colocation", "target": "actor"}},
        "devices of their own",
        "rollout.scheduling_strategy",
        "separation",
    ),
    (PERIODIC | {"actor.offload": True}, "devices of their own", "rollout.scheduling_strategy", "separation"),
    *(
        (PERIODIC | {f"actor.fsdp.{key}": True}, "isn't tested with parts", f"actor.fsdp.{key}", "false")
        for key in ("per_layer_optim_step", "offload_params")
    ),
    (PERIODIC | {"actor.mask_no_eos_with_zero": True}, "widest rows", "actor.mask_no_eos_with_zero", "false"),
    (PERIODIC | {"actor.m2_threshold": 0.1}, "M2PO", "actor.m2_threshold", "leave actor.m2_threshold out"),
    (PERIODIC | {"actor.backend": "fsdp:d2t2"}, "tensor and context parallelism", "actor.backend", "fsdp:d4"),
    (PERIODIC | {"actor.mb_spec.granularity": 4}, "as many rows as its groups", "actor.mb_spec.granularity", "1"),
    (PERIODIC | {"metronome.periodic.audit_every": 2}, "audit", "metronome.periodic.audit_every", "leave it out"),
    (PERIODIC | {"dynamic_bs": True}, "arrival", "dynamic_bs", "false"),
    (PERIODIC | {"actor.disable_dropout": False}, "dropout", "periodic", "actor.disable_dropout=true"),
    (PERIODIC | {"actor.optimizer_dtype": "bfloat16"}, "", "periodic", "actor.optimizer_dtype=float32"),
    # attention
    (SHARED | {"actor.enable_tree_training": True}, "layout of its own", "actor.enable_tree_training", "leave"),
    (SHARED | {"actor.use_kernels": True}, "kernels from the hub", "actor.use_kernels", "leave actor.use_kernels"),
    (SHARED | {"actor.backend": "fsdp:d2t2"}, "cut over ranks", "actor.backend", "fsdp:d4"),
    # ours
    (BOUNDED | {"metronome.in_flight": "abbort"}, "unknown value", "metronome.in_flight", "abort"),
    (
        PERIODIC | {"metronome.in_flight": "abort"},
        "nothing runs at a publication",
        "metronome.in_flight",
        "bounded, or",
    ),
    (A3PO | {"metronome.cpu": "yes"}, "true or false", "metronome.cpu", "metronome.cpu=true"),
    # the CPU room
    *(
        (ROOM | {key: value}, "", where, "")
        for key, value, where in (
            ("actor.backend", "archon:d1", "actor.backend"),
            ("actor.backend", "fsdp:d1t2", "actor.backend"),
            ("actor.enable_tree_training", True, "actor.enable_tree_training"),
            ("actor.use_kernels", True, "actor.use_kernels"),
            ("actor.offload", True, "actor.offload"),
            ("enable_offload", True, "enable_offload"),
            ("actor.fsdp.offload_params", True, "actor.fsdp.offload_params"),
            ("actor.fsdp.per_layer_optim_step", True, "actor.fsdp.per_layer_optim_step"),
            ("actor.scheduling_strategy.type", "colocation", "actor.scheduling_strategy.type"),
            ("rollout.scheduling_strategy.type", "colocation", "rollout.scheduling_strategy.type"),
            ("rollout.return_routed_experts", True, "rollout.return_routed_experts"),
            ("rollout.agent.mode", "online", "rollout.agent.mode"),
            ("gconfig.stop", ["x"], "gconfig.stop"),
            ("gconfig.frequency_penalty", 0.5, "gconfig.frequency_penalty"),
            ("gconfig.use_beam_search", True, "gconfig.use_beam_search"),
            ("memory_profiler.profile_steps", [1], "memory_profiler"),
        )
    ),
    (ROOM | {"scheduler.type": "ray"}, "workers of this machine", "scheduler.type", "scheduler.type=local"),
    (
        ROOM | {"scheduler.type": "local", "actor.use_lora": True},
        "workers take whole models",
        "actor.use_lora",
        "scheduler.type=null",
    ),
    (ROOM | _teacher("rollout"), "inference engine", "teacher.engine_type", "teacher=null"),
]


@pytest.mark.parametrize(("keys", "what", "where", "remedy"), REFUSED)
def test_what_can_t_be_true_together_is_refused_with_the_key_that_mends_it(keys, what, where, remedy):
    with pytest.raises(ConfigurationError) as refused:
        check(keys)
    error = refused.value
    assert what in error.what
    assert where in error.where
    assert remedy in error.remedy
    assert error.remedy
    assert error.exit_code == 2
    assert "\n" not in str(error)


def test_every_refusal_is_one_of_those_above(monkeypatch):
    met = set()

    def watched(name, original):
        def refuse(condition, *others):
            if condition:
                met.add((name, sys._getframe(1).f_lineno))
            original(condition, *others)

        return refuse

    written = set()
    for name in MODULES:
        module = importlib.import_module(f"metronome_areal.{name}")
        monkeypatch.setattr(module, "refuse", watched(name, module.refuse))
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "refuse":
                written.add((name, node.lineno))
    for keys, *_ in REFUSED:
        with pytest.raises(ConfigurationError):
            check(keys)
    # Those that need an accelerator or torchrun
    unmet = {(name, line) for name, line in written - met if not re.search("platform|TORCHELASTIC", _call(name, line))}
    assert unmet == set()


def _call(name, line):
    source = inspect.getsource(importlib.import_module(f"metronome_areal.{name}"))
    return "\n".join(source.splitlines()[line - 1 : line + 2])


def test_without_a_block_nothing_is_set_nor_said():
    _, notes = check({})
    assert notes == []


@pytest.mark.parametrize(
    ("keys", "lines"),
    [
        (PERIODIC, ["rollout.max_head_offpolicyness="]),
        (PERIODIC | {"actor.ppo_n_minibatches": 4}, ["rollout.max_head_offpolicyness=", "actor.ppo_n_minibatches=1"]),
        (BOUNDED, ["rollout.max_head_offpolicyness="]),
        (SAGC, ["rollout.max_head_offpolicyness="]),
        (
            A3PO,
            ["actor.use_decoupled_loss=True", "actor.prox_logp_method=loglinear", "metronome.a3po.clip_low=0.2 "],
        ),
        (A3PO | {"metronome.a3po.proximal": "recompute"}, ["actor.use_decoupled_loss=True", "clip_low"]),
        (
            SHARED | {"actor.pad_to_maximum": True, "actor.mb_spec.packing_algorithm": "kk"},
            ["actor.attn_impl=sdpa", "actor.pad_to_maximum=False", "actor.mb_spec.packing_algorithm=ffd"],
        ),
        (ROOM, ["actor.backend=fsdp:d1", "actor.attn_impl=sdpa", "actor.dtype=float32", "weight_update_mode=disk"]),
    ],
)
def test_each_setting_that_a_mode_makes_is_printed(keys, lines):
    before, _ = check({key: value for key, value in keys.items() if not key.startswith("metronome.")})
    config, notes = check(keys)
    for line in lines:
        assert [note for note in notes if line in note], notes
    # the other way round: what is other than without our keys stands in a line
    old = dict(_flat(before))
    for name in {name for name, value in _flat(config) if name in old and old[name] != value}:
        assert [note for note in notes if f"{name}=" in note], (name, notes)


def test_what_is_said_of_minibatches_is_what_they_will_be():
    many = SHARED | {"actor.ppo_n_minibatches": 4}
    _, notes = check(many)
    assert [one for one in notes if "whole groups, a group is cut" in one]
    config, notes = check(many | PERIODIC)
    assert config.actor.ppo_n_minibatches == 1
    assert [one.partition(" ")[0] for one in notes if "ppo_n_minibatches" in one] == ["actor.ppo_n_minibatches=1"]


@pytest.mark.parametrize(("keys", "owner"), [(SAGC, "group controller"), (SAGC | BOUNDED, "rollout source")])
def test_who_owns_admission_is_named(keys, owner):
    _, notes = check(keys)
    [line] = [one for one in notes if "max_head_offpolicyness=" in one]
    assert f"metronome's {owner} owns admission" in line


def _flat(place, way=""):
    for name, value in vars(place).items():
        if name == "metronome":
            continue
        if hasattr(value, "__dict__"):
            yield from _flat(value, f"{way}{name}.")
        else:
            yield f"{way}{name}", value


# ---- the page ------------------------------------------------------------------------------------------------------


def test_the_page_names_every_refused_key_and_every_key_of_ours():
    text = DOCS.read_text(encoding="utf-8")
    named = {where.partition(".mean_level")[0] for _, _, where, _ in REFUSED if not where.startswith("metronome.")}
    missing = {key for key in named if f"`{key}" not in text and key.partition(".")[2] not in text}
    assert missing == set()
    ours = {word for word in HELP.split() if word.startswith("metronome.")} - {"metronome.PLUGIN.OPTION"}
    assert {key for key in ours if key not in text} == set()


def test_the_page_and_make_say_how_to_enter_the_environment():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    target = makefile.partition("\nareal-environment:")[2].partition("\n\n")[0]
    [said] = re.findall(r'@echo "(source .*)"', target)
    assert f"    {said.replace('$(AREAL)', '.venv-areal')}\n" in DOCS.read_text(encoding="utf-8")


def test_the_page_names_every_metric_and_no_other():
    text = DOCS.read_text(encoding="utf-8")
    assert "proximal_error" not in text  # AReaL's batches have no recomputed policy where ours is interpolated
    source = "".join(path.read_text(encoding="utf-8") for path in ROOT.glob("adapters/metronome_areal/*.py"))
    emitted = set(re.findall(r"[\"'](metronome/[a-z_]+/[a-z_]+)[\"']", source))
    named = set(re.findall(r"`(metronome/[a-z_/]+)`", text))
    assert emitted - named == set()
    for one in named - emitted:  # names put together
        _, hook, name = one.split("/")
        assert f"metronome/{hook}/{{name}}" in source
        assert name in source or hook == "loss"


REPRODUCED = [
    lambda said: said[0] > 0.1 and said[1] < 1e-5,
    lambda said: said == [-1, 0, 0, 0, 0, 3],
    lambda said: said[0] == 0 and min(said[1:3]) > 9e4 and said[3:] == pytest.approx([-1.155, 0.577, 0.577], abs=1e-2),
    lambda said: said == pytest.approx([-1.105, -1.221, -1.221, -1.221], abs=1e-3),
    lambda said: said == pytest.approx([1, 1, 0.5, 1, 1, 1, 0.5, 1, 2 / 3, 0.4], abs=1e-3),
]


def test_each_difference_of_stock_areal_is_reproduced_in_ten_lines(tmp_path, monkeypatch):
    assets.make(tmp_path / "tiny")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == len(REPRODUCED)
    for block, holds in zip(blocks, REPRODUCED, strict=True):
        lines = [line for line in block.splitlines() if line and "import" not in line]
        assert len(lines) <= 10
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            exec(compile(block, str(DOCS), "exec"), {})
        printed = [line for line in said.getvalue().splitlines() if "AReaL" not in line and "\x1b" not in line]
        numbers = [float(one) for line in printed for one in re.findall(r"-?\d+\.?\d*(?:e[+-]?\d+)?", line)]
        assert holds(numbers), (block, numbers)
