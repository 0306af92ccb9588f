"""The curvature of the loss around a model: K-FAC, EK-FAC and diagonals, and exact Gauss–Newton products.

Examples:
    >>> import torch, unsum
    >>> model, data = torch.nn.Linear(3, 1), [torch.randn(3) for _ in range(8)]
    >>> unsum.curvature.fit(model, lambda model, x: model(x).square().sum(1), data)
    ekfac of 8 samples (empirical, expand): 2 tensors, 2 in Kronecker products, 0 by their diagonal
"""

from unsum.curvature.curvature import Curvature
from unsum.curvature.files import load
from unsum.curvature.fit import fit
from unsum.curvature.ggn import GaussNewton, ggn
from unsum.curvature.likelihood import Likelihood, categorical, convex, gaussian
from unsum.curvature.vectors import schedule_damping

__all__ = [
    "Curvature",
    "GaussNewton",
    "Likelihood",
    "categorical",
    "convex",
    "fit",
    "gaussian",
    "ggn",
    "load",
    "schedule_damping",
]
