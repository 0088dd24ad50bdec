"""How far the policy is from its reference: estimators per token, and the coefficient β."""

from __future__ import annotations

import math
from collections.abc import Callable

from jaxtyping import Bool, Float
from torch import Tensor

from openrlhf.algorithms.registry import Registry
from openrlhf.algorithms.tensors import LOG_RATIO_BOUND

KL_BOUND = 10.0  # nats: an estimate of one token is held to ±10

KLEstimator = Callable[[Tensor], Tensor]  # of x = log π − log π_ref, bounded to ±20
KL_ESTIMATORS: Registry[KLEstimator] = Registry("KL estimator")


@KL_ESTIMATORS.register("k1")
def k1(log_ratio: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    """x: unbiased, of either sign; as a loss its expected gradient is zero.

    Schulman 2020, joschu.net/blog/kl-approx.html
    """
    return log_ratio


@KL_ESTIMATORS.register("k2")
def k2(log_ratio: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    """x² / 2: biased, never negative; as a loss it has the true KL's gradient.  Schulman 2020"""
    return log_ratio.square() / 2


@KL_ESTIMATORS.register("k3")
def k3(log_ratio: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    """exp(−x) − 1 + x: unbiased, never negative; as a loss it has the gradient of KL(π_ref‖π).

    Schulman 2020; GRPO, eq. 4, arXiv:2402.03300
    """
    return (-log_ratio).exp() - 1 + log_ratio


def kl_estimate(
    logprobs: Float[Tensor, "*s"], ref_logprobs: Float[Tensor, "*s"], estimator: str
) -> Float[Tensor, "*s"]:
    """The estimate of each token in nats, held to ±10.

    A held token has no gradient (k3: below x ≈ −2.6). Finite for all finite inputs, with its
    gradient. Raises ValueError for an unknown estimator.
    """
    x = (logprobs - ref_logprobs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return KL_ESTIMATORS[estimator](x).clamp(-KL_BOUND, KL_BOUND)


def kl_clamped(kl: Float[Tensor, "*s"]) -> Bool[Tensor, "*s"]:
    """True where `kl_estimate` was held to its bound: what the metric of that name counts."""
    return kl.detach().abs() >= KL_BOUND


class KLController:
    """The coefficient β of the KL term. With a `target`, β ← β · (1 + clip(KL / target − 1, ±0.2) · min(n / horizon, 1)).

    `target` is nats per action token, `horizon` a number of samples; without a target, β is the flag's, after a resume too.
    The paper does not bound n / horizon; the bound keeps β positive with large batches.
    Ziegler et al. 2019, §2.2, arXiv:1909.08593
    """

    def __init__(self, coef: float, *, target: float | None = None, horizon: int = 1) -> None:
        self.coef, self.target, self.horizon = coef, target, horizon

    def update(self, kl: float, n: int) -> None:
        """Follow the mean KL per action token (nats) of `n` samples. A KL that is not finite changes nothing."""
        if self.target is not None and math.isfinite(kl):
            error = min(max(kl / self.target - 1, -0.2), 0.2)
            self.coef *= 1 + error * min(n / self.horizon, 1.0)

    def resume(self, coef: float) -> None:
        """Continue with the checkpoint's β if β follows a target."""
        if self.target is not None:
            self.coef = coef
