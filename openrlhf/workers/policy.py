"""The trained policy: log-probabilities, the policy update, and its weights on the way out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from openrlhf.algorithms.corrections import mismatch
from openrlhf.algorithms.kl import kl_clamped, kl_estimate
from openrlhf.algorithms.policy_losses import POLICY_LOSSES, aggregation_weights
from openrlhf.algorithms.tensors import masked_sum
from openrlhf.distributed.buckets import SentWeights, TensorSpec, WeightManifest
from openrlhf.distributed.devices import free_port, node_address
from openrlhf.distributed.strategy import Metrics, Strategy, full_shape
from openrlhf.distributed.weight_sync import WeightGroup, WeightSender
from openrlhf.experience import Experience
from openrlhf.models.loading import load_causal_lm
from openrlhf.models.policy import PolicyModel
from openrlhf.observability.metrics import Max, Mean
from openrlhf.workers.base import TrainedSettings, TrainedWorker, Update, per_token_column


@dataclass(frozen=True, kw_only=True)
class Objective:
    """What a policy update minimises, and how its tokens are averaged."""

    policy_loss: str
    clip_low: float
    clip_high: float
    dual_clip: float | None
    aggregation: str
    max_response_tokens: int  # L of constant aggregation
    kl_estimator: str
    kl_in_loss: bool
    entropy_coef: float | None  # None: not computed; 0: logged only


@dataclass(frozen=True, kw_only=True)
class PolicySettings(TrainedSettings):
    """What a policy worker needs to know."""

    objective: Objective
    temperature: float
    wire_dtype: str  # of the published weights, as torch names it


@dataclass(frozen=True, kw_only=True)
class PolicyUpdate(Update):
    """An update of the policy, with the present coefficient β of a KL in the loss."""

    kl_coef: float


class PolicyWorker(TrainedWorker[PolicyUpdate]):
    """π_θ."""

    name = "actor"

    def __init__(self, strategy: Strategy, settings: PolicySettings) -> None:
        self.settings = settings
        load = settings.load
        super().__init__(strategy, settings, lambda: PolicyModel(load_causal_lm(load), packing=load.packing))
        self.sender = WeightSender()

    def logprobs(self, experience: Experience) -> Tensor:
        """log π_θ of every sampled token of this rank's rows, (N,), as they are now: π_old of the coming update."""
        self.engine.module.eval()
        scored = per_token_column(experience, self._score, self.settings.forward, self.strategy)
        self.engine.module.train()
        return scored

    def _score(self, micro: Experience) -> Tensor:
        return self.engine.module(micro.tokens, micro.offsets, micro.action_mask, self.settings.temperature).logprobs

    def _weights(self, mask: Tensor) -> tuple[Tensor, float]:
        objective = self.settings.objective
        return aggregation_weights(mask, objective.aggregation, max_tokens=objective.max_response_tokens)

    def counts(self, micro: Experience) -> Mapping[str, float]:
        """Denominators: of the policy loss as aggregated, and of the terms that are means over tokens."""
        mask = micro.layout.gather(micro.action_mask)
        return {"policy": self._weights(mask)[1], "tokens": float(mask.sum())}

    def loss(self, micro: Experience, totals: Mapping[str, float], job: PolicyUpdate) -> tuple[Tensor, Metrics]:
        """policy + β·KL − c·entropy, this micro-batch's share of the window; and its metrics."""
        objective = self.settings.objective
        scores = self.engine(
            micro.tokens,
            micro.offsets,
            micro.action_mask,
            self.settings.temperature,
            objective.entropy_coef is not None,
        )
        layout = micro.layout
        mask, logprobs = layout.gather(micro.action_mask), layout.gather(scores.logprobs)
        assert micro.advantages is not None
        # Strictly on-policy, nothing needs π_old apart: the ratio is 1 by construction.
        old = logprobs.detach() if micro.old_logprobs is None else layout.gather(micro.old_logprobs)
        surrogate = POLICY_LOSSES[objective.policy_loss].function(
            logprobs,
            old,
            layout.gather(micro.advantages),
            mask,
            clip_low=objective.clip_low,
            clip_high=objective.clip_high,
            dual_clip=objective.dual_clip,
        )
        weights, count = self._weights(mask)
        policy_sum = (weights * surrogate.per_token).sum()
        loss = policy_sum / totals["policy"]
        tokens = float(mask.sum())
        metrics: Metrics = {
            "train/policy_loss": Mean(float(policy_sum.detach()), count),
            "train/ppo_clip_ratio": Mean(float(surrogate.clipped.sum()), tokens),
            "train/ppo_kl": Mean(float(surrogate.approx_kl.sum()), tokens),
        }
        if objective.kl_in_loss and micro.ref_logprobs is not None:
            kl = kl_estimate(logprobs, layout.gather(micro.ref_logprobs), objective.kl_estimator)
            kl_sum = masked_sum(kl, mask)
            loss = loss + job.kl_coef * kl_sum / totals["tokens"]
            metrics["train/kl"] = Mean(float(kl_sum.detach()), tokens)
            metrics["train/kl_clamped"] = Mean(float((kl_clamped(kl) & mask).sum()), tokens)
        if scores.entropy is not None and objective.entropy_coef is not None:
            entropy_sum = masked_sum(layout.gather(scores.entropy), mask)
            metrics["train/entropy_loss"] = Mean(float(entropy_sum.detach()), tokens)
            if objective.entropy_coef:
                loss = loss - objective.entropy_coef * entropy_sum / totals["tokens"]
        return loss, metrics | mismatch_metrics(old, layout.gather(micro.rollout_logprobs), mask)

    def weight_manifest(self, version: int) -> WeightManifest:
        """What a publication of the present weights consists of. Tied weights are named once."""
        specs = (
            TensorSpec(name=name, dtype=self.settings.wire_dtype, shape=full_shape(parameter))
            for name, parameter in self.hf.named_parameters()
        )
        return WeightManifest(version=version, specs=tuple(specs), bucket_bytes=self.settings.bucket_bytes)

    def weight_address(self) -> tuple[str, int]:
        """Where rank 0 will wait for the engines."""
        return node_address(), free_port()

    def join_weight_group(self, group: WeightGroup) -> None:
        """Meet the engines; rank 0 alone speaks with them."""
        if self.strategy.is_main:
            self.sender.join(group)

    def send_weights(self, manifest: WeightManifest) -> SentWeights | None:
        """Stream the weights to the engines; what was sent, from rank 0. Collective: every rank helps to gather."""
        buckets = self.engine.full_parameters(manifest.bucket_bytes)
        stream = (pair for bucket in buckets for pair in bucket)
        if self.strategy.is_main:
            return self.sender.send(manifest, stream)
        for _ in stream:
            pass
        return None


def mismatch_metrics(old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> Metrics:
    """How far engine and trainer disagree about the sampled tokens, in the logged names."""
    gap = mismatch(old_logprobs, rollout_logprobs, mask)
    return {
        "train/vllm_kl": Mean(gap.kl_sum, gap.tokens),
        "train/logprob_gap_mean": Mean(gap.gap_sum, gap.tokens),
        "train/logprob_gap_max": Max(gap.gap_max),
    }
