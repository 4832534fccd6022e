"""What each mode sets of OpenRLHF's arguments is printed, and what can't be true together says which flag mends it.

OpenRLHF's own parser and its main, up to the training, run on every case.
"""

import ast
import inspect
import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("openrlhf", reason="the OpenRLHF adapter's tests need openrlhf (requirements/openrlhf.txt)")

from metronome.errors import ConfigurationError
from metronome_openrlhf import command, config, groups, queueing, sharing, streaming
from metronome_openrlhf.cpu import arguments as cpu_arguments
from metronome_openrlhf.flags import HELP, take

FOLDER = command.openrlhf_folder()

LOSS_METRICS = (
    *("staleness", "staleness_max", "version_unknown", "off_behavior", "clipped", "dual_clipped", "capped"),
    *("importance_weight", "importance_weight_max", "ratio", "ratio_max", "approx_kl"),
    *("proximal_error", "proximal_error_max"),
)

PLAIN = [
    *("--actor.model_name_or_path", "m", "--reward.remote_url", "r.py", "--data.prompt_dataset", "d"),
    *("--algo.advantage.estimator", "group_norm", "--rollout.n_samples_per_prompt", "4", "--algo.kl.init_coef", "0"),
    *("--rollout.batch_size", "8", "--train.batch_size", "32", "--train.micro_batch_size", "4"),
    *("--rollout.micro_batch_size", "4", "--actor.num_gpus_per_node", "1", "--vllm.num_engines", "1"),
]


def check(*flags):
    """OpenRLHF's arguments as its training would see them, and the lines that are printed."""
    seen = []
    original = command._check_devices
    command._check_devices = lambda args, where: seen.append(args)
    try:
        notes = command.validate([*PLAIN, *flags], FOLDER, "recipe")
    finally:
        command._check_devices = original
    return seen[0], notes


PERIODIC = ("--metronome.rollout_source", "periodic")
BOUNDED = ("--metronome.rollout_source", "bounded")
SHARED = ("--metronome.attention", "shared_prompt")
SAGC = ("--metronome.group_controller", "sagc", "--metronome.sagc.sizes", "[2,4]")
A3PO = ("--metronome.loss", "a3po")

