"""The truth for curvature and influence: dense matrices from plain autograd, one sample at a time. Nothing of unsum.

A batch is a tuple of tensors with samples along dimension 0; `loss_fn(model, batch)` gives one loss for each sample.
Vectors are {parameter: (m, *shape)}: m rows. Everything is a mean over samples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from reference import each_of
from torch import Tensor, nn
from torch.nn import functional as F

Rows = dict[str, Tensor]
LAYERS = (nn.Linear, nn.Conv2d, nn.Embedding)


def singles(batches: Iterable[Sequence[Tensor]]) -> Iterator[tuple[Tensor, ...]]:
    """Every sample as a batch of its own."""
    for batch in batches:
        for i in range(len(batch[0])):
            yield tuple(tensor[i : i + 1] for tensor in batch)


def per_sample(model: nn.Module, loss_fn, batches) -> Rows:
    """{parameter: (n, *shape)}: the gradient of each sample's loss, each sample run alone."""
    return each_of(model, (loss_fn(model, single).sum() for single in singles(batches)))


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


# ---- vectors --------------------------------------------------------------------------------------------------------


def flat(rows: Rows) -> Tensor:
    """(m, P): every row as one vector, parameters in the order of the dict."""
    return torch.cat([value.reshape(len(value), -1) for value in rows.values()], 1)


def unflat(matrix: Tensor, model: nn.Module) -> Rows:
    """The inverse of `flat` for all trainable parameters of a model."""
    parameters = trainable(model)
    parts = matrix.split([p.numel() for p in parameters.values()], 1)
    return {name: part.reshape(-1, *p.shape) for part, (name, p) in zip(parts, parameters.items(), strict=True)}


def random_rows(model: nn.Module, m: int, seed: int = 0) -> Rows:
    generator = torch.Generator().manual_seed(seed)
    draw = lambda p: torch.randn(m, *p.shape, generator=generator, dtype=torch.float64).to(p.dtype)
    return {name: draw(p) for name, p in trainable(model).items()}


def first(rows: Rows) -> Rows:
    """The first row alone, as {parameter: tensor}."""
    return {name: value[0] for name, value in rows.items()}


def basis_of(model: nn.Module, names: Sequence[str]) -> Rows:
    """The unit vectors of these parameters, as rows; zero for all other parameters."""
    parameters = trainable(model)
    eye = torch.eye(sum(parameters[name].numel() for name in names), dtype=torch.float64)
    parts = dict(zip(names, eye.split([parameters[name].numel() for name in names], 1), strict=True))
    zeros = lambda p: torch.zeros(len(eye), *p.shape, dtype=torch.float64)
    return {name: parts[name].reshape(-1, *p.shape) if name in parts else zeros(p) for name, p in parameters.items()}


# ---- blocks ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """A dense matrix for one parameter, or for a weight with its bias as last column: [weight | bias], row by row."""

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    matrix: Tensor  # (p, p)

    def pack(self, rows: Rows) -> Tensor:
        """(m, p)"""
        return _pack(self.names, rows)

    def unpack(self, packed: Tensor) -> Rows:
        if len(self.names) == 1:
            return {self.names[0]: packed.reshape(-1, *self.shapes[0])}
        matrix = packed.reshape(len(packed), self.shapes[0][0], -1)
        weight, bias = matrix[..., :-1], matrix[..., -1]
        return {self.names[0]: weight.reshape(-1, *self.shapes[0]), self.names[1]: bias}

    def default_damping(self) -> float:
        """0.1 × the mean eigenvalue."""
        return 0.1 * float(self.matrix.diagonal().mean())


def _pack(names: Sequence[str], rows: Rows) -> Tensor:
    weight = rows[names[0]]
    if len(names) == 1:
        return weight.reshape(len(weight), -1)
    bias = rows[names[1]]
    return torch.cat([weight.reshape(*bias.shape, -1), bias.unsqueeze(-1)], -1).flatten(1)


def block_of(blocks: Iterable[Block], name: str) -> Block:
    return next(block for block in blocks if name in block.names)


def matvec(blocks: Iterable[Block], rows: Rows) -> Rows:
    found: Rows = {}
    for block in blocks:
        found |= block.unpack(block.pack(rows) @ block.matrix)
    return {name: found[name] for name in rows}


