"""Which operations keep samples apart by their shapes alone, whatever the numbers in them? Only through these may
owners be remembered. Others may keep samples apart by zeros or by numbers that nobody sees (a custom Function, a write
to part of a tensor): a later batch would mix them without a trace.

Kinds are named as the graph names them, without "Backward0".
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch.autograd.function import BackwardCFunction

from unsum.graph.layout import Layout, Regular
from unsum.graph.nodes import Node, signed


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_VIEWS = _names(
    "View UnsafeView ReshapeAlias Unsqueeze Squeeze ViewAsReal ViewAsComplex ViewAs Alias Clone ToCopy "
    "Contiguous Detach CopyBackwards Conj ResolveConj Real Imag"
)
_PLACED = _names(  # positions go where shapes and plain numbers say, which are part of a plan
    "Permute Transpose T MT Slice Select Split SplitWithSizes UnsafeSplit UnsafeSplitWithSizes Cat Stack Unbind "
    "Roll Flip Narrow ConstantPadNd ReflectionPad1D ReflectionPad2D ReflectionPad3D ReplicationPad1D "
    "ReplicationPad2D ReplicationPad3D Diagonal DiagEmbed Tril Triu PixelShuffle "
    "PixelUnshuffle Mean Sum Prod Var Std VarMean StdMean Norm LinalgVectorNorm Logsumexp Amax Amin "
    "ChannelShuffle Movedim"
)
_ELEMENTWISE = _names(
    "Expand Repeat "
    "Add Sub Rsub Mul Div Neg Exp Exp2 Expm1 Log Log1P Log2 Log10 Sqrt Rsqrt Reciprocal Pow Abs Square Sigmoid "
    "Tanh Relu LeakyRelu Elu Celu Gelu Silu Mish Softplus Hardsigmoid Hardswish Hardtanh Hardshrink Softshrink "
    "Clamp ClampMin ClampMax Erf Erfc Erfinv Sin Cos Tan Asin Acos Atan Atan2 Sinh Cosh Asinh Acosh Atanh Sinc "
    "Addcmul Addcdiv Lerp Maximum Minimum Fmax Fmin Where MaskedFill NativeDropout PreluKernel RreluWithNoise "
    "LogSigmoid Threshold Sign Sgn Floor Round Ceil Trunc Fmod Remainder NanToNum Logit Xlogy Hypot Logaddexp "
    "Logaddexp2 Glu MseLoss L1Loss SmoothL1Loss HuberLoss KlDiv BinaryCrossEntropy BinaryCrossEntropyWithLogits "
    "Angle Complex Polar Dist"
)
_ALONG = _names(  # by their `dim`
    "Softmax LogSoftmax SafeSoftmax Cumsum Cumprod Logcumsumexp FftC2C FftR2C FftC2R"
)
_IMAGES = ("Convolution", "SlowConv", "MkldnnConvolution", "CudnnConvolution", "AvgPool", "AdaptiveAvgPool", "MaxPool",
           "AdaptiveMaxPool", "FractionalMaxPool", "MaxUnpool", "Upsample", "GridSampler", "Im2Col", "Col2Im", "Unfold",
           "AsStrided")  # fmt: skip
_ATTENTION = ("ScaledDotProduct", "EfficientAttention", "FlashAttention")
_RECURRENT = ("MkldnnRnn", "CudnnRnn", "ThnnFused")
_INDEXED = _names(  # by whole numbers that they have saved, which are compared
    "Index IndexSelect Gather ScatterAdd Scatter IndexAdd IndexPut IndexCopy IndexFill MaskedSelect MaskedScatter "
    "Take TakeAlongDim Topk Sort Max Min Mode Kthvalue Median Cummax Cummin Embedding EmbeddingBag NllLoss "
    "NllLoss2D UnsafeIndex"
)
PRODUCTS = {"MmBackward0": (0, 1), "BmmBackward0": (0, 1), "AddmmBackward0": (1, 2), "BaddbmmBackward0": (1, 2)}


def kind_of(node: Node) -> str:
    """The name of a node's operation."""
    return re.sub(r"Backward\d*$", "", node.name())


def is_steady(node: Node, layout: Layout | None, children: Sequence[Layout | None]) -> bool:
    """Whether samples stay apart at this node for its shapes' sake: `children` are the layouts of its data arguments.
    Products and moved rows are looked at elsewhere."""
    if isinstance(node, BackwardCFunction):
        return False
    kind, name = kind_of(node), node.name()
    if kind in _VIEWS or kind in _PLACED or kind in _INDEXED or name in PRODUCTS or kind == "GroupedMm":
        return True
    if name.startswith(_RECURRENT):
        return True
    if not isinstance(layout, Regular):
        return kind in _ELEMENTWISE or kind in _ALONG or name.startswith(("NativeLayerNorm", "FusedRmsNorm"))
    if kind in _ELEMENTWISE:
        return all(_is_aligned(layout, child) for child in children)
    if kind in _ALONG:
        dims = node._saved_dim if isinstance(node._saved_dim, tuple | list) else (node._saved_dim,)
        return layout.dim not in [signed(dim) % len(layout.shape) for dim in dims]
    if name.startswith(_IMAGES):
        return layout.dim == 0 and all(isinstance(child, Regular) and child.dim == 0 for child in children)
    if name.startswith(_ATTENTION):
        return layout.dim < len(layout.shape) - 2
    if name.startswith(("NativeLayerNorm", "FusedRmsNorm")):
        return layout.dim < len(layout.shape) - len(node._saved_normalized_shape)
    if name.startswith("NativeGroupNorm"):
        return layout.dim == 0
    return "BatchNorm" in name and (layout.dim == 1 or not getattr(node, "_saved_training", True))


def _is_aligned(layout: Regular, child: Layout | None) -> bool:
    """Whether an argument has its samples where the result has them: one that was spread over them is summed over
    samples, and only zeros could keep these apart."""
    if not isinstance(child, Regular):
        return False
    dim = layout.dim - len(layout.shape) + len(child.shape)
    return child.dim == dim and child.shape[dim] == layout.shape[layout.dim] and child.block == layout.block


def keeps_rows(node: Node, edge: int, shape: tuple[int, ...]) -> bool:
    """Whether every row of a node's gradient goes to the same row of the argument of this shape at an edge."""
    kind, name = kind_of(node), node.name()
    if isinstance(node, BackwardCFunction):
        return False
    if not shape or tuple(node._input_metadata[0].shape[:1]) != shape[:1]:
        return False
    if kind in _VIEWS or kind in _ELEMENTWISE:
        return True
    if kind in (
        "Split",
        "SplitWithSizes",
        "UnsafeSplit",
        "UnsafeSplitWithSizes",
        "Slice",
        "Select",
        "Narrow",
        "Softmax",
    ):
        return bool(signed(node._saved_dim) % (len(node._input_metadata[0].shape) + (kind == "Select")) != 0)
    if name in PRODUCTS:
        return edge == PRODUCTS[name][0] and len(node._input_metadata[0].shape) == 2
    return (kind == "GroupedMm" and edge == 0) or name.startswith(("NativeLayerNorm", "FusedRmsNorm"))