# What is refused, as found in the flags: flags, what, where, remedy.
REFUSED = [
    # names
    (("--metronome.losss", "a3po"), "unknown key", "--metronome", "loss"),
    ((*A3PO, "--metronome.a3po.capp", "5"), "unknown key", "a3po", "cap"),
    (("--metronome.loss", "a3poo"), "no plug-in offers this loss", "metronome.loss", "a3po"),
    (("--metronome.rollout_source", "periodik"), "no plug-in offers", "rollout_source", "periodic"),
    (("--metronome.a3po.cap", "5"), "isn't selected", "--metronome.a3po", "select 'a3po'"),
    (("--metronome.in_flight", "abort"), "nothing runs at a publication", "--metronome.in_flight", "finish"),
    ((*BOUNDED, "--metronome.in_flight", "abbort"), "unknown value", "--metronome.in_flight", "abort"),
    # sizes
    ((*A3PO, "--train.batch_size", "0"), "nothing to divide by", "--train.batch_size", "--train.batch_size 1 or more"),
    (
        ("--metronome.group_controller", "fixed", "--algo.advantage.estimator", "gae"),
        "a critic's accumulation window",
        "--algo.advantage.estimator",
        "--rollout.n_samples_per_prompt 8",
    ),
    # trainer
    ((*PERIODIC, "--train.async_enable"), "no batches in flight", "--train.async_enable", "rollout_source bounded"),
    # loss
    (
        (*A3PO, "--algo.advantage.is_correction_level", "token"),
        "both weigh samples",
        "--algo.advantage.is_correction_level",
        "--metronome.loss",
    ),
    ((*A3PO, "--actor.policy_loss_type", "gspo"), "takes the place", "--actor.policy_loss_type", "leave it out"),
    (
        (*A3PO, "--algo.advantage.is_correction_mode", "clip"),
        "whose options then do nothing",
        "--algo.advantage.is_correction_mode",
        "--metronome.a3po.cap",
    ),
    (
        (*A3PO, "--algo.advantage.is_correction_threshold", "2"),
        "whose options then do nothing",
        "--algo.advantage.is_correction_threshold",
        "--metronome.a3po.cap",
    ),
    ((*A3PO, "--actor.eps_clip", "1.5"), "invalid value", "a3po.clip_low", "between 0 and 1"),
    # bounded
    (
        (*BOUNDED, "--train.async_enable", "--train.partial_rollout_enable"),
        "finish lets them end",
        "--train.partial_rollout_enable",
        "--metronome.in_flight resume",
    ),
    ((*BOUNDED, "--train.async_queue_size", "0"), "a batch or more", "--train.async_queue_size", "queue_size 1"),
    (
        (*BOUNDED, "--metronome.bounded.max_staleness", "0"),
        "would drop each of them",
        "metronome.bounded.max_staleness",
        "periodic",
    ),
    (
        (*BOUNDED, "--train.async_queue_size", "3", "--metronome.bounded.max_staleness", "4"),
        "no sample would be 4 versions old",
        "metronome.bounded.max_staleness",
        "max_staleness 3, or --train.async_queue_size 4",
    ),
    (
        (*BOUNDED, "--train.async_enable", "--rollout.vllm_generate_batch_size", "16"),
        "batches wait in the queue",
        "--rollout.vllm_generate_batch_size",
        "--train.async_queue_size",
    ),
    ((*BOUNDED, "--vllm.num_engines", "0"), "engines of its own", "--vllm.num_engines", "1 or more"),
    (
        (*BOUNDED, "--train.batch_size", "24"),
        "half-filled accumulation window",
        "--train.batch_size",
        "--train.batch_size 32",
    ),
    (
        (*BOUNDED, "--rollout.micro_batch_size", "5"),
        "half-filled accumulation window",
        "--rollout.micro_batch_size",
        "32 rows come out whole",
    ),
    # periodic
    ((*PERIODIC, "--metronome.periodic.audit_every", "2"), "audit", "--metronome.periodic.audit_every", "leave it out"),
    ((*PERIODIC, "--train.colocate_all"), "devices of their own", "--train.colocate_all", "synchronous"),
    ((*PERIODIC, "--vllm.num_engines", "0"), "engines of its own", "--vllm.num_engines", "1 or more"),
    ((*PERIODIC, "--train.max_epochs", "2"), "one optimiser step", "--train.max_epochs", "--train.max_epochs 1"),
    (
        (*PERIODIC, "--algo.advantage.estimator", "reinforce_baseline"),
        "looks at the whole batch",
        "--algo.advantage.estimator",
        "group_norm | dr_grpo | rloo",
    ),
    ((*PERIODIC, "--algo.kl.target", "6"), "adaptive KL", "--algo.kl.target", "leave --algo.kl.target out"),
    ((*PERIODIC, "--train.enable_ema"), "average once a micro-batch", "--train.enable_ema", "synchronous"),
    ((*PERIODIC, "--train.dynamic_batch_enable"), "cut from a whole batch", "--train.dynamic_batch_enable", "out"),
    (
        (*PERIODIC, "--ds.ring_attn_size", "2"),
        "several ranks of one row",
        "--ds.ring_attn_size",
        "--ds.ring_attn_size 1",
    ),
    (
        (*PERIODIC, "--ds.tensor_parallel_size", "2"),
        "several ranks of one row",
        "--ds.tensor_parallel_size",
        "--ds.tensor_parallel_size 1",
    ),
    ((*PERIODIC, "--ds.zero_stage", "3"), "ZeRO-2", "--ds.zero_stage", "--ds.zero_stage 2"),
    ((*PERIODIC, "--ds.param_dtype", "fp16"), "moves by itself", "--ds.param_dtype", "--ds.param_dtype bf16"),
    ((*PERIODIC, "--actor.optim", "muon"), "Muon", "--actor.optim", "--actor.optim adam"),
    ((*PERIODIC, "--ds.adam_offload"), "on the host", "--ds.adam_offload", "leave --ds.adam_offload out"),
    ((*PERIODIC, "--ds.enable_sleep"), "put to sleep", "--ds.enable_sleep", "leave --ds.enable_sleep out"),
    ((*PERIODIC, "--ds.deepcompile"), "DeepCompile", "--ds.deepcompile", "leave --ds.deepcompile out"),
    ((*PERIODIC, "--actor.aux_loss_coef", "0.1"), "router", "--actor.aux_loss_coef", "--actor.aux_loss_coef 0"),
    ((*PERIODIC, "--critic.freezing_steps", "2"), "no critic", "--critic.freezing_steps", "leave"),
    ((*PERIODIC, "--data.max_images_per_prompt", "1"), "images", "--data.max_images_per_prompt", "per_prompt 0"),
    (
        (*PERIODIC, "--actor.loss_agg_mode", "seq-mean-token-mean", "--actor.entropy_coef", "0.1"),
        "no single rescaling",
        "--actor.loss_agg_mode",
        "--actor.loss_agg_mode token-mean",
    ),
    (
        (
            *(*PERIODIC, "--actor.loss_agg_mode", "seq-mean-token-mean"),
            *("--algo.kl.use_loss", "--algo.kl.init_coef", "0.1"),
        ),
        "no single rescaling",
        "--actor.loss_agg_mode",
        "KL in the reward",
    ),
    (
        (*PERIODIC, "--rollout.vllm_generate_batch_size", "4"),
        "generates what it trains",
        "--rollout.vllm_generate_batch_size",
        "leave it out",
    ),
    # its own promise
    ((*PERIODIC, "--ds.grad_accum_dtype", "bf16"), "shorter type", "periodic", "--ds.grad_accum_dtype fp32"),
    ((*PERIODIC, "--ds.lora.rank", "8", "--ds.lora.dropout", "0.1"), "its masks", "periodic", "--ds.lora.dropout 0"),
    # attention
    ((*SHARED, "--ds.use_liger_kernel"), "Liger", "--ds.use_liger_kernel", "attention host"),
    ((*SHARED, "--ds.load_in_4bit"), "4-bit", "--ds.load_in_4bit", "attention host"),
    ((*SHARED, "--ds.deepcompile"), "DeepCompile", "--ds.deepcompile", "attention host"),
    ((*SHARED, "--train.dynamic_batch_enable"), "takes groups apart", "--train.dynamic_batch_enable", "attention host"),
    ((*SHARED, "--ds.ring_attn_size", "2"), "cut over ranks", "--ds.ring_attn_size", "--ds.ring_attn_size 1"),
    (
        (*SHARED, "--ds.tensor_parallel_size", "2"),
        "cut over ranks",
        "--ds.tensor_parallel_size",
        "--ds.tensor_parallel_size 1",
    ),
    (
        (*SHARED, "--ds.lora.rank", "8", "--ds.lora.dropout", "0.1"),
        "one mask for the prompt",
        "--ds.lora.dropout",
        "--ds.lora.dropout 0",
    ),
    ((*SHARED, "--actor.aux_loss_coef", "0.1"), "router", "--actor.aux_loss_coef", "--actor.aux_loss_coef 0"),
    ((*SHARED, "--data.max_images_per_prompt", "1"), "images", "--data.max_images_per_prompt", "per_prompt 0"),
    ((*SHARED, "--train.micro_batch_size", "1"), "shares no prompt", "--train.micro_batch_size", "holds a group"),
    # groups
    (
        (*SAGC, "--train.async_enable", "--rollout.vllm_generate_batch_size", "16", *BOUNDED),
        "oversampled groups",
        "--rollout.vllm_generate_batch_size",
        "leave it out",
    ),
    ((*SAGC, *BOUNDED), "one G a batch", "--metronome.group_controller", "periodic or synchronous"),
    (
        (*SAGC, "--algo.advantage.estimator", "reinforce"),
        "doesn't look at single groups",
        "--algo.advantage.estimator",
        "group_norm | dr_grpo | rloo",
    ),
    ((*SAGC, "--train.dynamic_batch_enable"), "dynamic batches", "--train.dynamic_batch_enable", "out"),
    (
        (*SAGC, "--reward.remote_url", "", "--reward.model_name_or_path", "m"),
        "a reward model's",
        "--reward",
        "remote_url",
    ),
    (
        (*SAGC, "--train.batch_size", "24"),
        "half-filled accumulation window",
        "--train.batch_size",
        "--train.batch_size 32",
    ),
    (
        ("--metronome.group_controller", "sagc", "--metronome.sagc.sizes", "[3,4]", "--rollout.micro_batch_size", "16"),
        "half-filled accumulation window",
        "--rollout.batch_size",
        "--rollout.batch_size larger",
    ),
    # the CPU room
    (("--metronome.cpu=5",), "takes no value", "--metronome.cpu", "--metronome.cpu alone"),
    *(
        (("--metronome.cpu", f"--{flag}"), why, f"--{flag}", f"leave --{flag} out")
        for flag, why in (
            ("ds.packing_samples", "need flash-attn"),
            ("train.dynamic_batch_enable", "need"),
            ("train.colocate_all", "CUDA's memory"),
            ("vllm.sync_with_ray", "collectives"),
            ("train.enable_ema", "CUDA device"),
            ("ds.adam_offload", "compiles an optimiser"),
            ("ds.deepcompile", "for CUDA"),
            ("ds.load_in_4bit", "kernels need CUDA"),
            ("ds.use_liger_kernel", "kernels need CUDA"),
        )
    ),
    *(
        (("--metronome.cpu", f"--{flag}", value), why, f"--{flag}", remedy)
        for flag, value, why, remedy in (
            ("ds.ring_attn_size", "2", "one device holds a model", "--ds.ring_attn_size 1"),
            ("ds.tensor_parallel_size", "2", "one device holds a model", "--ds.tensor_parallel_size 1"),
            ("vllm.tensor_parallel_size", "2", "one device holds a model", "--vllm.tensor_parallel_size 1"),
            ("actor.optim", "muon", "torch's AdamW", "--actor.optim adam"),
            ("critic.optim", "muon", "torch's AdamW", "--critic.optim adam"),
            ("ds.param_dtype", "fp16", "bfloat16", "--ds.param_dtype bf16"),
        )
    ),
    # OpenRLHF's own
    (("--train.batch_sise", "8"), "unrecognized arguments: --train.batch_sise 8", "recipe: args", "--train.batch_size"),
    (("--train.batch_size", "eight"), "invalid int value: 'eight'", "recipe: args", "the value that this flag takes"),
    (("--rollout.n_samples_per_prompt", "1"), "group_norm requires n_samples_per_prompt > 1", "recipe: args", "flag"),
    (("--train.partial_rollout_enable",), "requires --train.async_enable", "recipe: args", "flag"),
]


