"""The trained policy: log-probabilities, the policy update, and weight publication."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import cast

import torch
from torch import Tensor

from openrlhf.algorithms.corrections import (
    Correction,
    Gating,
    Level,
    Mode,
    correction_weights,
    filtered_units,
)
from openrlhf.algorithms.kl import kl_clamped, kl_estimate, unbiased_kl_estimate
from openrlhf.algorithms.policy_losses import POLICY_LOSSES, Clip, aggregation_weights
from openrlhf.algorithms.supervised_losses import token_nll
from openrlhf.algorithms.tensors import bounded_exp, log_ratio, masked_sum
from openrlhf.config.algorithm import AdvantageConfig
from openrlhf.config.learning import ActorConfig
from openrlhf.config.shared import LoraConfig
from openrlhf.core.batches import Experience, TokenRows
from openrlhf.models.adapters import adapters_off, scale_settings, stored_name
from openrlhf.models.loading import DTYPES, stored_tensors
from openrlhf.models.policy import PolicyModel
from openrlhf.observability.metrics import Max, Mean
from openrlhf.training.averaging import WeightAverage
from openrlhf.training.devices import free_port
from openrlhf.training.engine import Metrics
from openrlhf.training.gathered import exported_parameters, full_parameters
from openrlhf.training.strategy import Strategy
from openrlhf.training.whole import WholeTensor, trained_tensors, whole_tensors
from openrlhf.weights.buckets import NamedTensor
from openrlhf.weights.encoders import Encoder
from openrlhf.weights.manifest import WeightManifest
from openrlhf.weights.sender import WeightSender
from openrlhf.weights.transport import WeightGroup
from openrlhf.workers.base import (
    RoleSettings,
    TrainedWorker,
    Update,
    balancing_term,
    column_of,
    mean_of,
)

# Ratios ω outside this range are counted in train/rollout_ratio_outside.
USUAL_RATIOS = AdvantageConfig().is_correction_threshold


def clip_of(actor: ActorConfig) -> Clip:
    """Return the clip range for the probability ratio."""
    low, high = actor.eps_clip_low_high
    return Clip(low=low, high=high, dual=actor.dual_clip)


def correction_of(advantage: AdvantageConfig) -> Correction | None:
    """Return the correction for the train/rollout mismatch, or None if no correction is enabled."""
    if not advantage.corrects:
        return None
    low, high = advantage.is_correction_threshold
    return Correction(
        gating=cast(Gating, advantage.is_correction_gating),
        level=cast(Level, advantage.is_correction_level),
        mode=cast(Mode, advantage.is_correction_mode),
        low=low,
        high=high,
    )


@dataclass(frozen=True, kw_only=True)
class PolicyUpdate(Update):
    """An update of the policy."""

    kl_coef: float  # current coefficient β of the KL term in the loss
    pretraining: Sequence[TokenRows] = ()  # PPO-ptx: this rank's text rows for each optimizer step


class PolicyWorker(TrainedWorker[PolicyUpdate]):
    """The trained policy π_θ."""

    name = "actor"
    # Batch columns needed by an update.
    update_columns = ("advantages", "old_logprobs", "ref_logprobs", "rollout_logprobs")

    def __init__(self, strategy: Strategy, settings: RoleSettings) -> None:
        config = settings.config
        load = settings.load
        self.actor = config.actor
        self.algo = config.algo
        self.temperature = config.rollout.temperature
        self.clip = clip_of(self.actor)
        self.correction = correction_of(self.algo.advantage)
        # The constant L of --algo.loss.aggregation constant.
        self.max_response_tokens = config.rollout.max_new_tokens or config.data.max_len
        # The adapter to publish instead of merged weights.
        self.served_adapter: LoraConfig | None = None
        if config.ds.lora.served_rank:
            self.served_adapter = load.lora
        load_model = partial(PolicyModel.load, load, balancing=self.actor.aux_loss_coef > 0)
        super().__init__(strategy, settings, self.actor, load_model)
        if config.train.enable_ema:
            self.engine.average = WeightAverage(self.engine.module, strategy, config.train.ema_beta)
        self.sender = WeightSender()

    def logprobs(self, rows: TokenRows) -> Tensor:
        """Return log π_θ of every target token in this rank's rows, (N,), with the current weights.

        In the next update, these weights are π_old.
        """
        with self.engine.evaluating():
            return column_of(rows, self._score, self.forward_limits, self.strategy)

    def reference_logprobs(self, rows: TokenRows) -> Tensor:
        """Return log π_ref of every target token in this rank's rows, (N,).

        The reference is the policy without its adapters.
        """
        with adapters_off(self.engine.module):
            return self.logprobs(rows)

    def _score(self, micro: TokenRows) -> Tensor:
        return self.engine.module(
            micro.tokens, micro.offsets, micro.loss_mask, self.temperature
        ).logprobs

    def _weights(self, mask: Tensor) -> tuple[Tensor, float]:
        return aggregation_weights(
            mask, self.algo.loss.aggregation, max_tokens=self.max_response_tokens
        )

    def window(self, job: PolicyUpdate, number: int) -> list[Experience | TokenRows]:
        """Return micro-batches of episodes, and of pretraining text if the update has any.

        Each optimizer step trains on episodes and on pretraining text.
        """
        window: list[Experience | TokenRows] = [*super().window(job, number)]
        for text in job.pretraining[number : number + 1]:
            window += text.split(self.micro_batches(text.lengths))
        return window

    def counts(self, micro: Experience | TokenRows) -> Mapping[str, float]:
        """Return a micro-batch's parts of the loss denominators.

        The aggregated policy loss is divided by `policy`, sums over action tokens are divided by
        `tokens`, and sums over pretraining tokens are divided by `pretraining`.
        """
        if isinstance(micro, TokenRows):
            return {"policy": 0.0, "tokens": 0.0, "pretraining": float(micro.loss_mask.sum())}
        mask = micro.layout.pad(micro.action_mask)
        return {"policy": self._weights(mask)[1], "tokens": float(mask.sum()), "pretraining": 0.0}

    def loss(
        self, micro: Experience | TokenRows, totals: Mapping[str, float], job: PolicyUpdate
    ) -> tuple[Tensor, Metrics]:
        """Compute policy + β·KL − c·entropy + a·balance, a micro-batch's part of the window's loss.

        Returns this part of the loss and the micro-batch's metrics.
        """
        if isinstance(micro, TokenRows):
            return self._pretraining_loss(micro, totals)
        entropy_coef = self.actor.entropy_coef
        scores = self.engine(
            micro.tokens,
            micro.offsets,
            micro.action_mask,
            self.temperature,
            entropy_coef is not None,
        )
        layout = micro.layout
        mask = layout.pad(micro.action_mask)
        logprobs = layout.pad(scores.logprobs)
        if micro.old_logprobs is None:
            # In a strictly on-policy update, π_old is π_θ and the ratio is 1 by construction.
            old = logprobs.detach()
        else:
            old = layout.pad(micro.old_logprobs)
        loss, metrics = self._policy_loss(micro, logprobs, old, mask, totals)
        tokens = float(mask.sum())
        balance, balance_metrics = balancing_term(scores.aux_loss, self.actor.aux_loss_coef, tokens)
        loss = loss + balance / totals["tokens"]
        metrics |= balance_metrics
        if self.algo.kl.use_loss and micro.ref_logprobs is not None:
            reference = layout.pad(micro.ref_logprobs)
            kl = self._loss_kl(logprobs, old, reference)
            loss = loss + job.kl_coef * masked_sum(kl, mask) / totals["tokens"]
            metrics |= kl_metrics(kl, logprobs - reference, mask)
        if scores.entropy is not None:
            entropy_sum = masked_sum(layout.pad(scores.entropy), mask)
            metrics["train/entropy_loss"] = mean_of(entropy_sum, tokens)
            if entropy_coef:
                loss = loss - entropy_coef * entropy_sum / totals["tokens"]
        return loss, metrics

    def _loss_kl(self, logprobs: Tensor, old: Tensor, reference: Tensor) -> Tensor:
        """Return the estimate of the KL term in the loss for each token."""
        kl = self.algo.kl
        if kl.unbiased_gradient:
            return unbiased_kl_estimate(logprobs, old, reference, kl.estimator)
        return kl_estimate(logprobs, reference, kl.estimator)

    def _policy_loss(
        self,
        micro: Experience,
        logprobs: Tensor,
        old: Tensor,
        mask: Tensor,
        totals: Mapping[str, float],
    ) -> tuple[Tensor, Metrics]:
        """Compute the surrogate loss of the sampled tokens, and the loss's metrics.

        A correction weights each token. For losses with a sequence ratio, the correction instead
        changes the ratio from π_θ / π_old to π_θ / π_rollout.
        """
        layout = micro.layout
        assert micro.advantages is not None and micro.rollout_logprobs is not None
        rollout = layout.pad(micro.rollout_logprobs)
        correction, base = self.correction, old
        if correction and self.config.policy_loss_traits.rollout_ratio:
            correction, base = None, rollout
        surrogate = POLICY_LOSSES[self.actor.policy_loss_type](
            logprobs, base, layout.pad(micro.advantages), mask, self.clip
        )
        per_token = surrogate.per_token
        filtered: Metrics = {}
        if correction:
            trust, outside = correction_weights(old, rollout, mask, correction)
            per_token = trust * per_token
            share = filtered_units(outside, mask, correction.level)
            filtered["train/is_filter_ratio"] = Mean(*share)
        weights, count = self._weights(mask)
        summed = (weights * per_token).sum()
        tokens = float(mask.sum())
        update_kl = kl_estimate(old, logprobs.detach(), "k3")
        metrics: Metrics = {
            "train/policy_loss": mean_of(summed, count),
            "train/ppo_clip_ratio": mean_of(surrogate.clipped, tokens),
            "train/ppo_kl": mean_of(surrogate.approx_kl, tokens),
            "train/update_kl": mean_of(masked_sum(update_kl, mask), tokens),
        }
        metrics |= mismatch_metrics(old, rollout, mask) | filtered
        return summed / totals["policy"], metrics

    def _pretraining_loss(
        self, text: TokenRows, totals: Mapping[str, float]
    ) -> tuple[Tensor, Metrics]:
        """Compute c_ptx · NLL of plain text, at temperature 1.

        InstructGPT, Ouyang et al. 2022, eq. 2, arXiv:2203.02155
        """
        scores = self.engine(text.tokens, text.offsets, text.loss_mask)
        summed = token_nll(scores.logprobs, text.loss_mask).sum()
        tokens = float(text.loss_mask.sum())
        part = self.algo.ptx.coef * summed / totals["pretraining"]
        return part, {"train/ptx_loss": mean_of(summed, tokens)}

    def has_moved_enough(self, metrics: Metrics) -> bool:
        """Return whether the KL from π_old to π_θ exceeded --algo.kl.stop_update.

        The KL is measured at the start of the last optimizer step, over all ranks.
        """
        limit = self.algo.kl.stop_update
        if limit is None:
            return False
        update_kl = metrics.get("train/update_kl", Mean(0.0, 0.0))
        assert isinstance(update_kl, Mean)
        total, tokens = self.strategy.all_reduce([update_kl.sum, update_kl.count])
        return total > limit * tokens

    def weight_manifest(self, version: int) -> WeightManifest:
        """Return the manifest of the served adapter or, without an adapter, of the weights.

        Tensors are named as in the model's files, and tied weights appear once.
        """
        return self._encoder().manifest(
            version=version,
            dtype=DTYPES[self.config.vllm.dtype],
            bucket_bytes=self.bucket_bytes,
        )

    def _encoder(self) -> Encoder:
        """Return the encoder for the served adapter or, without an adapter, for the full model."""
        model = self.engine.hf
        if self.served_adapter:
            return Encoder(
                blanks=blanks_of(trained_tensors(model)),
                gathered=partial(exported_parameters, self.engine),
                stored=lambda name, tensor: [(stored_name(name), tensor)],
                adapter=scale_settings(self.served_adapter),
            )
        return Encoder(
            blanks=blanks_of(whole_tensors(model)),
            gathered=partial(full_parameters, self.engine),
            stored=partial(stored_tensors, model),
        )

    def weight_address(self) -> tuple[str, int]:
        """Return the address and port at which rank 0 will wait for the engines."""
        return os.environ["MASTER_ADDR"], free_port()

    def join_weight_group(self, group: WeightGroup) -> None:
        """Leave the current weight group, and join the new group if this rank is a sender."""
        self.sender.leave()
        if self.strategy.rank in group.senders:
            self.sender.join(group, group.senders.index(self.strategy.rank))

    def send_weights(self, manifest: WeightManifest) -> None:
        """Send the weights to the engines.

        Every rank must call this method, to help gather the weights.
        """
        encoder = self._encoder()
        stream = chain.from_iterable(encoder.gathered(manifest.bucket_bytes))
        if self.sender.channel:
            self.sender.send(manifest, encoder.encode(stream))
        for _ in stream:  # drain the stream, because gathering is collective
            pass


def blanks_of(tensors: Iterable[WholeTensor]) -> Iterator[NamedTensor]:
    """Yield each tensor's name, and its shape as an empty tensor on the meta device."""
    for tensor in tensors:
        yield tensor.name, torch.empty(tensor.shape, device="meta")


