"""Arguments of operations that have no edge in the graph: what would fit there, and whether it was kept."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import torch
from torch import Tensor

from unsum.graph.nodes import Node, below, is_leaf
from unsum.seams.nodes import SAVED, outputs_of, packed, saved_of, saved_or

Opening = tuple[Node, int]  # a node, and which of its arguments


_SAID = {
    **dict.fromkeys(("addmm", "mm", "addmv", "mv", "linear"), "linear"),
    **dict.fromkeys(("bmm", "baddbmm", "dot"), "matmul"),
    **dict.fromkeys(("convolution", "mkldnn_convolution", "cudnn_convolution", "thnn_conv2d"), "conv"),
    **dict.fromkeys(("mkldnn_rnn_layer", "cudnn_rnn", "miopen_rnn"), "recurrent layer"),
    **dict.fromkeys(("cudnn_batch_norm", "miopen_batch_norm", "batch_norm_with_update"), "batch_norm"),
    **dict.fromkeys(("unsafe_split", "split_with_sizes", "unsafe_split_with_sizes"), "split"),
    **dict.fromkeys(("nll_loss2d", "nll_loss_nd"), "nll_loss"),
    "add": "+",
}


def spoken(name: str) -> str:
    """An operation as readers call it.

    Examples:
        >>> spoken("addmm"), spoken("add"), spoken("max_pool2d_with_indices"), spoken("relu")
        ('linear', '+', 'max_pool2d', 'relu')
    """
    return "attention" if name.startswith("sdp_") else _SAID.get(name, name.removesuffix("_with_indices"))


def operation_name(node: Node) -> str:
    """A node's name as it is said.

    Examples:
        >>> operation_name(torch.ones(2, requires_grad=True).log_softmax(0).grad_fn)
        'log_softmax'
    """
    name = re.sub(r"Backward\d*$", "", node.name().rpartition(".")[2].rpartition("::")[2])
    if name == "CompiledFunction":
        return "compiled"
    if isinstance(node, torch.autograd.function.BackwardCFunction):
        return name
    name = re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z0-9])(?=[A-Z][a-z])", "_", name).lower()
    if name == "mul" and _is_dropout(node):
        return "dropout"
    return name.removeprefix("native_").replace("scaled_dot_product", "sdp").replace("_for_cpu", "")


def _is_dropout(node: Node) -> bool:
    """Whether a product is that of a dropout on a CPU: the other factor, of the same shape, is zero here and there and
    1 / (1 - p) elsewhere. After a backward that has freed the graph it cannot be told."""
    if len(below(node)) != 1 or not _is_kept(node, "other"):
        return False
    other = saved_of(node, "other")
    if other.requires_grad or tuple(other.shape) != tuple(outputs_of(node)[0].shape) or not other.numel():
        return False
    most = other.max()
    return bool(most > 1 and ((other == 0) | (other == most)).all() and (other == 0).any())


def is_hooked(saved: Any) -> bool:
    """Whether a saved tensor went through somebody's hooks: a checkpoint's, or those that move it elsewhere."""
    return getattr(saved, "unpack_hook", None) is not None


def openings(node: Node) -> Iterator[tuple[int, Callable[[Tensor], bool]]]:
    """The arguments of a node that have no edge, and what shapes would fit there. -1: no argument with an edge."""
    name = node.name()
    shape = tuple(outputs_of(node)[0].shape)
    children = [_shape(child, output) for _, child, output in below(node)]
    if name == "EmbeddingBackward0":
        if not _is_kept(node, "indices"):
            yield -1, lambda t: not t.is_floating_point() and tuple(t.shape) == shape[:-1]
        return
    if name.startswith("NllLoss") and children:
        rows = prod(children[0]) // max(children[0][-1 if len(children[0]) < 2 else 1], 1)
        if not _is_kept(node, "target"):
            yield -1, lambda t: not t.is_floating_point() and t.numel() == rows
        return
    for slot, (child, _) in enumerate(node.next_functions):
        arguments = next((names for start, names in _KEPT.items() if name.startswith(start)), ())
        if child is None and not (slot < len(arguments) and _is_kept(node, arguments[slot])):
            yield slot, _fits(node, name, slot, shape, children)


def _is_kept(node: Node, argument: str) -> bool:
    """Whether what is at this opening was kept: then it has been looked at, and is nothing that has a name."""
    kept = dict(packed(node)).get(SAVED + argument)
    return kept is not None and not is_hooked(kept) and getattr(kept, "data", None) is not None


def _shape(child: Node, output: int) -> tuple[int, ...]:
    return tuple(child.variable.shape if is_leaf(child) else outputs_of(child)[output].shape)


_SIZES = {
    ("MmBackward0", 0): "self_sym_sizes",
    ("MmBackward0", 1): "mat2_sym_sizes",
    ("AddmmBackward0", 1): "mat1_sym_sizes",
    ("AddmmBackward0", 2): "mat2_sym_sizes",
}
# The arguments with a gradient, in their order; which of them a node keeps, it says itself.
_KEPT = {
    **dict.fromkeys(("MulBackward0", "DivBackward0", "Maximum", "Minimum"), ("self", "other")),
    **dict.fromkeys(("MmBackward", "BmmBackward"), ("self", "mat2")),
    "AddmmBackward": ("self", "mat1", "mat2"),
    "AddmvBackward": ("self", "mat", "vec"),
    "MvBackward": ("self", "vec"),
    "DotBackward": ("self", "tensor"),
    "BaddbmmBackward": ("self", "batch1", "batch2"),
    "ConvolutionBackward": ("input", "weight"),
    "LinearBackward": ("input", "weight"),
    "AddcmulBackward": ("self", "tensor1", "tensor2"),
    "AddcdivBackward": ("self", "tensor1", "tensor2"),
    "LerpBackward": ("self", "end", "weight"),
    "PowBackward1": ("self", "exponent"),
    **dict.fromkeys(("MseLoss", "SmoothL1Loss", "HuberLoss", "BinaryCrossEntropy", "KlDiv"), ("self", "target")),
}
_ALIKE = ("Add", "Sub", "Mul", "Div", "Rsub", "Addcmul", "Where", "Lerp", "Maximum", "Minimum", "Pow")


def _fits(
    node: Node, name: str, slot: int, shape: tuple[int, ...], children: list[tuple[int, ...]]
) -> Callable[[Tensor], bool]:
    if (name, slot) in _SIZES:
        sizes = tuple(saved_or(node, _SIZES[name, slot], ()))
        return lambda t: t.numel() == prod(sizes) and t.dim() > 0 and t.shape[-1] in sizes[-1 if slot < 2 else 0 :]
    if name == "ConvolutionBackward0" and slot == 0 and children:
        groups = int(saved_of(node, "groups"))
        channels = children[0][1] * groups
        return lambda t: t.dim() == len(shape) and t.shape[0] == shape[0] and t.shape[1] == channels
    if name.startswith(_ALIKE):
        return lambda t: t.is_floating_point() and t.dim() > 0 and _spreads(tuple(t.shape), shape)
    if name == "AddmmBackward0" and slot == 0:
        return lambda t: t.is_floating_point() and tuple(t.shape) in (shape, shape[-1:])
    if "Loss" in name or name.startswith(("BinaryCrossEntropy", "KlDiv")):
        return lambda t: t.is_floating_point() and children != [] and tuple(t.shape) == children[0]
    return lambda t: t.dim() > 0 and tuple(t.shape) in (shape, *children)


def _spreads(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    """Whether a tensor of this shape is broadcast to the other."""
    try:
        return tuple(torch.broadcast_shapes(shape, to)) == to and prod(shape) > 1
    except RuntimeError:
        return False