@pytest.mark.parametrize(("flags", "what", "where", "remedy"), REFUSED)
def test_what_can_t_be_true_together_is_refused_with_the_flag_that_mends_it(flags, what, where, remedy):
    with pytest.raises(ConfigurationError) as refused:
        check(*flags)
    error = refused.value
    assert what in error.what
    assert where in error.where
    assert remedy in error.remedy
    assert error.remedy
    assert error.exit_code == 2
    assert "\n" not in str(error)


def test_every_refusal_is_one_of_those_above(monkeypatch):
    met = set()

    def watched(module, original):
        def refuse(condition, *others):
            if condition:
                met.add((module.__name__, sys._getframe(1).f_lineno))
            original(condition, *others)

        return refuse

    written = set()
    for module in (config, groups, queueing, sharing, streaming, cpu_arguments):
        monkeypatch.setattr(module, "refuse", watched(module, module.refuse))
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "refuse":
                written.add((module.__name__, node.lineno))
    for flags, *_ in REFUSED:
        with pytest.raises(ConfigurationError):
            check(*flags)
    assert written - met == set()


def test_without_a_flag_of_ours_nothing_is_set_nor_said():
    args, notes = check()
    assert notes == []
    assert not hasattr(args, "metronome")


@pytest.mark.parametrize(
    ("flags", "lines"),
    [
        (PERIODIC, ["--ds.grad_accum_dtype fp32"]),
        ((*PERIODIC, "--train.batch_size", "16"), ["--ds.grad_accum_dtype fp32", "--train.batch_size 32"]),
        (
            ("--metronome.cpu",),
            ["--ds.attn_implementation sdpa", "--vllm.enforce_eager True", "--vllm.sync_backend gloo"],
        ),
        (A3PO, ["--metronome.a3po.clip_low 0.2 ", "--algo.advantage.is_correction_level token"]),
        (
            ("--metronome.group_controller", "fixed", "--metronome.fixed.size", "8"),
            ["--rollout.n_samples_per_prompt 8"],
        ),
        (SAGC, []),
        (BOUNDED, ["--train.async_enable True", "--train.async_queue_size 2"]),
        ((*BOUNDED, "--train.async_queue_size", "4"), ["--train.async_enable True"]),
        (
            (*BOUNDED, "--metronome.in_flight", "resume"),
            ["--train.async_enable", "--train.partial_rollout_enable True"],
        ),
        ((*SHARED, "--train.micro_batch_size", "2"), ["isn't a multiple of G = 4", "attention is metronome's"]),
        ((*PERIODIC, *A3PO, *SAGC), ["active: rollout_source periodic, loss a3po, group_controller sagc"]),
        (("--metronome.cpu", *SHARED), ["active: attention shared_prompt"]),
        (SHARED, ["active: attention shared_prompt"]),
        ((*PERIODIC, *A3PO), ["staleness is 0 here, so that a3po is PPO"]),
        (
            (*A3PO, "--algo.kl.init_coef", "0.1"),
            [
                "forward pass of the actor gives old log-probs, since a KL",
                "--algo.kl.use_loss or --algo.kl.init_coef 0 leaves",
            ],
        ),
        ((*A3PO, "--metronome.a3po.proximal", "recompute"), ["forward pass of the actor gives old log-probs: "]),
    ],
)
def test_each_setting_that_a_mode_makes_is_printed(flags, lines):
    before, _ = check(*_theirs(flags))
    args, notes = check(*flags)
    for line in lines:
        assert [note for note in notes if line in note], notes
    assert [place for place, note in enumerate(notes) if note.startswith("active: ")] in ([], [0])
    # the other way round: what is other than without our flags stands in a line
    changed = {name for name, value in _flat(args) if dict(_flat(before)).get(name) != value}
    for name in changed:
        assert [note for note in notes if f"--{name} " in note], (name, notes)


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        ((*BOUNDED, *A3PO), "staleness is 0 here"),
        ((*A3PO, "--metronome.a3po.proximal", "recompute"), "staleness is 0 here"),
        ((*A3PO, "--metronome.a3po.fresh", "target"), "staleness is 0 here"),
        (("--metronome.loss", "ppo"), "staleness is 0 here"),
        (A3PO, "forward pass"),
        ((*A3PO, "--algo.kl.init_coef", "0.1", "--algo.kl.use_loss"), "forward pass"),
        (("--metronome.cpu",), "active"),
    ],
)
def test_what_isn_t_so_is_not_said(flags, word):
    _, notes = check(*flags)
    assert not [note for note in notes if word in note]


