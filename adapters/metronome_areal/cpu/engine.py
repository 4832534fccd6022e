"""AReaL's inference engine in the trainer's process: what goes over HTTP elsewhere is a call here."""

from __future__ import annotations

import asyncio
import hashlib
import time
import uuid
from collections import Counter
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from areal.api import ModelRequest, ModelResponse
from areal.infra.remote_inf_engine import RemoteInfEngine
from areal.infra.workflow_executor import WorkflowExecutor
from areal.utils import logging, perf_tracer, stats_tracker

from metronome.decoding.batch import Row
from metronome.decoding.sampling import Sampling
from metronome.errors import ConfigurationError
from metronome_areal.cpu.arguments import ROOM, unread
from metronome_areal.cpu.generator import Generator
from metronome_areal.cpu.weights import gathered

_LOOK = 0.01


def make(trainer: Any, rollout_config: Any, is_eval: bool) -> RoomEngine:
    """The engine of a trainer whose actor is initialised, with the actor's weights; the evaluation's shares its model.

    Args:
        trainer: AReaL's ``PPOTrainer``, as ``_init_rollout`` sees it.
        rollout_config: AReaL's InferenceEngineConfig.
        is_eval: whether it is the evaluation's.
    """
    config = deepcopy(rollout_config)
    if is_eval:
        config.max_head_offpolicyness = int(1e12)  # as AReaL has it
    generator = trainer.rollout.generator if is_eval else _generator(trainer.actor)
    engine = RoomEngine(config, generator, int(trainer.config.seed), evaluation=is_eval)
    engine.initialize(train_data_parallel_size=trainer.actor_alloc.parallel.dp_size)
    return engine


