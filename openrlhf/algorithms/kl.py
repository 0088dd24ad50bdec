"""KL divergence between policy and reference: per-token estimators and the coefficient β."""

import math
from collections.abc import Callable

from jaxtyping import Bool, Float
from torch import Tensor

from openrlhf.algorithms.registry import Registry
from openrlhf.algorithms.tensors import LOG_RATIO_BOUND
from openrlhf.config import choices

KL_BOUND = 10.0  # in nats: each token's estimate is clipped to ±10
MAX_KL_WEIGHT = 10.0  # upper bound of π_θ/π_old in `unbiased_kl_estimate`

KLEstimator = Callable[[Tensor], Tensor]  # takes x = log π − log π_ref, clipped to ±20
KL_ESTIMATORS: Registry[KLEstimator] = Registry(
    "KL estimator", choices.KL_ESTIMATORS, choices.KLTraits
)


@KL_ESTIMATORS.register("k1")
def k1(log_ratio: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    """Return x, which is unbiased and may be positive or negative.

    As a loss, this estimator has an expected gradient of zero.

    Schulman 2020, joschu.net/blog/kl-approx.html
    """
    return log_ratio


@KL_ESTIMATORS.register("k2")
def k2(log_ratio: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    """Return x² / 2, which is biased and never negative.

    As a loss, this estimator has the gradient of the true KL.

    Schulman 2020
    """
    return log_ratio.square() / 2


@KL_ESTIMATORS.register("k3")
def k3(log_ratio: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    """Return exp(−x) − 1 + x, which is unbiased and never negative.

    As a loss, this estimator has the gradient of KL(π_ref‖π).

    Schulman 2020; GRPO, eq. 4, arXiv:2402.03300
    """
    return (-log_ratio).exp() - 1 + log_ratio


def kl_estimate(
    logprobs: Float[Tensor, "*s"], ref_logprobs: Float[Tensor, "*s"], estimator: str
) -> Float[Tensor, "*s"]:
    """Return each token's KL estimate in nats, clipped to ±10.

    A clipped estimate has no gradient (for k3, this happens below x ≈ −2.6). The estimate and its
    gradient are finite for all finite inputs. Raises ValueError for an unknown estimator.
    """
    x = (logprobs - ref_logprobs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return KL_ESTIMATORS[estimator](x).clamp(-KL_BOUND, KL_BOUND)


def unbiased_kl_estimate(
    logprobs: Float[Tensor, "*s"],
    old_logprobs: Float[Tensor, "*s"],
    ref_logprobs: Float[Tensor, "*s"],
    estimator: str,
) -> Float[Tensor, "*s"]:
    """Return each token's `kl_estimate`, but with the gradient of the KL itself.

    Every estimator gets the gradient of w · x² / 2, where x = log π_θ − log π_ref, and where w =
    min(π_θ / π_old, 10) is treated as a constant. As long as w is below its bound, the expected
    gradient over samples from π_old is E[w x ∇log π_θ] = ∇KL(π_θ‖π_ref). Tang and Munos 2025,
    arXiv:2506.09477

    If π_old is π_θ, w is 1. Clipped estimates have the same gradient.
    """
    value = kl_estimate(logprobs, ref_logprobs, estimator).detach()
    log_weight = (logprobs.detach() - old_logprobs).clamp(max=math.log(MAX_KL_WEIGHT))
    surrogate = log_weight.exp() * (logprobs - ref_logprobs).square() / 2
    return value + (surrogate - surrogate.detach())


def kl_clamped(kl: Float[Tensor, "*s"]) -> Bool[Tensor, "*s"]:
    """Return a mask of tokens whose `kl_estimate` is clipped, counted in `train/kl_clamped`."""
    return kl.detach().abs() >= KL_BOUND


class KLController:
    """The coefficient β of the KL term, fixed or adapted to a target.

    Ziegler et al. 2019, §2.2, arXiv:1909.08593

    With a `target`, β ← β · (1 + clip(KL / target − 1, ±0.2) · min(n / horizon, 1)). `target` is in
    nats per action token, `horizon` in samples. The paper does not bound n / horizon; the bound
    keeps β positive for large batches. Without a target, β is always the flag's value, even in a
    resumed run.
    """

    def __init__(self, coef: float, *, target: float | None = None, horizon: int = 1) -> None:
        self.coef, self.target, self.horizon = coef, target, horizon
        self.last: float | None = None  # KL of the last update; None before the first update

    def update(self, kl: float, n: int) -> None:
        """Adapt β to the mean KL of `n` samples (nats per action token) if the mean is finite."""
        self.last = kl
        if self.target is None or not math.isfinite(kl):
            return
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        self.coef *= 1 + error * min(n / self.horizon, 1.0)

    def resume(self, coef: float, last: float | None) -> None:
        """Restore the last KL from a checkpoint and, if β adapts to a target, β."""
        self.last = last
        if self.target is not None:
            self.coef = coef
