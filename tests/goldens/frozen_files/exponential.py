"""A plug-in file: a preference loss."""

from openrlhf.algorithms.preference_losses import preference_loss


@preference_loss("exponential")
def exponential(pairs, strength):
    return (-strength.beta * pairs.h).exp()