def _theirs(flags):
    return take(list(flags))[1]


def _flat(args, way=""):
    for name, value in vars(args).items():
        if name == "metronome":
            continue
        if hasattr(value, "__dict__"):
            yield from _flat(value, f"{way}{name}.")
        elif f"{way}{name}" != "logger.wandb.run_name":
            yield f"{way}{name}", value


def test_our_losses_take_openrlhf_s_clip_unless_they_have_their_own():
    def clips(*flags, loss="a3po"):
        args, _ = check("--metronome.loss", loss, *flags)
        block = args.metronome["block"][loss]
        return block["clip_low"], block["clip_high"], block.get("dual_clip")

    assert clips() == (0.2, 0.2, None)  # eps_clip_low_high has no default until OpenRLHF's main sets it
    assert clips("--actor.eps_clip", "0.3") == (0.3, 0.3, None)
    assert clips("--actor.eps_clip_low_high", "0.2", "0.28", "--actor.dual_clip", "10") == (0.2, 0.28, 10.0)
    assert clips("--actor.eps_clip", "0.3", "--metronome.a3po.clip_high", "0.6") == (0.3, 0.6, None)
    assert clips("--actor.eps_clip", "0.3", loss="ppo") == (0.3, 0.3, None)


def test_openrlhf_s_loss_stays_without_ours():
    args, _ = check(*PERIODIC)
    assert args.algo.advantage.is_correction_level == "off"
    args, _ = check(*PERIODIC, "--algo.advantage.is_correction_level", "token")
    assert not config.part_of(args).own_loss


