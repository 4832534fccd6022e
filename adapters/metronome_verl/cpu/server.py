"""The rollout server of the CPU room: a transformers model behind the methods that verl calls on a server.

One decode loop serves every request in flight, a token each per step. Whatever changes what it computes (weights,
an abort) takes its turn between two steps.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from verl.workers.rollout.replica import TokenOutput

from metronome.decoding.batch import DecodeBatch, Row
from metronome.decoding.weights import replace_weights
from metronome.errors import ConfigurationError, WorkerFailed, nearest

from . import ROLLOUT
from .sampling import LOG_PROBS_MODES, parse

_WHERE = f"rollout.name={ROLLOUT}"


def check(config: Any) -> None:
    """Raises ConfigurationError for settings of verl's RolloutConfig that this server doesn't honour."""
    parallel = {
        name: getattr(config, name)
        for name in ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size")
        if getattr(config, name) != 1
    }
    if parallel:
        raise ConfigurationError(
            f"a {ROLLOUT} server is one process",
            found=parallel,
            where=_WHERE,
            remedy=" ".join(f"actor_rollout_ref.rollout.{name}=1" for name in parallel),
        )
    for name in ("quantization", "enable_rollout_routing_replay"):
        if getattr(config, name):
            raise ConfigurationError(
                f"{ROLLOUT} doesn't offer rollout.{name}",
                found=getattr(config, name),
                where=_WHERE,
                remedy=f"leave actor_rollout_ref.rollout.{name} out",
            )
    if config.logprobs_mode not in LOG_PROBS_MODES:
        raise ConfigurationError(
            f"{ROLLOUT} doesn't know this kind of log-probs",
            found=config.logprobs_mode,
            where="rollout.logprobs_mode",
            remedy=nearest(str(config.logprobs_mode), LOG_PROBS_MODES),
        )
    seconds_per_token(config)


def seconds_per_token(config: Any) -> float:
    """``rollout.engine_kwargs.metronome_hf.seconds_per_token``: the least time of a decode step, 0 by default."""
    where = f"rollout.engine_kwargs.{ROLLOUT}"
    options = dict((config.engine_kwargs or {}).get(ROLLOUT) or {})
    seconds = options.pop("seconds_per_token", 0.0)
    for name in options:
        raise ConfigurationError(
            "an unknown option", found=name, where=where, remedy=nearest(name, ["seconds_per_token"])
        )
    if not isinstance(seconds, int | float) or isinstance(seconds, bool) or seconds < 0:
        raise ConfigurationError(
            "seconds_per_token isn't a time", found=seconds, where=where, remedy="seconds, 0 or more"
        )
    return float(seconds)


class HFServer:
    """A transformers model that continues token ids, with log-probs and the version of its weights.

    Sampling is reproducible: a request's random numbers depend on ``rollout.seed``, the replica, its prompt and how
    often that prompt came before, not on timing or neighbours. Weights are float32 whatever ``rollout.dtype`` says.
    """

    def __init__(self, config: Any, model_config: Any, replica_rank: int = 0) -> None:
        check(config)
        self._config, self._rank = config, replica_rank
        self._least_seconds = seconds_per_token(config)
        self._model = _load(model_config)
        ends = self._model.generation_config.eos_token_id
        ends = self._model.config.eos_token_id if ends is None else ends
        self._ends = frozenset([ends] if isinstance(ends, int) else ends or ())
        self._context = config.max_model_len or getattr(self._model.config, "max_position_embeddings", None) or 1 << 30
        self._batch = DecodeBatch(self._model, config.logprobs_mode == "processed_logprobs")
        self._waiting: deque[Row] = deque()
        self._seen: Counter[bytes] = Counter()
        self._version: int | None = None
        self._between_steps = asyncio.Lock()
        self._open = asyncio.Event()
        self._open.set()
        self._rejecting = False
        self._loop: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=ROLLOUT)

    async def ready(self) -> bool:
        """True: the model is loaded."""
        return True

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        request_id: str,
        image_data: Any = None,
        video_data: Any = None,
        **others: Any,
    ) -> TokenOutput:
        """Continues ``prompt_ids``; ends with stop_reason ``completed``, or ``aborted`` with the tokens so far.

        ``extra_fields`` holds ``global_steps`` (the version that sampled the last token), ``min_global_steps`` and
        ``max_global_steps``. While the server is aborted, a request waits for resume_generation.

        Raises:
            ConfigurationError: images, video, a sampling parameter that isn't honoured, or a prompt without room.
            WorkerFailed: the model raised.
        """
        extra = {"image_data": image_data, "video_data": video_data, **others}
        if unread := sorted(name for name, value in extra.items() if value is not None):
            raise ConfigurationError(
                f"{ROLLOUT} continues text only", found=unread, where="a request", remedy="use a text-only data set"
            )
        prompt = [int(token) for token in prompt_ids]
        row = Row(request_id, prompt, self._sampling(prompt, sampling_params), torch.Generator())
        while not self._open.is_set():
            if self._rejecting:
                return self._output(row, "aborted")
            await self._open.wait()
        row.generator.manual_seed(self._seed(row))
        row.future = asyncio.get_running_loop().create_future()
        self._waiting.append(row)
        if self._loop is None or self._loop.done():
            self._loop = asyncio.get_running_loop().create_task(self._decode())
        output: TokenOutput = await row.future
        return output

    async def abort_all_requests(self, reject_request: bool = False) -> dict[str, Any]:
        """Ends every request with what it has, and holds new ones (or fails them, ``reject_request``) until resume."""
        self._open.clear()
        self._rejecting = reject_request
        async with self._between_steps:
            rows = [row for row in (*self._batch.rows, *self._waiting) if not row.future.done()]
            for row in rows:
                row.future.set_result(self._output(row, "aborted"))
            self._waiting.clear()
            self._batch.clear()
        return {"aborted_count": len(rows), "request_ids": [row.request_id for row in rows]}

    async def resume_generation(self) -> None:
        """Lets requests in again."""
        self._rejecting = False
        self._open.set()

    async def load_weights(self, named: Mapping[str, torch.Tensor], global_steps: int | None = None) -> None:
        """Takes a full set of weights between two decode steps; ``global_steps`` becomes their version.

        Requests in flight go on with the keys and values that they have.

        Raises:
            WorkerFailed: a weight is missing, unknown or of another shape; nothing is loaded then.
        """
        async with self._between_steps:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._replace, named)
            if global_steps is not None:
                self._version = global_steps

    async def set_global_steps(self, global_steps: int) -> None:
        """Sets the version without loading weights."""
        async with self._between_steps:
            self._version = global_steps

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Nothing sleeps here."""

    async def sleep(self) -> None:
        """Nothing to free."""

    async def clear_kv_cache(self) -> None:
        """No cache outlives its request."""

    async def release_kv_cache(self) -> None:
        """No cache outlives its request."""

    async def resume_kv_cache(self) -> None:
        """No cache outlives its request."""

    async def start_profile(self, **options: Any) -> None:
        """No profiler."""

    async def stop_profile(self) -> None:
        """No profiler."""

    def _replace(self, named: Mapping[str, torch.Tensor]) -> None:
        remedy = "publish the same model in full; with LoRA set actor_rollout_ref.model.lora.merge=True"
        replace_weights(self._model, named, where=f"{ROLLOUT} server", remedy=remedy)

    async def _decode(self) -> None:
        """Steps until nothing is in flight."""
        loop = asyncio.get_running_loop()
        while self._waiting or self._batch.rows:
            start = time.monotonic()
            async with self._between_steps:
                self._batch.drop([row for row in self._batch.rows if row.future.done()])  # their callers left
                joining = list(self._joining())
                try:
                    finished = await loop.run_in_executor(self._thread, self._batch.advance, joining, self._version)
                except Exception as error:  # whatever the model raises belongs to the requests, not to this loop
                    self._fail([*{id(row): row for row in (*self._batch.rows, *joining)}.values()], error)
                    continue
                for row in finished:
                    if not row.future.done():
                        row.future.set_result(self._output(row, "completed"))
            await asyncio.sleep(max(0.0, self._least_seconds - (time.monotonic() - start)))

    def _joining(self) -> Iterator[Row]:
        room = int(self._config.max_num_seqs) - len(self._batch.rows)
        while self._waiting and room > 0:
            row = self._waiting.popleft()
            if not row.future.done():
                room -= 1
                yield row

    def _fail(self, rows: list[Row], error: Exception) -> None:
        self._batch.clear()
        for row in rows:
            if not row.future.done():
                failure = WorkerFailed(
                    f"the model raised while decoding: {type(error).__name__}: {error}",
                    where=f"{ROLLOUT} server {self._rank}, request {row.request_id}",
                    remedy="see the server's log; the request can be sent again",
                )
                failure.__cause__ = error
                row.future.set_exception(failure)

    def _sampling(self, prompt: list[int], parameters: Mapping[str, Any]) -> Any:
        room = self._context - len(prompt)
        if not prompt or room < 1:
            raise ConfigurationError(
                "a prompt without tokens" if not prompt else "the prompt leaves no room for a token",
                found=f"{len(prompt)} tokens",
                where=f"a request; the context holds {self._context}",
                remedy="lower data.max_prompt_length, or raise rollout.max_model_len if the model allows",
            )
        # verl's own default: the response's length, less what a longer prompt (a later turn) already took of it.
        total = self._config.prompt_length + self._config.response_length
        default = max(1, min(self._config.response_length, total - len(prompt)))
        limits = {
            name: max(1, min(int(parameters[name]), room))
            for name in ("max_tokens", "max_new_tokens")
            if parameters.get(name) is not None
        }
        return parse(
            {**parameters, **limits},
            max_tokens=min(default, room),
            stop=self._ends,
            ignore_eos=bool(self._config.ignore_eos),
        )

    def _seed(self, row: Row) -> int:
        if row.sampling.seed is not None:
            return int(row.sampling.seed)
        prompt = hashlib.blake2b(repr(row.prompt).encode(), digest_size=8).digest()
        self._seen[prompt] += 1
        text = f"{self._config.seed} {self._rank} {prompt.hex()} {self._seen[prompt]}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")

    def _output(self, row: Row, reason: str) -> TokenOutput:
        versions = row.versions or [self._version]
        known = [version for version in versions if version is not None]
        return TokenOutput(
            token_ids=list(row.tokens),
            log_probs=list(row.log_probs) if row.sampling.log_probs else None,
            stop_reason=reason,
            num_preempted=0,
            extra_fields={
                "global_steps": versions[-1],
                "min_global_steps": min(known, default=None),
                "max_global_steps": max(known, default=None),
            },
        )


def _load(model_config: Any) -> Any:
    from transformers import AutoModelForCausalLM
    from verl.utils.fs import copy_to_local

    return AutoModelForCausalLM.from_pretrained(
        copy_to_local(model_config.path),
        dtype=torch.float32,
        trust_remote_code=bool(model_config.get("trust_remote_code", False)),
    ).eval()