def solve(blocks: Iterable[Block], rows: Rows, damping: float | None = None) -> Rows:
    """(block + damping · 1)⁻¹ for every block; None: each block's default damping."""
    found: Rows = {}
    for block in blocks:
        d = block.default_damping() if damping is None else damping
        damped = block.matrix + d * torch.eye(len(block.matrix), dtype=block.matrix.dtype)
        found |= block.unpack(torch.linalg.solve(damped, block.pack(rows).T).T)
    return {name: found[name] for name in rows}


def _grouped(model: nn.Module, met: Iterable[str] = ()) -> list[tuple[tuple[str, ...], str | None]]:
    """(names, module): layers that are met by outer products, weight and bias together; then all other parameters."""
    parameters, groups = trainable(model), []
    for module in met:
        names = tuple(name for end in ("weight", "bias") if (name := f"{module}.{end}".lstrip(".")) in parameters)
        if names:
            assert names[0].endswith("weight"), f"{module}: its bias is trained alone"
            groups.append((names, module))
    taken = {name for names, _ in groups for name in names}
    return groups + [((name,), None) for name in parameters if name not in taken]


def _blocks(model: nn.Module, groups, matrix_of) -> list[Block]:
    parameters = trainable(model)
    return [
        Block(names, tuple(parameters[name].shape for name in names), matrix_of(names, module))
        for names, module in groups
    ]


def _squares(each: Rows, name: str) -> Tensor:
    return torch.diag(each[name].flatten(1).square().mean(0))


def diagonal(model: nn.Module, loss_fn, batches) -> list[Block]:
    """The mean square of every number of the per-sample gradients."""
    each = per_sample(model, loss_fn, batches)
    return _blocks(model, _grouped(model), lambda names, _: _squares(each, names[0]))


def second_moment(model: nn.Module, loss_fn, batches, names: Sequence[str]) -> Tensor:
    """(p, p): the mean over samples of g gᵀ, for these parameters one after the other."""
    each = per_sample(model, loss_fn, batches)
    rows = flat({name: each[name] for name in names})
    return rows.T @ rows / len(rows)


# ---- Kronecker factors ----------------------------------------------------------------------------------------------


def meetings(model: nn.Module, loss_fn, batches) -> dict[str, list[tuple[Tensor, Tensor]]]:
    """{module: (a (t, i), δ (t, o)) for each sample}, for layers that are called; a second call is more positions."""
    found: dict[str, list[tuple[Tensor, Tensor]]] = {}
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, LAYERS) and any(p.requires_grad for p in module.parameters())
    }
    for number, single in enumerate(singles(batches)):
        calls: list[tuple[str, Tensor, Tensor]] = []
        handles = [layer.register_forward_hook(_keep(name, calls)) for name, layer in layers.items()]
        loss = loss_fn(model, single).sum()
        for handle in handles:
            handle.remove()
        deltas = torch.autograd.grad(loss, [out for _, _, out in calls], materialize_grads=True)
        for name in {name: None for name, _, _ in calls}:
            assert len(found.setdefault(name, [])) == number, f"{name}: not called for every sample"
            parts = [_positions(layers[name], a, d) for (n, a, _), d in zip(calls, deltas, strict=True) if n == name]
            found[name].append((torch.cat([a for a, _ in parts]), torch.cat([d for _, d in parts])))
    return {name: found[name] for name in layers if name in found}


def _keep(name: str, calls: list[tuple[str, Tensor, Tensor]]):
    return lambda _, given, out: calls.append((name, given[0].detach(), out))


