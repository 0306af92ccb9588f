"""What shape the loss has around a model: K-FAC, EK-FAC and diagonals, and exact Gauss–Newton products."""

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
