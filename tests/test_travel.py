"""The table of how samples travel against torch's own test bed: every operation of `op_db`, every node that it makes."""

import warnings
from collections import Counter

import pytest
import torch

from unsum.errors import UnsupportedError
from unsum.graph.layout import Mapped, Regular, same
from unsum.graph.nodes import below, is_leaf, ordered
from unsum.nested import leaves
from unsum.travel import MIXED, SILENT, Journey, down, start
from unsum.travel.values import ask


def layouts(shape):
    """Ways in which samples may lie in a tensor: whole dimensions, blocks, and rows in any order."""
    for dim, size in enumerate(shape):
        for n, block in {(size, 1): None, (size // 2, 2): None, (size // 2, 1): None}:
            if n > 1 and size % (n * block) == 0:
                yield Regular(tuple(shape), n, dim, block)
    if shape and shape[0] > 2:
        rows = torch.tensor([(k * 2) % 3 for k in range(shape[0])], dtype=torch.int32)
        yield Mapped(rows, tuple(shape[1:]), is_whole=True)


def of(layout):
    return layout.n if isinstance(layout, Regular) else 3


def shape_of(child, output):
    return tuple(child.variable.shape if is_leaf(child) else child._input_metadata[output].shape)


def results(op, dtype):
    for sample in op.sample_inputs("cpu", dtype, requires_grad=True):
        try:
            yield op(sample.input, *sample.args, **sample.kwargs)
        except Exception:
            continue


def judged(out, counts, wrong, name):
    roots = [t.grad_fn for _, t in leaves(out) if isinstance(t, torch.Tensor) and t.grad_fn is not None]
    for node in ordered(roots):
        if is_leaf(node) or isinstance(node, torch.autograd.function.BackwardCFunction):
            continue
        for output, meta in enumerate(node._input_metadata):
            if not meta.dtype.is_floating_point or len(tuple(meta.shape)) == 0 or 0 in tuple(meta.shape):
                continue
            for layout in layouts(tuple(meta.shape)):
                outs = [layout if k == output else None for k in range(len(node._input_metadata))]
                at = start(node, outs, Journey(of(layout)))
                said = {k: down(at, k, shape_of(c, o)) for k, c, o in below(node)}
                if all(each is SILENT for each in said.values()):
                    counts["silent"] += len(said)
                    continue
                try:
                    values, _ = ask(node, outs, of(layout))
                except (UnsupportedError, RuntimeError, AssertionError):
                    counts["cannot be asked"] += 1
                    continue
                for k, answer in said.items():
                    value = values[k]
                    if answer is SILENT or value is None:
                        counts["silent"] += 1
                    elif answer is MIXED:
                        counts["mixed" if value is MIXED else "mixed, though values say otherwise"] += 1
                    elif value is MIXED or answer.shape != value.shape or not same(answer, value):
                        wrong.append(f"{name}: {node.name()} edge {k}: {layout} -> {answer}, by values {value}")
                    else:
                        counts["right"] += 1


CHUNKS = 8


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_the_table_never_contradicts_values(chunk):
    from torch.testing._internal.common_methods_invocations import op_db  # which changes torch's flags for good

    counts, wrong = Counter(), []
    for op in sorted(op_db, key=lambda op: op.formatted_name)[chunk::CHUNKS]:
        if not op.supports_autograd or torch.float64 not in op.supported_dtypes("cpu"):
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            for out in results(op, torch.float64):
                judged(out, counts, wrong, op.formatted_name)
    print(dict(counts))
    assert not wrong, f"{len(wrong)} wrong: " + "\n".join(wrong[:20])
    assert counts["right"] > 100