def _positions(layer: nn.Module, a: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    if isinstance(layer, nn.Conv2d):
        windows = F.unfold(a, layer.kernel_size, layer.dilation, layer.padding, layer.stride)
        return windows[0].T, delta[0].flatten(1).T
    if isinstance(layer, nn.Embedding):
        return F.one_hot(a.flatten(), layer.num_embeddings).to(delta.dtype), delta.flatten(0, -2)
    return a.reshape(-1, layer.in_features), delta.reshape(-1, layer.out_features)


def factors(met: Sequence[tuple[Tensor, Tensor]], *, bias: bool, setting: str = "expand") -> tuple[Tensor, Tensor]:
    """A: the mean of [a; 1][a; 1]ᵀ over the positions that got a gradient. G: the sum of δ δᵀ over positions, averaged
    over samples. "reduce": a is averaged and δ is summed over the positions of each sample first."""
    inputs, deltas = [], []
    for a, delta in met:
        counts = (delta != 0).any(1)
        a, delta = a[counts], delta[counts]
        a = torch.cat([a, torch.ones(len(a), 1, dtype=a.dtype)], 1) if bias else a
        if setting == "reduce" and len(a):
            a, delta = a.mean(0, keepdim=True), delta.sum(0, keepdim=True)
        inputs.append(a)
        deltas.append(delta)
    a, delta = torch.cat(inputs), torch.cat(deltas)
    return a.T @ a / max(len(a), 1), delta.T @ delta / len(met)


def _sides(model: nn.Module, met, names: Sequence[str], module: str, setting: str) -> tuple[Tensor, Tensor]:
    """The factors of a block's rows and columns: (G, A), or (A, G) for an embedding, whose rows are its inputs."""
    A, G = factors(met[module], bias=len(names) == 2, setting=setting)
    return (A, G) if isinstance(model.get_submodule(module), nn.Embedding) else (G, A)


def kfac(model: nn.Module, loss_fn, batches, setting: str = "expand") -> list[Block]:
    """G ⊗ A for every layer that is called, and the diagonal for the rest."""
    met, each = meetings(model, loss_fn, batches), per_sample(model, loss_fn, batches)

    def matrix_of(names, module):
        if module is None:
            return _squares(each, names[0])
        return torch.kron(*_sides(model, met, names, module, setting))

    return _blocks(model, _grouped(model, met), matrix_of)


def ekfac(model: nn.Module, loss_fn, batches, setting: str = "expand") -> list[Block]:
    """K-FAC's eigenvectors; eigenvalues are the mean squares of per-sample gradients along them."""
    met, each = meetings(model, loss_fn, batches), per_sample(model, loss_fn, batches)

    def matrix_of(names, module):
        if module is None:
            return _squares(each, names[0])
        basis = torch.kron(*(torch.linalg.eigh(side)[1] for side in _sides(model, met, names, module, setting)))
        return basis @ torch.diag((_pack(names, each) @ basis).square().mean(0)) @ basis.T

    return _blocks(model, _grouped(model, met), matrix_of)


KINDS = {"kfac": kfac, "ekfac": ekfac, "diagonal": diagonal}


# ---- Gauss–Newton ---------------------------------------------------------------------------------------------------


def categorical_loss(outputs: Tensor, batch) -> Tensor:
    """(n,): minus the log probability of class 0, summed over positions. Its Hessian is the same for every class."""
    return -outputs.log_softmax(-1)[..., 0].flatten(1).sum(1) if outputs.dim() > 2 else -outputs.log_softmax(-1)[:, 0]


def gaussian_loss(outputs: Tensor, batch) -> Tensor:
    """(n,): ½|f|², whose Hessian is that of ½|y − f|²."""
    return outputs.flatten(1).square().sum(1) / 2


def gauss_newton(model: nn.Module, forward, batches, loss) -> Tensor:
    """(P, P): the mean over samples of Jᵀ H J, all trainable parameters one after the other; H is the Hessian of
    `loss(outputs, batch)` in the outputs."""
    total, n = 0, 0
    for single in singles(batches):
        outputs = forward(model, single)
        J = flat(each_of(model, outputs.flatten()))
        at = outputs.detach().flatten()
        H = torch.func.hessian(lambda f, o=outputs, s=single: loss(f.reshape(o.shape), s).sum())(at)
        total, n = total + J.T @ H @ J, n + 1
    return total / n


def part_of(matrix: Tensor, model: nn.Module, names: Sequence[str]) -> Tensor:
    """The block of a matrix over all parameters that belongs to these ones, in this order."""
    ends, places = 0, {}
    for name, p in trainable(model).items():
        places[name] = torch.arange(ends, ends + p.numel())
        ends += p.numel()
    chosen = torch.cat([places[name] for name in names])
    return matrix[chosen][:, chosen]


# ---- influence ------------------------------------------------------------------------------------------------------


def scores(query: Rows, train: Rows, inverse=None) -> Tensor:
    """(queries, train examples): qᵀ C⁻¹ t; `inverse` gives C⁻¹ of rows, None the plain inner product."""
    return flat(query if inverse is None else inverse(query)) @ flat(train).T
