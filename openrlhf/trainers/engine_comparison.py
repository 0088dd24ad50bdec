"""Checks that the engines and the trainer compute the same log-probabilities."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from openrlhf.cluster.worker_group import Call, WorkerGroup, wait_for
from openrlhf.core.batches import TokenRows
from openrlhf.rollout.engine import RolloutEngine
from openrlhf.rollout.fleet import Fleet
from openrlhf.rollout.sampling import Generation, SamplingParams
from openrlhf.weights.manifest import PublicationError
from openrlhf.workers.policy import PolicyWorker


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Prompts to be answered by every engine with its first published weights.

    `params` requests a few tokens at the policy's temperature, without top-k or top-p. `tolerance`
    is the largest mean difference between log-probabilities (in nats) that can be explained by
    rounding.
    """

    prompts: Sequence[list[int]]
    params: SamplingParams
    tolerance: float


@dataclass(frozen=True, kw_only=True)
class EngineComparison:
    """Samples responses to the probe from every engine and scores the responses with the policy."""

    policy: WorkerGroup
    fleet: Fleet
    probe: Probe
    timeout_s: float

    def run(self) -> None:
        """Compare all running engines with the policy, and clear the engines' caches.

        Raises PublicationError if the log-probabilities differ by more than rounding can explain:
        the engine and the trainer then compute different functions of the same weights.
        """
        engines = self.fleet.up
        prompts = self.probe.prompts
        params = [self.probe.params]
        asked: list[Call] = []
        rows_asked: list[list[int]] = []
        for prompt in prompts:
            for engine in engines:
                asked.append(engine.call(RolloutEngine.generate, prompt, params))
                rows_asked.append(prompt)
        answers = self._wait_for(asked, "sample from the new weights")
        pausing = [engine.call(RolloutEngine.pause) for engine in engines]
        self._wait_for(pausing, "empty their caches")
        resuming = [engine.call(RolloutEngine.resume) for engine in engines]
        self._wait_for(resuming, "serve the new weights")
        samples: list[Generation] = [sample for [sample] in answers]
        gaps = self._gaps(rows_asked, samples)
        for position, engine in enumerate(engines):
            gap = torch.cat(gaps[position :: len(engines)])
            # The comparison is negated so that NaN also raises.
            if not float(gap.mean()) <= self.probe.tolerance:
                raise PublicationError(
                    f"engine {engine.index} and the trainer compute different log-probabilities "
                    f"for the same tokens and weights: mean difference {gap.mean():.3g} nats, "
                    f"largest {gap.max():.3g}; rounding explains a mean of at most "
                    f"{self.probe.tolerance:g}. They implement this architecture differently. "
                    "Use another architecture, or change --vllm.engine_args, "
                    "--vllm.quantization or --ds.attn_implementation."
                )

    def _gaps(
        self, prompts: Sequence[list[int]], samples: Sequence[Generation]
    ) -> tuple[Tensor, ...]:
        """Return |log π (policy) − log π (engine)| for the tokens of each sample."""
        tokens: list[list[int]] = []
        sampled: list[list[bool]] = []
        for prompt, sample in zip(prompts, samples, strict=True):
            tokens.append(prompt + sample.tokens)
            sampled.append([False] * len(prompt) + [True] * len(sample.tokens))
        rows = TokenRows.from_lists(tokens, sampled)
        scoring = self.policy.broadcast(PolicyWorker.logprobs, rows)
        ours: Tensor = self._wait_for(scoring, "score the engines' samples")[0][rows.loss_mask]
        theirs = [torch.tensor(sample.logprobs) for sample in samples]
        return (ours - torch.cat(theirs)).abs().split([len(sample) for sample in theirs])

    def _wait_for(self, calls: Sequence[Call], doing: str) -> list[Any]:
        return wait_for(
            calls, timeout_s=self.timeout_s, doing=doing, flag="--train.publish_timeout"
        )
