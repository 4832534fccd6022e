"""Ray for the CPU room: pretended GPUs, and every worker attaches the room before anything else."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from metronome.errors import ConfigurationError, WaitTimeout

from . import HOOK, VARIABLES

PRETENDED = 16
"""GPUs and CPUs that Ray is told of: OpenRLHF asks for one of each a process. Nothing is reserved by it."""

_TRIES = 3
_OBJECTS = 400 * 2**20  # bytes of shared memory for batches

# Read when Ray's own processes start. Its limits are made for servers, and it would start a worker a CPU at once.
_RAY = {
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_worker_register_timeout_seconds": "300",
    "RAY_raylet_start_wait_time_s": "300",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Without it Ray hides the pretended GPUs from processes that ask for none, and says so each time.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


def start(variables: Mapping[str, str]) -> None:
    """Starts Ray on this machine, or joins that of ``RAY_ADDRESS`` (which must know enough GPUs, pretended or not).

    Raises:
        WaitTimeout: Ray didn't start in three attempts.
        ConfigurationError: the job has a set-up hook of its own.
    """
    environment = {**VARIABLES, **{name: os.environ[name] for name in VARIABLES if name in os.environ}, **variables}
    runtime: dict[str, object] = {"env_vars": environment, "worker_process_setup_hook": HOOK}
    address = os.environ.get("RAY_ADDRESS")
    if address:
        _join(address, runtime)
        return
    for name, value in _RAY.items():
        os.environ.setdefault(name, value)
    import ray

    for left in reversed(range(_TRIES)):
        try:
            ray.init(
                address="local",
                num_cpus=PRETENDED,
                num_gpus=PRETENDED,
                include_dashboard=False,
                object_store_memory=_OBJECTS,
                runtime_env=runtime,
            )
            return
        except Exception as error:  # Ray raises plain Exception when a node is slow to start
            ray.shutdown()
            if not left:
                raise WaitTimeout(
                    f"Ray didn't start in {_TRIES} attempts",
                    found=str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__,
                    where="ray.init",
                    remedy="try again when the machine is less busy, or ray start --head and set RAY_ADDRESS",
                ) from error
            time.sleep(5)


def _join(address: str, runtime: dict[str, object]) -> None:
    import ray

    try:
        ray.init(address=address, runtime_env=runtime)
    except (RuntimeError, ValueError) as error:
        if "worker_process_setup_hook" not in str(error):
            raise
        raise ConfigurationError(
            "this job has a set-up hook of its own for Ray's workers, and Ray takes one",
            found=str(error).strip().splitlines()[0],
            where="worker_process_setup_hook of the job's runtime_env",
            remedy=f"leave it out of the job, or let it call {HOOK}",
        ) from error
