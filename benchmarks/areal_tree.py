"""AReaL's FSDP engine in one process: shared prompts against its tree training and its packed rows, the same work.

    python benchmarks/areal_tree.py --out areal_tree.json

Each way has a process of its own, so that its peak memory is its own, and ways take turns. Tree training's kernel is
FlexAttention, which has no backward pass on a CPU; here its mask is handed to sdpa as a dense tensor, which is the
same arithmetic over all pairs of tokens. Packed rows are kept apart by metronome's mend, without which AReaL's are
another computation. The model is a random Qwen2 of SmolLM2-135M's widths, in float32; the update is AReaL's own with
its GRPO loss and a learning rate of 0, so that every repeat is the same. ``max_tokens_per_mb`` is the least multiple
of 128 (tree training's block) that holds one group; tree training pads to it, and fills it with rows of the next
group. A group of exactly a multiple of 128 tokens, as the default, is its best case. AReaL rounds packed rows up to
pages of 256 tokens, which ``tokens`` against ``tokens_fed`` shows.

Seconds are of the process, over its threads: on a shared machine the clock's differ twofold. AReaL's log-probs are
compiled, its default, which the CPU room turns off (``TORCHDYNAMO_DISABLE``) and ours don't need. Tree training and
shared prompts are fed the same tokens; what they differ by is mostly the head, which shared prompts compute for the
rows that predict a response token only. ``--vocabulary 512`` makes the head small and leaves attention.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

WAYS = ("packed", "tree", "shared")
COMPILED = {"TORCHDYNAMO_DISABLE": "0"}  # what AReaL compiles by default, the CPU room leaves uncompiled


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="512,8,64", help="prompt,responses,response length")
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--repeats", type=int, default=3, help="of each process, after one that isn't counted")
    parser.add_argument("--rounds", type=int, default=2, help="processes a way, in turns")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    shape = tuple(map(int, arguments.shape.split(",")))
    if arguments.way:
        import torch

        torch.set_num_threads(arguments.threads)
        found, tensors = run(arguments.way, arguments.folder, shape, arguments.groups, arguments.repeats)
        torch.save(tensors, arguments.folder / f"{arguments.way}.pt")
        (arguments.folder / f"{arguments.way}.json").write_text(json.dumps(found))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), arguments.layers, vocabulary=arguments.vocabulary)
        rounds = []
        for number in range(arguments.rounds):
            order = WAYS[number % 3 :] + WAYS[: number % 3]
            rounds.append({way: _process(way, Path(folder)) for way in order})
        result = {
            "command": "python benchmarks/areal_tree.py " + " ".join(sys.argv[1:]),
            "machine": {"cores": os.cpu_count(), "processor": platform.processor() or platform.machine()},
            "model": {
                "shape": "SmolLM2-135M's widths",
                "layers": arguments.layers,
                "vocabulary": arguments.vocabulary,
                "dtype": "float32",
            },
            "areal_compiles": COMPILED["TORCHDYNAMO_DISABLE"] == "0",
            "shape": list(shape),
            "groups": arguments.groups,
            "threads": arguments.threads,
            "clock": "seconds of the process over its threads, medians over all repeats",
            "load_average": os.getloadavg()[0],
            "ways": {way: merged([one[way] for one in rounds]) for way in WAYS},
            "largest_differences": differences({way: _load(Path(folder) / f"{way}.pt") for way in WAYS}),
        }
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")
    return 0


def _process(way: str, folder: Path) -> dict[str, Any]:
    command = [sys.executable, __file__, *sys.argv[1:], "--way", way, "--folder", str(folder)]
    done = subprocess.run(command, env={**os.environ, **COMPILED}, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{way} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    found: dict[str, Any] = json.loads((folder / f"{way}.json").read_text())
    return found


def _load(path: Path) -> Any:
    import torch

    return torch.load(path)


def merged(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The processes of one way: medians of seconds, the largest peak of memory; token counts are the same."""
    seconds = {name: statistics.median([one for run in runs for one in run[name]]) for name in ("update", "log_probs")}
    peak = max(run["peak_mib_above_the_model"] for run in runs)
    counts = {name: runs[0][name] for name in ("micro_batches", "tokens", "tokens_fed", "same_work")}
    return {**counts, "seconds": seconds, "peak_mib_above_the_model": peak}


def differences(found: dict[str, Any]) -> dict[str, Any]:
    """Of every way from packed rows: of log-probs in nats, of the gradient relative to its norm."""
    base = found["packed"]
    return {
        way: {
            "log_probs": float((found[way]["log_probs"] - base["log_probs"]).abs().max()),
            "gradient": float((found[way]["gradient"] - base["gradient"]).norm() / base["gradient"].norm()),
        }
        for way in WAYS
        if way != "packed"
    }


