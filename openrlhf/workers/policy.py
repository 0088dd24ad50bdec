"""The trained policy: log-probabilities, the policy update, and the publication of its weights."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor

from openrlhf.algorithms.corrections import Correction, Level, Mode, correction_weights
from openrlhf.algorithms.kl import kl_clamped, kl_estimate
from openrlhf.algorithms.policy_losses import POLICY_LOSSES, Clip, aggregation_weights
from openrlhf.algorithms.supervised_losses import token_nll
from openrlhf.algorithms.tensors import bounded_exp, log_ratio, masked_sum
from openrlhf.batches import Experience, TokenRows
from openrlhf.config.learning import ActorConfig, AlgoConfig
from openrlhf.distributed.averaging import WeightAverage
from openrlhf.distributed.buckets import TensorSpec, WeightManifest
from openrlhf.distributed.devices import free_port
from openrlhf.distributed.engine import Metrics
from openrlhf.distributed.strategy import Strategy
from openrlhf.distributed.weight_sync import WeightGroup, WeightSender
from openrlhf.distributed.whole import trained_tensors, whole_tensors
from openrlhf.models.adapters import adapters_off, scale_settings, stored_name
from openrlhf.models.loading import DTYPES, stored_tensors
from openrlhf.models.policy import PolicyModel
from openrlhf.observability.metrics import Max, Mean
from openrlhf.workers.base import RoleSettings, TrainedWorker, Update, balancing_term, column_of


def clip_of(actor: ActorConfig) -> Clip:
    """The clip range of the ratio."""
    low, high = actor.eps_clip_low_high
    return Clip(low=low, high=high, dual=actor.dual_clip)


def correction_of(algo: AlgoConfig) -> Correction:
    """The correction of train/rollout mismatch. The weights of tokens outside its band are always
    computed, and used only if a level is set.
    """
    axes = algo.correction
    low, high = axes.band or algo.advantage.is_correction_threshold
    level, mode = cast(Level, axes.level or "token"), cast(Mode, axes.mode or "clip")
    return Correction(level=level, mode=mode, low=low, high=high)


@dataclass(frozen=True, kw_only=True)
class PolicyUpdate(Update):
    """An update of the policy, with the current coefficient β of a KL in the loss."""

    kl_coef: float
    version: int  # of the weights after the update
    pretraining: Sequence[TokenRows] = ()  # PPO-ptx: this rank's rows of each optimizer step


class PolicyWorker(TrainedWorker[PolicyUpdate]):
    """The trained policy π_θ."""

    name = "actor"
    reads = (
        "advantages",
        "old_logprobs",
        "ref_logprobs",
        "rollout_logprobs",
    )  # columns of an update

    def __init__(self, strategy: Strategy, settings: RoleSettings) -> None:
        config, load = settings.config, settings.load
        self.actor, self.algo, self.temperature = (
            config.actor,
            config.algo,
            config.rollout.temperature,
        )
        self.clip, self.correction = clip_of(self.actor), correction_of(self.algo)
        self.max_response_tokens = (
            config.rollout.max_new_tokens or config.data.max_len
        )  # L of constant aggregation
        self.served = (
            load.lora if config.ds.lora.served_rank else None
        )  # an adapter that engines are sent
        load_model = partial(PolicyModel.load, load, balancing=self.actor.aux_loss_coef > 0)
        super().__init__(strategy, settings, self.actor, load_model)
        if config.train.enable_ema:
            self.engine.average = WeightAverage(self.engine.module, strategy, config.train.ema_beta)
        self.sender, self.version = WeightSender(), 0

    def update(self, job: PolicyUpdate) -> Metrics:
        """See `TrainedWorker`."""
        metrics = super().update(job)
        self.version = job.version
        return metrics

    def logprobs(self, rows: TokenRows) -> Tensor:
        """log π_θ of every target of this rank's rows, (N,), with the current weights: π_old of the
        coming update.
        """
        with self.engine.evaluating():
            return column_of(rows, self._score, self.forward_limits, self.strategy)

    def reference_logprobs(self, rows: TokenRows) -> Tensor:
        """log π_ref of every target of this rank's rows, (N,): the policy without its adapters."""
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
        """Micro-batches of episodes, and of pretraining text if there is any. One optimizer step
        learns from both.
        """
        window: list[Experience | TokenRows] = [*super().window(job, number)]
        for text in job.pretraining[number : number + 1]:
            window += text.split(self.train_limits.cut(text.lengths))
        return window

    def counts(self, micro: Experience | TokenRows) -> Mapping[str, float]:
        """Denominators: for the aggregated policy loss, for means over action tokens and over
        pretraining tokens.
        """
        if isinstance(micro, TokenRows):
            return {"policy": 0.0, "tokens": 0.0, "pretraining": float(micro.loss_mask.sum())}
        mask = micro.layout.gather(micro.action_mask)
        return {"policy": self._weights(mask)[1], "tokens": float(mask.sum()), "pretraining": 0.0}

    def loss(
        self, micro: Experience | TokenRows, totals: Mapping[str, float], job: PolicyUpdate
    ) -> tuple[Tensor, Metrics]:
        """policy + β·KL − c·entropy + a·balance: this micro-batch's part of the window's loss, and
        its metrics.
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
        mask, logprobs = layout.gather(micro.action_mask), layout.gather(scores.logprobs)
        # In a strictly on-policy update, π_old is π_θ and the ratio is 1 by construction.
        old = logprobs.detach() if micro.old_logprobs is None else layout.gather(micro.old_logprobs)
        loss, metrics = self._policy_loss(micro, logprobs, old, mask, totals)
        tokens = float(mask.sum())
        balance, balance_metrics = balancing_term(scores.aux_loss, self.actor.aux_loss_coef, tokens)
        loss, metrics = loss + balance / totals["tokens"], metrics | balance_metrics
        if self.algo.kl.use_loss and micro.ref_logprobs is not None:
            reference = layout.gather(micro.ref_logprobs)
            kl = kl_estimate(logprobs, reference, self.algo.kl.estimator)
            loss = loss + job.kl_coef * masked_sum(kl, mask) / totals["tokens"]
            metrics |= kl_metrics(kl.detach(), log_ratio(logprobs.detach(), reference, mask), mask)
        if scores.entropy is not None:
            entropy_sum = masked_sum(layout.gather(scores.entropy), mask)
            metrics["train/entropy_loss"] = Mean(float(entropy_sum.detach()), tokens)
            if entropy_coef:
                loss = loss - entropy_coef * entropy_sum / totals["tokens"]
        return loss, metrics

    def _policy_loss(
        self,
        micro: Experience,
        logprobs: Tensor,
        old: Tensor,
        mask: Tensor,
        totals: Mapping[str, float],
    ) -> tuple[Tensor, Metrics]:
        """The surrogate of the sampled tokens, each weighted by the correction of train/rollout
        mismatch.
        """
        layout = micro.layout
        assert micro.advantages is not None and micro.rollout_logprobs is not None
        surrogate = POLICY_LOSSES[self.actor.policy_loss_type].function(
            logprobs, old, layout.gather(micro.advantages), mask, self.clip
        )
        rollout = layout.gather(micro.rollout_logprobs)
        corrected, outside = correction_weights(old, rollout, mask, self.correction)
        per_token = (
            corrected * surrogate.per_token if self.algo.correction.level else surrogate.per_token
        )
        weights, count = self._weights(mask)
        summed, tokens = (weights * per_token).sum(), float(mask.sum())
        metrics: Metrics = {
            "train/policy_loss": Mean(float(summed.detach()), count),
            "train/ppo_clip_ratio": Mean(float(surrogate.clipped.sum()), tokens),
            "train/ppo_kl": Mean(float(surrogate.approx_kl.sum()), tokens),
            "train/update_kl": Mean(
                float(masked_sum(kl_estimate(old, logprobs.detach(), "k3"), mask)), tokens
            ),
        }
        return summed / totals["policy"], metrics | mismatch_metrics(old, rollout, mask, outside)

    def _pretraining_loss(
        self, text: TokenRows, totals: Mapping[str, float]
    ) -> tuple[Tensor, Metrics]:
        """c_ptx · NLL of plain text, at temperature 1.  InstructGPT, eq. 2, arXiv:2203.02155"""
        scores = self.engine(text.tokens, text.offsets, text.loss_mask)
        summed, tokens = (
            token_nll(scores.logprobs, text.loss_mask).sum(),
            float(text.loss_mask.sum()),
        )
        part = self.algo.ptx.coef * summed / totals["pretraining"]
        return part, {"train/ptx_loss": Mean(float(summed.detach()), tokens)}

    def has_moved_enough(self, metrics: Metrics) -> bool:
        """Whether the KL from π_old to π_θ, at the start of the last optimizer step, exceeded
        --algo.kl.stop_update.
        """
        limit, moved = self.algo.kl.stop_update, metrics.get("train/update_kl", Mean(0.0, 0.0))
        if limit is None:
            return False
        assert isinstance(moved, Mean)
        total, tokens = self.strategy.all_reduce([moved.sum, moved.count])
        return total > limit * tokens

    def weight_manifest(self, version: int | None = None) -> WeightManifest:
        """The tensors of a publication of the current weights or adapter, under their names in its
        files.

        Tied weights come once. Without a `version`, the weights keep theirs.
        """
        self.version = self.version if version is None else version
        dtype = DTYPES[self.config.vllm.dtype]
        specs = (
            TensorSpec(name=stored, dtype=dtype, shape=tuple(tensor.shape))
            for each in (trained_tensors if self.served else whole_tensors)(self.engine.hf)
            for stored, tensor in self._stored(each.name, torch.empty(each.shape, device="meta"))
        )
        adapter = scale_settings(self.served) if self.served else None
        return WeightManifest(
            version=self.version,
            specs=tuple(specs),
            bucket_bytes=self.bucket_bytes,
            adapter=adapter,
        )

    def _stored(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        return (
            [(stored_name(name), tensor)]
            if self.served
            else stored_tensors(self.engine.hf, name, tensor)
        )

    def weight_address(self) -> tuple[str, int]:
        """The address and port at which rank 0 will wait for the engines."""
        return os.environ["MASTER_ADDR"], free_port()

    def join_weight_group(self, group: WeightGroup) -> None:
        """Join the engines' weight group, if this rank is a sender. Every rank leaves the group
        before.
        """
        self.sender.leave()
        if self.strategy.rank in group.senders:
            self.sender.join(group, group.senders.index(self.strategy.rank))

    def send_weights(self, manifest: WeightManifest) -> None:
        """Send the weights to the engines. Collective: every rank helps to gather the weights."""
        parameters = self.engine.exported_parameters if self.served else self.engine.full_parameters
        buckets = parameters(manifest.bucket_bytes)
        stream = (pair for bucket in buckets for pair in bucket)
        if self.sender.channel:
            self.sender.send(
                manifest, (stored for pair in stream for stored in self._stored(*pair))
            )
        for _ in stream:
            pass


@torch.no_grad()
def mismatch_metrics(old: Tensor, rollout: Tensor, mask: Tensor, outside: Tensor) -> Metrics:
    """How far engine and trainer disagree about the sampled tokens, from Δ = log π_rollout − log
    π_old, in the logged names.

    `outside`: tokens whose ω = exp(−Δ) is out of the correction's bounds.
    """
    delta = log_ratio(rollout, old, mask)[mask]
    gap, tokens = delta.abs(), delta.numel()
    return {
        "train/vllm_kl": Mean(float(delta.sum()), tokens),  # an estimate of KL(π_rollout ‖ π_old)
        "train/logprob_gap_mean": Mean(float(gap.sum()), tokens),
        "train/logprob_gap_max": Max(float(gap.max()) if tokens else 0.0),
        "train/rollout_ratio": Mean(float(bounded_exp(-delta).sum()), tokens),
        "train/rollout_ratio_outside": Mean(float(outside.sum()), tokens),
    }


def kl_metrics(kl: Tensor, difference: Tensor, mask: Tensor) -> Metrics:
    """The distance to the reference under the logged names; `difference` is log π − log π_ref."""
    tokens = float(mask.sum())
    return {
        "train/kl": Mean(float(masked_sum(kl, mask)), tokens),
        "train/kl_clamped": Mean(float((kl_clamped(kl) & mask).sum()), tokens),
        "train/logprobs_diff": Mean(float(masked_sum(difference, mask)), tokens),
    }
