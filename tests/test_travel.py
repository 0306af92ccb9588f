"""The table of how samples travel against torch's own test bed: every node that the operations of `op_db` make."""

import warnings
from collections import Counter

import pytest
import torch
from reference import per_sample_gradients
from torch import nn
from torch.nn import functional as F

import unsum
from unsum.errors import UnsupportedError
from unsum.graph.layout import Mapped, Regular, same
from unsum.graph.nodes import below, is_leaf, ordered
from unsum.nested import leaves
from unsum.travel import MIXED, SILENT, Journey, down, start, table
from unsum.travel.table import entry
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


# ---- without an entry, values decide -------------------------------------------------------------------------------


class Many(nn.Module):
    """As many kinds of operations as fit on a page: tokens, images, recurrence, routing."""

    def __init__(self):
        super().__init__()
        self.tokens, self.attend = nn.Embedding(11, 8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.up, self.down, self.norm = nn.Linear(8, 12), nn.Linear(12, 8), nn.LayerNorm(8)
        self.conv, self.groups = nn.Conv1d(8, 8, 3, padding=1), nn.GroupNorm(2, 8)
        self.cell, self.experts = nn.GRU(8, 8, batch_first=True), nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 3)

    def forward(self, ids):
        n, t = ids.shape
        h = self.tokens(ids) + torch.linspace(0, 1, t, dtype=torch.float64)[:, None]
        h = h + self.attend(h, h, h, need_weights=False)[0]
        h = self.norm(h + self.down(F.gelu(self.up(h))))
        one, two = h.chunk(2, -1)
        h = torch.cat([one.sigmoid() * two, two.roll(1, 1).flip(1)], -1)
        h = h + F.avg_pool1d(F.pad(self.groups(self.conv(h.mT)), (1, 1)), 3, 1).transpose(1, 2)
        h = h + self.cell(h)[0] - h.mean(1, keepdim=True)
        flat = h.reshape(n * t, 8)
        out = torch.zeros_like(flat)
        for k, expert in enumerate(self.experts):
            rows = (ids.flatten() % 2 == k).nonzero()[:, 0]
            out = out.index_add(0, rows, expert(flat[rows]))
        h = torch.stack([out.view(n, t, 8), h], 1).softmax(-1).unbind(1)[0].squeeze(0)
        h = torch.where(h > 0, h, h.exp()).clamp_min(0.1).log().view(n, t, 8)
        top = h.logsumexp(1) + h.amax(1) + h.topk(1, 1)[0][:, 0] + h[torch.arange(n), ids[:, 0] % t]
        scores = torch.bmm(top[:, None], h.transpose(1, 2))[:, 0].cumsum(1).sum(1, keepdim=True)
        return self.head(top.tanh() + scores.sqrt().expand(n, 8).clone())


def kinds_of(model):
    out = model(torch.randint(11, (3, 5)))
    return {entry(node.name())[0] for node in ordered([out.grad_fn]) if not is_leaf(node)}


def test_a_page_of_operations_is_known_to_the_table():
    known = {kind for kind in kinds_of(Many().double()) if entry(kind)[1] is not None}
    assert len(known) > 35


def entries_of(model):
    """What the table is asked for, where it has an answer."""
    found = {
        k if k in table.TABLE else next((p for p in table.PREFIXES if k.startswith(p)), "") for k in kinds_of(model)
    }
    return sorted(found - {""})


@pytest.mark.parametrize("kind", entries_of(Many().double()))
def test_without_an_entry_of_the_table_values_decide_and_are_right(kind, monkeypatch):
    torch.manual_seed(0)
    model = Many().double()
    for entries in (table.TABLE, table.PREFIXES):
        monkeypatch.setattr(table, "TABLE" if entries is table.TABLE else "PREFIXES", {
            k: v for k, v in entries.items() if k != kind
        })  # fmt: skip
    monkeypatch.setattr(table, "_kinds", {})
    loss = lambda model, ids: model(ids).square().sum()
    for n, t in ((3, 5), (3, 5), (4, 6), (2, 4), (4, 4)):
        ids = torch.randint(11, (n, t))
        truth = per_sample_gradients(model, loss, ids)
        with unsum.gradients(model, unsum.Norms()) as g:
            loss(model, ids).backward()
        for name, squares in g[unsum.Norms].by_parameter().items():
            torch.testing.assert_close(squares, truth[name].flatten(1).square().sum(1), rtol=1e-7, atol=1e-9)


# ---- an entry that is wrong ------------------------------------------------------------------------------------------


def planted(monkeypatch, kind, answer):
    """A fault in the table: this kind of node is said to do something else."""
    monkeypatch.setattr(table, "TABLE", {**table.TABLE, kind: answer})
    monkeypatch.setattr(table, "_kinds", {})


FAULTS = {
    "a transposition that keeps samples where they are": ("Transpose", lambda at: at.same()),
    "a flip that leaves rows in place": ("Flip", lambda at: at.same()),
    "a hyperbolic tangent that turns samples over": ("Tanh", lambda at: at.along(1)),
    "an index that leaves rows in place": ("Index", lambda at: at.same()),
}


class Turns(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):  # (4, 4, 4): all sizes coincide
        h = self.a(x).transpose(0, 1).softmax(-1).transpose(0, 1).flip(0).flip(0)
        order = torch.arange(len(h)).roll(1)
        h = h[order][order.argsort()]
        return self.b(torch.bmm(h, h.tanh()))


@pytest.mark.parametrize("fault", FAULTS)
def test_an_entry_that_is_wrong_is_found_by_values(fault, monkeypatch, caplog):
    torch.manual_seed(0)
    model, x = Turns().double(), torch.randn(4, 4, 4, dtype=torch.float64)
    loss = lambda model, x: model(x).square().sum()
    planted(monkeypatch, *FAULTS[fault])
    truth = per_sample_gradients(model, loss, x)
    for _ in range(3):
        with unsum.gradients(model) as g:
            loss(model, x).backward()
        for name, wanted in truth.items():
            torch.testing.assert_close(g[name].per_sample(), wanted)
    assert FAULTS[fault][0] in caplog.text
    with pytest.raises(UnsupportedError, match="table"), unsum.gradients(Turns().double(), strict=True) as g:
        loss(g.names.model, x).backward()
