"""Layers with a kernel of their own: convolutions, pooling, resizing, normalisations, recurrent layers, losses."""

from __future__ import annotations

import re

from torch import Tensor

from unsum.graph.layout import UNSEEN, Layout, Mapped
from unsum.seams.nodes import saved_or
from unsum.travel.table import MIXED, SILENT, Answer, At, travels


@travels("", prefixes="Convolution SlowConv MkldnnConvolution CudnnConvolution ConvDepthwise")
def convolution(at: At) -> Layout | Answer:
    """(batch, channels, …); weight and bias are used by the whole batch."""
    if list(at.varies) != [0]:
        return SILENT
    return at.same() if at.edge == 0 else MIXED


@travels("", prefixes="AvgPool AdaptiveAvgPool MaxPool AdaptiveMaxPool FractionalMaxPool MaxUnpool "
         "MkldnnAdaptiveAvgPool Upsample MkldnnMaxPool ReflectionPad ReplicationPad")  # fmt: skip
def pool(at: At) -> Layout | Answer:
    """Along the last dimensions, of which the kind's name says how many."""
    found = re.search(r"(\d)D", at.kind)
    spatial = int(found[1]) if found else 3
    return at.same_if(all(d < len(at.shape) - spatial for d in at.varies))


@travels("GridSampler2D GridSampler3D CudnnGridSampler")
def grid_sample(at: At) -> Layout | Answer:
    """Images (batch, channels, …), and (batch, …, 2) places in them."""
    return at.same_if(list(at.varies) == [0])


@travels("Im2Col Col2Im ChannelShuffle")
def windows(at: At) -> Layout | Answer:
    """(batch, …)."""
    return at.same_if(list(at.varies) == [0] and len(at.shape) > 2)


@travels("PixelShuffle PixelUnshuffle")
def pixels(at: At) -> Layout | Answer:
    """(…, channels, height, width)."""
    return at.same_if(all(d < len(at.shape) - 3 for d in at.varies))


@travels("", prefixes="NativeLayerNorm FusedRmsNorm")
def layer_norm(at: At) -> Layout | Answer:
    """The last dimensions are normalised; scale and shift are used at every position."""
    if any(d >= len(at.shape) - len(at.saved("normalized_shape")) for d in at.varies):
        return SILENT
    return at.same() if at.edge == 0 else MIXED


@travels("NativeGroupNorm")
def group_norm(at: At) -> Layout | Answer:
    """(batch, channels, …)."""
    if list(at.varies) != [0]:
        return SILENT
    return at.same() if at.edge == 0 else MIXED


@travels("NativeBatchNorm CudnnBatchNorm MiopenBatchNorm NativeBatchNormLegitNoTraining NativeBatchNormLegit "
         "BatchNormWithUpdate BatchNormNoUpdate")  # fmt: skip
def batch_norm(at: At) -> Layout | Answer:
    """In training, numbers of a channel meet over the batch; samples along the channels stay apart."""
    if list(at.varies) == [1]:
        return at.same() if at.edge == 0 else at.along(0)
    if list(at.varies) != [0]:
        return SILENT
    trains = at.kind != "NativeBatchNormLegitNoTraining" and saved_or(at.node, "training", True)
    return MIXED if at.edge or trains else at.same()


@travels("CudnnRnn MkldnnRnnLayer", together=True)
def recurrent(at: At) -> Layout | Answer:
    """Sequences are (time, batch, features), of cuDNN also with the batch first; states end in (batch, features). Along
    time samples meet, and so they do at the weights."""
    is_cudnn = at.kind == "CudnnRnn"
    if any(out is not None and len(out.shape) < 3 for out in at.outs[:1]):
        return SILENT  # sequences of unequal lengths, packed
    batch = 0 if is_cudnn and at.saved("batch_first") else 1
    of, alone, known = None, None, None
    for k, out in enumerate(at.outs):
        if out is None:
            continue
        rows = (-1, out.map[None]) if isinstance(out, Mapped) and not out.map.dim() else at.rows(out)
        if rows is None:
            return SILENT
        wanted = batch if k == 0 else len(out.shape) - 2
        if rows[0] != wanted:
            alone = _owner(rows[1]) if out.shape[wanted] == 1 else None  # a batch of one sample
            if alone is None:
                return MIXED
        if known is not None and not at.journey.agree(known, rows[1]):
            return SILENT  # sequences of some samples, and states of others
        of, known = (out, rows[1]) if of is None else (of, known)
    is_state = len(at.arg) == 3 if is_cudnn else at.edge > 4  # behind the input and four weights
    if at.edge and not is_state:
        return MIXED
    dim = len(at.arg) - 2 if at.edge else batch
    return at.along(dim, of) if alone is None else Mapped(alone, at.arg)


def _owner(rows: Tensor) -> Tensor | None:
    """The one sample of all rows of which something is known."""
    seen = rows[rows != UNSEEN]
    return seen[0] if len(seen) and bool((seen == seen[0]).all()) else None


@travels("NllLoss NllLoss2D MultiMarginLoss MultilabelMarginLoss")
def class_losses(at: At) -> Layout | Answer:
    """One loss for each row of scores; behind the classes, one for each place."""
    if len(at.arg) != len(at.shape) + 1 or len(at.varies) != 1:
        return SILENT
    (dim,) = at.varies
    return at.along(0 if dim == 0 else dim + 1)


@travels("CtcLoss CudnnCtcLoss")
def ctc(at: At) -> Layout | Answer:
    """(time, batch, classes) → (batch,)."""
    return at.along(1) if len(at.arg) == 3 and list(at.varies) == [0] else SILENT


@travels("Embedding EmbeddingBag")
def embedding(at: At) -> Layout | Answer:
    """A table that every position may look up."""
    return MIXED if at.edge == 0 and list(at.varies)[-1:] != [len(at.shape) - 1] else SILENT