@torch.no_grad()
def mismatch_metrics(old: Tensor, rollout: Tensor, mask: Tensor) -> Metrics:
    """Measure the difference between the engine's and the trainer's log-probabilities.

    The metrics are computed from Δ = log π_rollout − log π_old and ω = exp(−Δ). Returns the metrics
    by their logged names.
    """
    delta = log_ratio(rollout, old, mask)[mask]
    gap = delta.abs()
    tokens = delta.numel()
    largest_gap = 0.0
    if tokens:
        largest_gap = float(gap.max())
    omega = bounded_exp(-delta)
    outside = (omega < USUAL_RATIOS[0]) | (omega > USUAL_RATIOS[1])
    return {
        "train/vllm_kl": mean_of(delta, tokens),  # an estimate of KL(π_rollout ‖ π_old)
        "train/logprob_gap_mean": mean_of(gap, tokens),
        "train/logprob_gap_max": Max(largest_gap),
        "train/rollout_ratio": mean_of(omega, tokens),
        "train/rollout_ratio_outside": mean_of(outside, tokens),
    }


def kl_metrics(kl: Tensor, difference: Tensor, mask: Tensor) -> Metrics:
    """Return the metrics for the distance to the reference policy by logged name.

    `difference` is log π − log π_ref.
    """
    tokens = float(mask.sum())
    return {
        "train/kl": mean_of(masked_sum(kl, mask), tokens),
        "train/kl_clamped": mean_of(kl_clamped(kl) & mask, tokens),
        "train/logprobs_diff": mean_of(masked_sum(difference, mask), tokens),
    }
