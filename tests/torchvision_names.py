"""Just enough of torchvision for `import timm`, where there is none: names, of which FrozenBatchNorm2d alone works."""

import enum
import importlib.machinery
import sys
import types

import torch
from torch import nn


class InterpolationMode(enum.Enum):
    NEAREST, NEAREST_EXACT, BILINEAR, BICUBIC = "nearest", "nearest-exact", "bilinear", "bicubic"
    BOX, HAMMING, LANCZOS = "box", "hamming", "lanczos"


class FrozenBatchNorm2d(nn.Module):
    def __init__(self, num_features, eps=1e-5):
        super().__init__()
        self.eps = eps
        for name, value in (("weight", 1.0), ("bias", 0.0), ("running_mean", 0.0), ("running_var", 1.0)):
            self.register_buffer(name, torch.full((num_features,), value))

    def forward(self, x):
        scale = self.weight * (self.running_var + self.eps).rsqrt()
        return x * scale[None, :, None, None] + (self.bias - self.running_mean * scale)[None, :, None, None]


class _Stub(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {"__init__": lambda self, *args, **kwargs: None})
        setattr(self, name, made)
        return made


def _module(name, **members):
    module = _Stub(f"torchvision.{name}")
    module.__path__ = []
    module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None, is_package=True)
    module.__dict__.update(members)
    sys.modules[module.__name__] = module
    parent, _, last = module.__name__.rpartition(".")
    setattr(sys.modules[parent], last, module)
    return module


def install():
    """Put the names where `import torchvision` finds them."""
    top = _Stub("torchvision")
    top.__path__, top.__version__ = [], "0.28.0"
    top.__spec__ = importlib.machinery.ModuleSpec("torchvision", None, is_package=True)
    sys.modules["torchvision"] = top
    for name in ("transforms", "ops", "models", "datasets", "utils", "io"):
        _module(name)
    _module("transforms.functional", InterpolationMode=InterpolationMode)
    _module("transforms.v2")
    _module("transforms.v2.functional", InterpolationMode=InterpolationMode)
    _module("ops.misc", FrozenBatchNorm2d=FrozenBatchNorm2d)
    _module("models.feature_extraction")
    sys.modules["torchvision.transforms"].InterpolationMode = InterpolationMode