def save_model(folder: Path, layers: int = 12, hidden: int = 576, vocabulary: int = 49152) -> Path:
    """A random Qwen2 with a tokenizer in ``folder / "model"``."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from metronome_areal.cpu import assets

    made = assets.make(folder)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64 or 1,
        num_key_value_heads=max(1, hidden // 192),
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).save_pretrained(made.model)
    return Path(made.model)


def run(way: str, folder: Path, shape: tuple[int, ...], groups: int, repeats: int) -> tuple[dict[str, Any], Any]:
    """One way in this process: what it was fed, seconds, memory; its log-probs of trained tokens, its gradient."""
    import torch

    engine = _engine(way, folder, shape)
    try:
        batch = _batch(shape, groups, engine.model_config.vocab_size)
        before = _peak()
        seconds: dict[str, list[float]] = {"log_probs": [], "update": []}
        for repeat in range(repeats + 1):
            start = time.process_time()
            log_probs = engine.compute_logp([dict(one) for one in batch])
            middle = time.process_time()
            ready = engine.compute_advantages([_copied(one) for one in batch])
            started = time.process_time()
            engine.actor.ppo_update(ready)
            if repeat:
                seconds["log_probs"].append(middle - start)
                seconds["update"].append(time.process_time() - started)
        peak = _peak() - before
        from areal.utils.data import concat_batch

        mb_list = engine._prepare_mb_list(concat_batch(batch)[0])
        fed = sum(mb_list.padded_to_lengths)
        real = fed if way == "shared" else fed - sum(mb_list.padding_lengths)
        gradient = torch.cat([one.grad.full_tensor().flatten() for one in engine.model.parameters()])
        trained = [
            one[:, : mask.shape[1] - 1][mask[:, 1:].bool()]
            for one, mask in zip(log_probs, (group["loss_mask"] for group in batch), strict=True)
        ]
    finally:
        engine.destroy()
    found = {
        **seconds,
        "micro_batches": len(mb_list),
        "tokens": real,
        "tokens_fed": fed,
        "same_work": {"groups": groups, "rows": groups * shape[1], "trained_tokens": groups * shape[1] * shape[2]},
        "peak_mib_above_the_model": round(peak / 1024),
    }
    return found, {"log_probs": torch.cat(trained), "gradient": gradient}


def _engine(way: str, folder: Path, shape: tuple[int, ...]) -> Any:
    from metronome_areal.cpu import prepare

    prepare()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ["MASTER_PORT"] = str(free.getsockname()[1])
    import areal.engine.fsdp_engine as host
    from areal.api import FinetuneSpec
    from areal.api.cli_args import MicroBatchSpec, NormConfig, OptimizerConfig, PPOActorConfig
    from areal.engine import FSDPPPOActor

    from metronome.shared_prompt.select import SharedPromptAttention
    from metronome_areal.packing import RowsApart
    from metronome_areal.shared import SharedPromptActor

    class Packed(RowsApart, FSDPPPOActor):
        pass

    class Shared(SharedPromptActor):
        part = SimpleNamespace(shares_prompt=True, selection=SimpleNamespace(attention=SharedPromptAttention()))

    if way == "tree":
        host.build_tree_attn_kwargs = dense_mask
    prompt, count, length = shape
    group = prompt + count * length
    config = PPOActorConfig(
        experiment_name="tree",
        trial_name=way,
        path=str(folder / "model"),
        backend="fsdp:d1",
        attn_impl="sdpa",
        dtype="float32",
        mb_spec=MicroBatchSpec(max_tokens_per_mb=-(-group // 128) * 128),
        pad_to_maximum=way == "tree",
        enable_tree_training=way == "tree",
        optimizer=OptimizerConfig(type="sgd", lr=0.0, weight_decay=0.0, gradient_clipping=1e9),
        kl_ctl=0.0,
        ppo_n_minibatches=1,
        use_decoupled_loss=True,
        prox_logp_method="loglinear",
        adv_norm=NormConfig(mean_level="group", std_level="group", group_size=count),
    )
    engine = {"packed": Packed, "tree": FSDPPPOActor, "shared": Shared}[way](config)
    engine.create_process_group()
    engine.initialize(None, FinetuneSpec(1, 64, 4))
    engine.set_version(1)
    return engine


def dense_mask(trie: Any, padded_size: int, device: Any, **_: Any) -> dict[str, Any]:
    """In the place of AReaL's ``build_tree_attn_kwargs``: who is whose ancestor, as sdpa's mask."""
    import torch
    from areal.models.tree_attn.tree import build_attention_mask_from_trie

    mask = build_attention_mask_from_trie(trie, padded_size, device)
    mask |= torch.eye(padded_size, dtype=torch.bool, device=device)  # padding sees itself, or its softmax is empty
    return {"attention_mask": {"full_attention": mask[None, None], "sliding_attention": None}}


def _batch(shape: tuple[int, ...], groups: int, vocabulary: int) -> list[dict[str, Any]]:
    import torch

    prompt, count, length = shape
    draw = torch.Generator().manual_seed(0)
    found = []
    for _ in range(groups):
        shared = torch.randint(2, vocabulary, (1, prompt), generator=draw).expand(count, -1)
        ids = torch.cat([shared, torch.randint(2, vocabulary, (count, length), generator=draw)], 1)
        mask = (torch.arange(prompt + length)[None] >= prompt).expand(count, -1).int()
        found.append(
            {
                "input_ids": ids,
                "attention_mask": torch.ones(ids.shape, dtype=torch.bool),
                "loss_mask": mask.clone(),
                "logprobs": -10.0 * torch.rand(ids.shape, generator=draw) * mask,
                "versions": torch.where(mask.bool(), 0, -1).int(),
                "rewards": torch.rand(count, generator=draw),
            }
        )
    return found


def _copied(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value.clone() for name, value in group.items()}


def _peak() -> int:
    """KiB, as Linux counts."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    sys.exit(main())