def test_what_a_process_reads_is_what_was_arranged():
    args, _ = check(*BOUNDED, *A3PO, "--metronome.in_flight", "abort", "--metronome.bounded.max_staleness", "2")
    part = config.part_of(args)
    assert (part.mode, part.in_flight, part.own_loss, part.owns_groups) == ("bounded", "abort", True, False)
    assert (part.settings.loss, part.settings.options_of("bounded")) == ("a3po", {"max_staleness": 2})
    assert not part.shares_prompt
    args, _ = check(*SHARED)
    assert config.part_of(args).shares_prompt
    assert not config.part_of(args).own_loss


def test_a_process_without_a_gpu_reads_its_part_too():
    """OpenRLHF's trainer process has none, nor need the launcher's."""
    args, _ = check(*PERIODIC)
    args.metronome["device"] = "cuda"
    assert config.part_of(args).device == "cuda"


def test_a_class_of_ours_without_settings_names_the_launcher():
    args, _ = check()
    with pytest.raises(ConfigurationError, match="python -m metronome_openrlhf"):
        config.part_of(args)


def test_the_cpu_room_is_chosen_by_its_flag_alone():
    assert check(*PERIODIC, "--metronome.cpu")[0].metronome["device"] == "cpu"
    assert check(*PERIODIC)[0].metronome["device"] in ("cuda", "npu")


