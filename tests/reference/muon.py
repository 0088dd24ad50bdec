"""Muon in float64, written from the publication.

Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/
"""

from __future__ import annotations

import torch
from torch import Tensor


def newton_schulz(matrix: Tensor, iterations: int = 5) -> Tensor:
    """Return the matrix after the quintic iteration on its singular values."""
    u, singular_values, vt = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = singular_values / singular_values.norm()
    for _ in range(iterations):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u * s @ vt


class Muon:
    """The momentum of one matrix, and the matrix's steps."""

    def __init__(self, *, momentum: float = 0.95, nesterov: bool = True, iterations: int = 5):
        self.momentum, self.nesterov, self.iterations = momentum, nesterov, iterations
        self.buffer: Tensor | None = None

    def step(self, gradient: Tensor) -> Tensor:
        """Return the change in the matrix at a learning rate of 1."""
        if self.buffer is None:
            self.buffer = torch.zeros_like(gradient)
        self.buffer = self.momentum * self.buffer + (1 - self.momentum) * gradient
        direction = self.buffer
        if self.nesterov:
            direction = (1 - self.momentum) * gradient + self.momentum * self.buffer
        rows, columns = gradient.shape
        return -(max(1, rows / columns) ** 0.5) * newton_schulz(direction, self.iterations)
