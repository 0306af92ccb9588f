"""cuDNN's recurrent layers, all of which are one node. A stand-in has that node's edges and saved tensors, and computes
what torch computes on the CPU; `test_cuda.py` runs the real one where there is a GPU."""

import pytest
import torch
from reference import norms_of_all, per_sample_gradients
from torch import Tensor, nn

import unsum
from unsum.kernels.recurrent_stack import Stack
from unsum.rules.registry import RULES

N, T, D, H = 4, 5, 3, 6
KINDS = {
    "relu": (0, lambda **given: nn.RNN(D, H, nonlinearity="relu", **given)),
    "tanh": (1, lambda **given: nn.RNN(D, H, **given)),
    "lstm": (2, lambda **given: nn.LSTM(D, H, **given)),
    "gru": (3, lambda **given: nn.GRU(D, H, **given)),
}
LAYERS = {
    "one layer": {},
    "three layers": {"num_layers": 3},
    "two layers, both directions": {"num_layers": 2, "bidirectional": True},
    "no biases": {"bias": False, "num_layers": 2},
}


class CudnnRnn(torch.autograd.Function):
    """`_cudnn_rnn`, as far as autograd sees it: input, weights, states, cells; sequences, last states, last cells."""

    @staticmethod
    def forward(ctx, rnn, mode, x, *tensors):
        ctx.set_materialize_grads(False)
        count = len(rnn._flat_weights)
        weights, (hx, *cx) = tensors[:count], tensors[count:]
        with torch.enable_grad():
            given = [each.detach().requires_grad_() for each in (x, *tensors)]
            out, *last = run(rnn, mode, *given[:1], given[1 : 1 + count], *given[1 + count :])
        ctx.given, ctx.results = given, (out, *last)
        ctx._saved_input, ctx._saved_weight, ctx._saved_hx = x, list(weights), hx
        ctx._saved_cx = cx[0] if cx else None
        ctx._saved_result0, ctx._saved_mode, ctx._saved_weight_stride0 = out.detach(), mode, 4 if rnn.bias else 2
        ctx._saved_batch_first, ctx._saved_bidirectional = rnn.batch_first, rnn.bidirectional
        ctx._saved_num_layers, ctx._saved_train, ctx._saved_dropout = rnn.num_layers, True, rnn.dropout
        ctx._saved_batch_sizes, ctx._saved_proj_size = [], 0
        cells = [] if cx else [x.new_empty(0)]
        return *(each.detach().clone() for each in ctx.results), *cells

    @staticmethod
    def backward(ctx, *grads):
        pairs = [(result, grad) for result, grad in zip(ctx.results, grads, strict=False) if grad is not None]
        results, arrived = zip(*pairs, strict=True)
        return None, None, *torch.autograd.grad(results, ctx.given, arrived, retain_graph=True, allow_unused=True)


def run(rnn: nn.RNNBase, mode: int, x: Tensor, weights: list[Tensor], hx: Tensor, cx: Tensor | None = None):
    """Sequences, last states, and last cells of an LSTM, by torch's operation for the CPU."""
    options = (weights, rnn.bias, rnn.num_layers, 0.0, False, rnn.bidirectional, rnn.batch_first)
    if cx is not None:
        return torch.lstm(x, (hx, cx), *options)
    return (torch.rnn_relu, torch.rnn_tanh, None, torch.gru)[mode](x, hx, *options)


class Reader(nn.Module):
    """A recurrent layer whose graph has the stand-in."""

    def __init__(self, kind: str, part: str = "sequences", **options) -> None:
        super().__init__()
        self.mode, make = KINDS[kind]
        self.rnn, self.part = make(**options), part
        count = self.rnn.num_layers * (2 if self.rnn.bidirectional else 1)
        self.begin = nn.Parameter(torch.randn(1 + (kind == "lstm"), count, 1, H))

    def forward(self, x: Tensor) -> Tensor:
        begin = [each.expand(-1, len(x), -1).contiguous() for each in self.begin]
        given = x if self.rnn.batch_first else x.transpose(0, 1)
        out, *last = CudnnRnn.apply(self.rnn, self.mode, given, *self.rnn._flat_weights, *begin)
        out = out if self.rnn.batch_first else out.transpose(0, 1)
        if self.part == "sequences":
            return out.sin()
        states = [state.transpose(0, 1).flatten(1).cos() for state in last if state.numel()]
        return torch.cat(states if self.part == "states" else [out.sin().flatten(1), *states], 1)


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum()


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rules of cuDNN's node speak for the stand-in, too."""
    for (operation, edge), rule in list(RULES.items()):
        if operation == "CudnnRnnBackward0":
            monkeypatch.setitem(RULES, ("CudnnRnnBackward", edge), rule)


