"""unsum: the gradient before the sum.

What flows through a network, forward and backward, at places that have names; what if it were different; and whose
gradient it is.
"""

import logging
import os

from unsum import curvature, errors, index, integrations, testing
from unsum.capture import capture
from unsum.check import check
from unsum.draw.draw import draw
from unsum.edit import edit
from unsum.gradients import gradients, mark_samples
from unsum.heatmap import heatmap
from unsum.influence import influence
from unsum.listing import sites
from unsum.mark import mark
from unsum.patch_sweep import patch_sweep
from unsum.reducers import Kronecker, Norms, Project, SecondMoment, TokenNorms, WeightedSum
from unsum.report import report
from unsum.samples import dim, packed
from unsum.training import clip_per_sample, private, sinks, watch
from unsum.verbs import add, clip, clip_norm, mean_ablate, noise, remove, replace, reverse, scale, steer, zero

if os.environ.get("UNSUM_LOG"):  # tell what was learnt and decided
    logging.basicConfig()
    logging.getLogger("unsum").setLevel(logging.INFO)

__version__ = "0.1.0"

__all__ = [
    "Kronecker",
    "Norms",
    "Project",
    "SecondMoment",
    "TokenNorms",
    "WeightedSum",
    "add",
    "capture",
    "check",
    "clip",
    "clip_norm",
    "clip_per_sample",
    "curvature",
    "dim",
    "draw",
    "edit",
    "errors",
    "gradients",
    "heatmap",
    "index",
    "influence",
    "integrations",
    "mark",
    "mark_samples",
    "mean_ablate",
    "noise",
    "packed",
    "patch_sweep",
    "private",
    "remove",
    "replace",
    "report",
    "reverse",
    "scale",
    "sinks",
    "sites",
    "steer",
    "testing",
    "watch",
    "zero",
]
