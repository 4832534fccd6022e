"""An agent loop of the tests: two turns with a tool's tokens between, as one row or, in every second rollout, two."""

from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput

TOOL = "\nAre you sure?\n"


class TwoTurns(AgentLoopBase):
    """Prints what each rollout gave: ``two turns: step 1 rows 2 prompts 30+53 sampled 12 tools 15 versions 0``."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> list[AgentLoopOutput]:
        """One row ``[prompt | turn, tool, turn]``, or two: ``[prompt | turn]`` and ``[prompt, turn, tool | turn]``."""
        prompt = await self.ct_build_initial_tokens(list(kwargs["raw_prompt"]))
        tool = self.tokenizer.encode(TOOL, add_special_tokens=False)
        request, limited = uuid4().hex, {**sampling_params, "max_tokens": 6}
        first = await self.server_manager.generate(request, prompt_ids=prompt, sampling_params=limited)
        so_far = prompt + first.token_ids + tool
        second = await self.server_manager.generate(request, prompt_ids=so_far, sampling_params=limited)
        if kwargs["session_id"] % 2:
            rows = [self._row(prompt, [(first, 1)]), self._row(so_far, [(second, 1)])]
        else:
            rows = [self._row(prompt, [(first, 1), (tool, 0), (second, 1)])]
        sampled = sum(sum(row.response_mask) for row in rows)
        print(
            f"two turns: step {int(kwargs['global_steps'])} rows {len(rows)} fed"
            f" {'+'.join(str(len(row.prompt_ids) + len(row.response_ids)) for row in rows)} sampled {sampled}"
            f" tools {sum(len(row.response_ids) for row in rows) - sampled}"
            f" version {first.extra_fields['global_steps']} to {second.extra_fields['global_steps']}",
            flush=True,
        )
        return rows

    def _row(self, prompt: list[int], parts: list[tuple[Any, int]]) -> AgentLoopOutput:
        """The row of ``(output or tool tokens, mask)``."""
        ids: list[int] = []
        mask: list[int] = []
        log_probs: list[float] = []
        for part, trained in parts:
            tokens = part.token_ids if trained else part
            ids += tokens
            mask += [trained] * len(tokens)
            log_probs += part.log_probs if trained else [0.0] * len(tokens)
        return AgentLoopOutput(
            prompt_ids=prompt,
            response_ids=ids,
            response_mask=mask,
            response_logprobs=log_probs,
            num_turns=2 * sum(trained for _, trained in parts),
            metrics=AgentLoopMetrics(generate_sequences=0.5),
            extra_fields=dict(parts[0][0].extra_fields),  # of the row's first turn
        )