def test_the_node_has_what_the_rules_read():
    kind = torch._C._functions.CudnnRnnBackward0
    read = (
        "input weight hx cx result0 mode weight_stride0 batch_first bidirectional num_layers train dropout batch_sizes"
    )
    assert all(hasattr(kind, f"_saved_{name}") for name in (*read.split(), "proj_size"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("part", ["sequences", "states", "all"])
def test_every_sample(kind, layers, part, stand_in):
    torch.manual_seed(0)
    model = Reader(kind, part, batch_first=part != "states", **LAYERS[layers]).double()
    for n, t in [(N, T), (N, T), (3, T + 2), (1, 2)]:
        x = torch.randn(n, t, D, dtype=torch.float64)
        with unsum.gradients(model, strict=True) as g:
            loss(model, x).backward()
        for name, wanted in per_sample_gradients(model, loss, x).items():
            torch.testing.assert_close(g[name].per_sample(), wanted, rtol=1e-9, atol=1e-9)
        used = [line for line in str(g.coverage()).splitlines() if line.startswith("rnn.")]
        assert used and all("recurrent.cudnn_weight" in line for line in used), str(g.coverage())


def test_norms_and_clipped_sums(stand_in):
    torch.manual_seed(0)
    model = Reader("gru", "all", num_layers=2, bidirectional=True, batch_first=True).double()
    x = torch.randn(N, T, D, dtype=torch.float64)
    wanted = per_sample_gradients(model, loss, x)
    norms = norms_of_all(wanted)
    clip = lambda norms: (0.5 * norms.mean() / norms).clamp(max=1)
    for _ in range(3):
        with unsum.gradients(model, unsum.Norms(), unsum.WeightedSum(clip)) as g:
            loss(model, x).backward()
        torch.testing.assert_close(g.norms(), norms)
        for name, value in g[unsum.WeightedSum].sum().items():
            torch.testing.assert_close(value, torch.einsum("n,n...->...", clip(norms), wanted[name]))


def test_dropout_between_layers_is_replayed(stand_in):
    torch.manual_seed(0)
    model = Reader("lstm", num_layers=2, dropout=0.5, batch_first=True).double().eval()  # the node says that it trains
    x = torch.randn(N, T, D, dtype=torch.float64)
    with unsum.gradients(model) as g:
        loss(model, x).backward()
    for name, wanted in per_sample_gradients(model, loss, x).items():
        torch.testing.assert_close(g[name].per_sample(), wanted)
    assert "cudnn_weight" not in str(g.coverage())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_layers_that_are_run_again(dtype):
    """In the dtype of the layer: rounding there is part of what the layers above it were given."""
    torch.manual_seed(0)
    rnn = nn.GRU(D, H, num_layers=2).to(dtype)
    x, begin = torch.randn(T, N, D, dtype=dtype), torch.zeros(2, N, H, dtype=dtype)
    with torch.no_grad():
        lower = nn.GRU(D, H).to(dtype)
        lower.load_state_dict({k: v for k, v in rnn.state_dict().items() if k.endswith("l0")})
        middle = lower(x)[0]
        stack = Stack("gru", x, rnn(x)[0], begin, None, [tuple(w) for w in rnn.all_weights], 1)
        (_, _), (above, gates) = stack.at_gates(torch.ones(T, N, H, dtype=dtype), None, None)
    torch.testing.assert_close(above.inputs, middle, rtol=0, atol=0)
    assert gates.of_inputs.dtype == dtype
