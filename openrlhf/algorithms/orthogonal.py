"""Orthogonalizes matrices, as needed for Muon's steps."""

import torch
from torch import Tensor

# Coefficients of the quintic iteration, which brings all singular values close to 1 in a few steps.
# The singular values do not converge to exactly 1.
A, B, C = 3.4445, -4.7750, 2.0315
SMALLEST_NORM = 1e-7  # below this norm, a matrix is not scaled to norm 1


@torch.no_grad()
def orthogonalized(matrix: Tensor, iterations: int = 5) -> Tensor:
    """Return an approximation of U Vᵀ for matrices U S Vᵀ of shape (…, m, n).

    Each Newton-Schulz iteration computes X ← a X + b (X Xᵀ) X + c (X Xᵀ)² X. After five iterations,
    the nonzero singular values are between about 0.7 and 1.2. The result depends on the matrix's
    direction but not on its norm. The computation uses the matrix's data type.

    Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/
    """
    is_tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix
    if is_tall:
        x = x.mT
    norm = x.square().sum(dim=(-2, -1), keepdim=True).sqrt()
    x = x / norm.clamp(min=SMALLEST_NORM)
    for _ in range(iterations):
        gram = x @ x.mT
        x = A * x + (B * gram + C * (gram @ gram)) @ x
    if is_tall:
        x = x.mT
    return x
