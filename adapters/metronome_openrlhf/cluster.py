"""Ray: started with what OpenRLHF's main would pass, and its nodes asked whether they have this package."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from metronome.errors import ConfigurationError, WaitTimeout

_SECONDS = 300.0


def start(device: str) -> None:
    """Connects to Ray, or starts it, unless this process is connected."""
    import ray

    if ray.is_initialized():
        return
    # As in openrlhf.cli.train_ppo_ray, which leaves a running Ray alone.
    variables = {
        "TOKENIZERS_PARALLELISM": os.environ.get("TOKENIZERS_PARALLELISM", "true"),
        "NCCL_DEBUG": os.environ.get("NCCL_DEBUG", "WARN"),
        "RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": os.environ.get("RAY_ENABLE_ZERO_COPY_TORCH_TENSORS", "1"),
    }
    if device == "cpu":
        from metronome_openrlhf.cpu import cluster as room

        room.start(variables)
    else:
        ray.init(runtime_env={"env_vars": variables})
        if not ray.cluster_resources().get("GPU"):
            print(
                "metronome: Ray knows no GPU, and OpenRLHF waits until one joins; --metronome.cpu runs without",
                flush=True,
            )


def check_nodes(seconds: float = _SECONDS) -> None:
    """Raises ConfigurationError naming each node that lacks this package or has another version of it."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    def installed_there() -> str:  # nested, so that it travels by value: the node may lack this package
        from importlib.metadata import PackageNotFoundError, version
        from importlib.util import find_spec

        try:
            return version("metronome-rl") if find_spec("metronome_openrlhf") else "not installed"
        except PackageNotFoundError:
            return "not installed"

    here = installed()
    ask = ray.remote(num_cpus=0, max_retries=0)(installed_there)
    nodes = [node for node in ray.nodes() if node["Alive"]]
    asked = {
        ask.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)).remote(): node[
            "NodeManagerHostname"
        ]
        for node in nodes
    }
    ready, late = ray.wait(list(asked), num_returns=len(asked), timeout=seconds)
    if late:
        raise WaitTimeout(
            f"nodes of the cluster didn't answer within {seconds:.0f} s",
            found=", ".join(asked[one] for one in late),
            where="ray.nodes()",
            remedy="look at the nodes' Ray logs",
        )
    wrong = {asked[one]: found for one in ready if (found := _answer(one)) != here}
    if wrong:
        raise ConfigurationError(
            f"nodes of the cluster have another metronome-rl than the launcher's {here}",
            found=", ".join(f"{node}: {found}" for node, found in wrong.items()),
            where="ray.nodes()",
            remedy=f"pip install metronome-rl=={here} on every node, or name it in the job's runtime_env",
        )


def _answer(asked: Any) -> str:
    import ray

    try:
        return str(ray.get(asked))
    except (ray.exceptions.WorkerCrashedError, ray.exceptions.RuntimeEnvSetupError):
        # In the CPU room a worker imports this package before anything else.
        return "no worker starts there; its log says why, most often that the package is missing"


def installed() -> str:
    """The version of metronome-rl here, or ``not installed``."""
    try:
        return version("metronome-rl")
    except PackageNotFoundError:
        return "not installed"