class RoomEngine(RemoteInfEngine):
    """AReaL's ``RemoteInfEngine`` over a model in this process.

    Submission, waiting and workflows are AReaL's. A pause ends the requests under way with the tokens so far; after
    the next version has come they go on from there, so that a response may carry several versions.

    A request's random numbers depend on the seed, its prompt, the version and how often the version saw that prompt,
    not on timing, neighbours or rank.

    Args:
        config: AReaL's InferenceEngineConfig.
        generator: holds the model; shared by the engines of a process.
        seed: of the run.
        evaluation: whether it is the evaluation's; it draws other random numbers, and leaves the generator running.
    """

    def __init__(self, config: Any, generator: Generator, seed: int, evaluation: bool = False) -> None:
        super().__init__(config, backend=None)
        self.generator, self._seed, self._evaluation = generator, seed, evaluation
        self._seen: Counter[tuple[int, str]] = Counter()

    def initialize(
        self, engine_id: str | None = None, addr: Any = None, train_data_parallel_size: int | None = None
    ) -> None:
        """AReaL's, without a server to find."""
        self.engine_id = engine_id or (str(dist.get_rank()) if dist.is_initialized() else uuid.uuid4().hex)
        self.logger = logging.getLogger(f"[RoomEngine Rank {self.engine_id}]")
        self.workflow_executor = WorkflowExecutor(config=self.config, inference_engine=self)
        self.workflow_executor.initialize(logger=self.logger, train_data_parallel_size=train_data_parallel_size)
        self._initialized = True

    def destroy(self) -> None:
        """AReaL's; the generator ends with the training's engine."""
        super().destroy()
        if not self._evaluation:
            self.generator.stop()

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        """AReaL's: a response to one request, over as many pauses as come.

        Raises ConfigurationError for a request that the room doesn't honour.
        """
        row = self._row(req)
        start = time.perf_counter()
        while not row.finished:
            while self.workflow_executor.is_paused():
                await asyncio.sleep(_LOOK)
            await self.generator.run(row)
        latency = time.perf_counter() - start
        return ModelResponse(
            input_tokens=list(row.prompt),
            output_tokens=row.tokens,
            output_logprobs=row.log_probs,
            output_versions=row.versions,
            stop_reason="stop" if row.tokens[-1] in row.sampling.stop else "length",
            latency=latency,
            ttft=latency,
            tokenizer=req.tokenizer,
            processor=req.processor,
        )

    def pause_generation(self) -> None:
        """Ends the pass of every running request, the evaluation's too."""
        self.generator.pause()

    def continue_generation(self) -> None:
        """Lets requests go on."""
        self.generator.resume()

    def set_version(self, version: int) -> None:
        """AReaL's; tokens to come carry it."""
        super().set_version(version)
        self.generator.set_version(version)

    def take_weights(self, actor: Any, version: int | None) -> None:
        """Publication within the process: pause, copy, go on. Every rank calls with its own engine.

        Args:
            actor: AReaL's FSDP engine.
            version: of its weights; None if that is told later.
        """
        self.pause_generation()
        try:
            self.generator.replace(gathered(actor), version)
        finally:
            self.continue_generation()

    def export_stats(self) -> dict[str, float]:
        """AReaL's statistics of this process's workflows."""
        found: dict[str, float] = stats_tracker.export_all(reduce_group=None)
        return found

    def save_perf_tracer(self, step: int | None = None, force: bool = False) -> None:
        """AReaL's."""
        perf_tracer.save(step=step, force=force)

    def config_perf_tracer(self, config: Any, rank: int, role: str) -> None:
        """AReaL's: configured once a process."""
        if not perf_tracer.is_configured():
            perf_tracer.configure(config, rank=rank, role=role)

    def _row(self, req: ModelRequest) -> Row:
        gconfig, prompt = req.gconfig, [int(token) for token in req.input_ids]
        others: dict[str, Any] = unread(gconfig)
        if gconfig.n_samples != 1:
            others["n_samples"] = gconfig.n_samples
        if req.image_data:
            others["image_data"] = f"{len(req.image_data)} images"
        if others:
            raise ConfigurationError(
                f"this isn't generated {ROOM}", found=others, where="a ModelRequest", remedy="leave it out"
            )
        room = min(gconfig.max_tokens, self.generator.context) - len(prompt)
        limit = min(room, gconfig.max_new_tokens)
        if not prompt or limit < 1:
            raise ConfigurationError(
                "a prompt without tokens" if not prompt else "the request has no room for a token",
                found=f"{len(prompt)} tokens, max_tokens={gconfig.max_tokens}, max_new_tokens={gconfig.max_new_tokens}",
                where=f"a ModelRequest; the model's context is {self.generator.context}",
                remedy="a smaller train_dataset.max_length, or a larger gconfig.max_tokens",
            )
        ends = frozenset() if gconfig.ignore_eos else self.generator.ends
        sampling = Sampling(
            temperature=0.0 if gconfig.greedy else float(gconfig.temperature),
            top_k=int(gconfig.top_k),
            top_p=float(gconfig.top_p),
            max_tokens=limit,
            stop=ends | frozenset(gconfig.stop_token_ids or ()),
            min_tokens=int(gconfig.min_new_tokens),
        )
        return Row(req.rid, prompt, sampling, torch.Generator().manual_seed(self._drawn(prompt)))

    def _drawn(self, prompt: list[int]) -> int:
        version = self.get_version()
        key = (version, hashlib.blake2b(repr(prompt).encode(), digest_size=8).hexdigest())
        self._seen[key] += 1
        text = f"{self._seed} {self._evaluation} {key} {self._seen[key]}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")


def _generator(actor: Any) -> Generator:
    from transformers import AutoModelForCausalLM

    if actor.is_vision_model:
        raise ConfigurationError(
            f"only text is generated {ROOM}",
            found=actor.model_config.model_type,
            where="actor.path",
            remedy="a model without images",
        )
    config = deepcopy(actor.model_config)
    with torch.random.fork_rng():  # its first weights are thrown away, and shouldn't cost the run its random numbers
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa").eval()
    ends = _ends(actor.config.path, config)
    generator = Generator(model, ends, getattr(config, "max_position_embeddings", None) or 1 << 30)
    generator.replace(gathered(actor), None)
    return generator


def _ends(path: str, config: Any) -> frozenset[int]:
    from transformers import GenerationConfig

    try:
        ends = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:  # a folder without one
        ends = None
    ends = config.eos_token_id if ends is None else ends
    return frozenset([ends] if isinstance(ends, int) else ends or ())
