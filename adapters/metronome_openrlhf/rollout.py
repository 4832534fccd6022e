"""OpenRLHF's rollout engine, which knows the version of its weights and stamps each token with it."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import AsyncIterator
from contextvars import ContextVar
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from openrlhf.trainer.ray import vllm_engine

from metronome.errors import MetronomeError
from metronome_openrlhf.fingerprint import fingerprint
from metronome_openrlhf.spans import SPANS, Request, spans_of

_Base: Any = vllm_engine.RolloutRayActor.__ray_metadata__.modified_class

_QUIET = 0.02  # seconds without a new token after which a paused engine's last ones have arrived


@dataclass(eq=False)
class _Rollout:
    """One sample: what its executor asked of the engine. ``name`` is what its seeds follow."""

    name: str
    requests: list[Request] = field(default_factory=list)
    running: int = 0
    stale: bool = False
    task: asyncio.Task[Any] | None = None


_rollout: ContextVar[_Rollout | None] = ContextVar("metronome_rollout", default=None)
_request: ContextVar[Request | None] = ContextVar("metronome_request", default=None)


class MetronomeRollout(_Base):
    """OpenRLHF's ``RolloutRayActor``.

    Args:
        sampling_seed: given, every request is seeded by it, the prompt, the sample and the version, so that what is
            sampled doesn't depend on when a request arrives nor at which engine. vLLM samples such requests one by
            one. None leaves them to the engine's own seed.
    """

    llm: Any

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, *arguments: Any, sampling_seed: int | None = None, **named: Any
    ) -> None:
        await super().__init__(*arguments, **named)
        self.llm = _Counted(self.llm)
        self.sampling_seed = sampling_seed
        self.version = 0
        self.restarted = 0
        self._rollouts: set[_Rollout] = set()
        self._requests: set[Request] = set()
        self._asked: Counter[str] = Counter()

    async def set_version(self, version: int) -> None:
        """From now on the weights are ``version``'s; called after a broadcast, before generation goes on.

        Raises MetronomeError when requests run and the engine isn't paused: their tokens could be of either version.
        """
        if self._requests:
            if not await self.llm.is_paused():
                raise MetronomeError(
                    "the weights of a running engine changed",
                    found=f"{len(self._requests)} requests between version {self.version} and {version}",
                    where="set_version",
                    remedy="pause_generation before the broadcast, resume_generation after set_version",
                )
            await self._settled()
            for request in self._requests:
                request.account(self.version)
        if version != self.version:
            self._asked.clear()
        self.version = version

    async def get_version(self) -> int:
        """The version of the weights."""
        return self.version

    async def running(self) -> int:
        """Samples in flight: waiting, being generated, or in their environment."""
        return len(self._rollouts)

    async def abort_running(self) -> int:
        """Ends every sample in flight, which then starts anew, all its turns, under the version of that moment.

        Called while the engine is paused, after ``set_version``. A sample that waits for its environment starts anew
        if it asks for another turn. Returns how many samples were being generated.
        """
        ended = 0
        for rollout in self._rollouts:
            rollout.stale = bool(rollout.requests)
            if rollout.running and rollout.task is not None:
                rollout.task.cancel()
                ended += 1
        return ended

    async def fingerprint(self) -> float:
        """A number that changes with the engine's weights, over all its workers."""
        return float(sum(await self.llm.collective_rpc(fingerprint)))

    async def generate_responses(
        self,
        prompt: str,
        label: str,
        sampling_params: Any,
        max_length: int,
        hf_tokenizer: Any,
        num_samples: int = 1,
        images: Any = None,
    ) -> list[dict[str, Any]]:
        """OpenRLHF's, one sample at a time; each response gets ``metronome_spans``."""
        time = self._asked[prompt]
        self._asked[prompt] += 1

        def one() -> Any:
            # Its own parameters: a turn of an executor writes the tokens that are left into them.
            return super(MetronomeRollout, self).generate_responses(
                prompt, label, deepcopy(sampling_params), max_length, hf_tokenizer, 1, images
            )

        made = await asyncio.gather(*[self._sample(one, f"{time}:{index}") for index in range(num_samples)])
        return [response for responses in made for response in responses]

    async def _sample(self, one: Any, name: str) -> list[dict[str, Any]]:
        while True:
            rollout = _Rollout(name)
            rollout.task = asyncio.create_task(_within(rollout, one))
            self._rollouts.add(rollout)
            try:
                await asyncio.wait({rollout.task})
            except asyncio.CancelledError:
                rollout.task.cancel()
                raise
            finally:
                self._rollouts.discard(rollout)
            if rollout.task.cancelled() and rollout.stale:
                self.restarted += 1
                continue
            responses: list[dict[str, Any]] = rollout.task.result()
            for response in responses:
                if not isinstance(response, dict):
                    raise MetronomeError(
                        "an agent's executor must return one dict: OpenRLHF reads one row of a rollout",
                        found=type(response).__name__,
                        where="--train.agent_func_path: AgentExecutor.execute",
                        remedy="all turns in one row, each with its action range; other rows of a prompt come with"
                        " --rollout.n_samples_per_prompt",
                    )
                response[SPANS] = spans_of(response, rollout.requests)
            return responses

    async def generate(self, prompt_token_ids: list[int], sampling_params: Any, multi_modal_data: Any = None) -> Any:
        """OpenRLHF's; counts the tokens of each version."""
        rollout = _rollout.get() or _Rollout("")
        if rollout.stale:
            raise asyncio.CancelledError
        if self.sampling_seed is not None:
            sampling_params = deepcopy(sampling_params)
            sampling_params.seed = _seed(
                self.sampling_seed, self.version, rollout.name, len(rollout.requests), prompt_token_ids
            )
        request = Request()
        rollout.requests.append(request)
        rollout.running += 1
        self._requests.add(request)
        before = _request.set(request)
        try:
            output = await super().generate(prompt_token_ids, sampling_params, multi_modal_data)
            request.tokens = list(output.outputs[0].token_ids)
            request.seen = len(request.tokens)
            request.account(self.version)
            return output
        finally:
            _request.reset(before)
            self._requests.discard(request)
            rollout.running -= 1

    async def _settled(self) -> None:
        """Returns when the tokens that the engine sampled before its pause have all arrived."""
        await self.llm.is_sleeping()  # answered after everything that the engine had sent before
        before = None
        while (now := sum(request.seen for request in self._requests)) != before:
            before = now
            await asyncio.sleep(_QUIET)


class _Counted:
    """vLLM's engine; writes into the request of the calling task how many of its tokens have come."""

    def __init__(self, own: Any) -> None:
        self._own = own

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    async def generate(self, *arguments: Any, **named: Any) -> AsyncIterator[Any]:
        request = _request.get()
        async for output in self._own.generate(*arguments, **named):
            if request is not None:
                request.seen = len(output.outputs[0].token_ids)
            yield output


async def _within(rollout: _Rollout, one: Any) -> Any:
    _rollout.set(rollout)
    return await one()


def _seed(*parts: Any) -> int:
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 1
