"""Losses for preference pairs (DPO and its variants) and for labeled answers (KTO), as functions of
Σ log π.

h = (log π(y_w) − log π_ref(y_w)) − (log π(y_l) − log π_ref(y_l)); y_w is the chosen answer, and y_l
is the rejected answer.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import logsigmoid, relu

from openrlhf.algorithms.registry import Registry
from openrlhf.config import choices

PerPair = Float[Tensor, " P"]
BothAnswers = Float[Tensor, "P 2"]  # column 0: the chosen answer, column 1: the rejected answer
PerAnswer = Float[Tensor, " B"]


@dataclass(frozen=True, kw_only=True)
class Judged:
    """Preference pairs: Σ log π of each answer under policy and reference, in nats, and answer
    lengths.
    """

    policy: BothAnswers
    reference: BothAnswers  # zeros for a loss without a reference
    tokens: BothAnswers

    @property
    def h(self) -> PerPair:
        """h of each pair, in nats: the policy's preference for the chosen answer minus the
        reference's.
        """
        log_ratios = self.policy - self.reference
        return log_ratios[:, 0] - log_ratios[:, 1]

    @property
    def means(self) -> BothAnswers:
        """The mean log-probability per token of each answer."""
        return self.policy / self.tokens


@dataclass(frozen=True, kw_only=True)
class Strength:
    """Parameters of a preference loss: β, label smoothing ε in [0, ½), and the target margin γ."""

    beta: float
    smoothing: float = 0.0
    target: float = 0.0


PreferenceLossFunction = Callable[[Judged, Strength], PerPair]


PREFERENCE_LOSSES: Registry[PreferenceLossFunction] = Registry(
    "preference loss", choices.PREFERENCE_LOSSES, choices.PreferenceLossTraits
)
preference_loss = PREFERENCE_LOSSES.register  # the name is a value of --model.loss_type


@preference_loss("dpo")
def dpo(pairs: Judged, strength: Strength) -> PerPair:
    """Compute ℓ = −(1 − ε) log σ(βh) − ε log σ(−βh).

    Rafailov et al. 2023, eq. 7, arXiv:2305.18290

    ε > 0 is cDPO, which assumes that a label is wrong with probability ε: Mitchell 2023,
    ericmitchell.ai/cdpo.pdf
    """
    logits, wrong = strength.beta * pairs.h, strength.smoothing
    return -(1 - wrong) * logsigmoid(logits) - wrong * logsigmoid(-logits)


@preference_loss("robust")
def robust(pairs: Judged, strength: Strength) -> PerPair:
    """Compute ℓ = (−(1 − ε) log σ(βh) + ε log σ(−βh)) / (1 − 2ε).

    Chowdhury et al. 2024, eq. 7, arXiv:2403.00409
    """
    logits, wrong = strength.beta * pairs.h, strength.smoothing
    unscaled = -(1 - wrong) * logsigmoid(logits) + wrong * logsigmoid(-logits)
    return unscaled / (1 - 2 * wrong)


@preference_loss("ipo")
def ipo(pairs: Judged, strength: Strength) -> PerPair:
    """Compute ℓ = (h − 1/(2β))².

    Azar et al. 2023, eq. 17, arXiv:2310.12036
    """
    return (pairs.h - 1 / (2 * strength.beta)).square()


@preference_loss("hinge")
def hinge(pairs: Judged, strength: Strength) -> PerPair:
    """Compute ℓ = max(0, 1 − βh).

    Zhao et al. 2023 (SLiC), arXiv:2305.10425; Liu et al. 2023, arXiv:2309.06657
    """
    return relu(1 - strength.beta * pairs.h)


@preference_loss("simpo")
def simpo(pairs: Judged, strength: Strength) -> PerPair:
    """Compute ℓ = −log σ(β (log π(y_w)/|y_w| − log π(y_l)/|y_l|) − γ).

    Meng et al. 2024, eq. 6, arXiv:2405.14734
    """
    chosen, rejected = pairs.means.unbind(1)
    return -logsigmoid(strength.beta * (chosen - rejected) - strength.target)


@preference_loss("orpo")
def orpo(pairs: Judged, strength: Strength) -> PerPair:
    """Compute ℓ = −log P(y_w) − β log σ(log odds(y_w) − log odds(y_l)).

    P is the geometric mean of π over an answer's tokens. Hong et al. 2024, eqs. 6 and 7,
    arXiv:2403.07691, where β is called λ.
    """
    chosen, rejected = pairs.means.unbind(1)
    log_odds_ratio = _log_odds(chosen) - _log_odds(rejected)
    return -chosen - strength.beta * logsigmoid(log_odds_ratio)


def _log_odds(mean: PerPair) -> PerPair:
    """Compute log(p / (1 − p)) for p = exp(mean), with p = 1 replaced by the largest number below
    1.
    """
    below = mean.clamp(max=-torch.finfo(mean.dtype).eps)
    return below - torch.log(-torch.expm1(below))


def kto(
    ratio: PerAnswer,
    desirable: Bool[Tensor, " B"],
    kl: float,
    *,
    beta: float,
    desirable_weight: float,
    undesirable_weight: float,
) -> PerAnswer:
    """Compute ℓ = w_D (1 − σ(β(r − z))) for desirable answers and w_U (1 − σ(β(z − r))) for
    undesirable ones.

    Ethayarajh et al. 2024, eq. 8, arXiv:2402.01306

    `ratio` is r = log π(y) − log π_ref(y). `kl` is z: the mean of r over prompts paired with
    answers to different prompts, computed without gradient. A negative z counts as 0.
    """
    reference_point = max(kl, 0.0)
    sign = desirable.to(ratio.dtype) * 2 - 1
    weights = torch.where(desirable, desirable_weight, undesirable_weight).to(ratio.dtype)
    gain = sign * (ratio - reference_point)
    return weights * torch.sigmoid(-beta * gain)
