"""Megatron's settings are asked for before anything starts, on verl's composed configuration; no Megatron needed."""

import pytest

pytest.importorskip("verl", reason="the verl adapter's tests need verl (requirements/verl.txt)")

from test_config import POOL, arranged

from metronome.errors import ConfigurationError

PERIODIC = ["model_engine=megatron", "+metronome.rollout_source=periodic", *POOL]
BLOCK = "actor_rollout_ref.actor.megatron"


def test_periodic_takes_tensor_and_pipeline_parallel_megatron_as_verl_sets_it_up():
    config, found = arranged(
        *PERIODIC, f"{BLOCK}.tensor_model_parallel_size=2", f"{BLOCK}.pipeline_model_parallel_size=2"
    )
    assert found.mode == "periodic"
    assert config.actor_rollout_ref.actor.strategy == "megatron"


@pytest.mark.parametrize(
    ("setting", "remedy"),
    [
        ("param_offload=True", "param_offload=False"),
        ("context_parallel_size=2", "context_parallel_size=1"),
        ("virtual_pipeline_model_parallel_size=2", "virtual_pipeline_model_parallel_size=null"),
        ("dynamic_context_parallel=True", "dynamic_context_parallel=False"),
        ("use_megatron_fsdp=True", "use_megatron_fsdp=False"),
    ],
)
def test_settings_under_which_parts_do_not_add_up_are_refused_in_periodic_mode_only(setting, remedy):
    with pytest.raises(ConfigurationError, match=f"{BLOCK}.{remedy}"):
        arranged(*PERIODIC, f"++{BLOCK}.{setting}")
    for mode in ("synchronous", "bounded"):
        _, found = arranged(
            *PERIODIC, f"++{BLOCK}.{setting}", f"++metronome.rollout_source={mode}", "+metronome.loss=a3po"
        )
        assert found.mode == mode