def test_another_main_of_openrlhf_s_is_refused(tmp_path):
    """Without its parser where it was, nothing was validated."""
    (tmp_path / "cli").mkdir()
    main = tmp_path / "cli" / "train_ppo_ray.py"
    for text in ("x = 1\n", "if __name__ == '__main__':\n    train(1)\n", "not python"):
        main.write_text(text)
        with pytest.raises(ConfigurationError, match=r"main isn't the one.*pip install 'openrlhf"):
            command.validate(PLAIN, Path(tmp_path), "recipe")
    original = (FOLDER / "cli" / "train_ppo_ray.py").read_text()
    (tmp_path / "utils").mkdir()
    (tmp_path / "utils" / "config.py").write_text((FOLDER / "utils" / "config.py").read_text())
    main.write_text(original)
    assert command.validate(PLAIN, tmp_path, "recipe") == []
    main.write_text(original.replace("    train(args)\n", "    pass\n"))
    with pytest.raises(ConfigurationError, match="main isn't the one"):
        command.validate(PLAIN, tmp_path, "recipe")


def test_a_flag_must_be_written_out():
    """OpenRLHF's parser would take a part of a name, until the next release has two that begin so."""
    with pytest.raises(ConfigurationError, match=r"--actor\.eps_clip_low "):
        check("--actor.eps_clip_low", "0.2", "0.3")


ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs" / "openrlhf.md"


def test_the_docs_name_every_refused_flag_and_every_flag_of_ours():
    text = DOCS.read_text(encoding="utf-8")
    named = {where for _, _, where, _ in REFUSED if where.startswith("--") and not where.startswith("--metronome")}
    assert {flag for flag in named - {"--reward"} if f"{flag}" not in text} == set()
    ours = {word for word in HELP.split() if word.startswith("--metronome.")}
    assert {flag for flag in ours if flag not in text} == set()


def test_the_docs_name_every_metric_and_no_other():
    text = DOCS.read_text(encoding="utf-8")
    source = "".join(path.read_text(encoding="utf-8") for path in ROOT.glob("adapters/metronome_openrlhf/*.py"))
    emitted = set(re.findall(r"[\"'](metronome/[a-z_]+/?[a-z_]*)[\"']", source))
    named = set(re.findall(r"`(metronome/[a-z_/]+)`", text))
    assert emitted
    assert emitted - named == set()
    built = {"attention/calls", "attention/tokens_fed", "attention/tokens_separate"}  # names put together
    built |= {f"loss/{name}" for name in LOSS_METRICS}
    assert named - emitted == {f"metronome/{name}" for name in built}
