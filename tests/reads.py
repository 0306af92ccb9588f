"""Every read and every reducer, compared with gradients that were computed one sample at a time."""

import torch

import unsum


def close(ours, wanted, tolerance, scale, what):
    off = float((ours.double() - wanted.double()).norm()) if wanted.numel() else 0.0
    assert off <= tolerance * scale, f"{what}: off by {off:.1e} where gradients are {scale:.1e}"


def assert_reads(g, each, tolerance):
    """`each`: {parameter: (n, *shape)}."""
    n = len(next(iter(each.values())))
    flat = torch.cat([v.double().flatten(1) for v in each.values()], 1)
    scale = float(flat.norm(dim=1).max())
    w = torch.linspace(-1, 2, n)
    for name, values in each.items():
        f, dense = g[name], values.double()
        rows = dense.flatten(1)
        close(f.per_sample(), dense, tolerance, scale, f"{name}.per_sample")
        close(f.sum(), dense.sum(0), tolerance, scale, f"{name}.sum")
        close(f.weighted_sum(w), torch.tensordot(w.double(), dense, 1), tolerance, scale, f"{name}.weighted_sum")
        close(f.sq_norms(), rows.square().sum(1), tolerance, scale**2, f"{name}.sq_norms")
        close(f.dot(f), rows @ rows.T, tolerance, scale**2, f"{name}.dot")
    close(g.dot(g), flat @ flat.T, tolerance, scale**2, "dot")
    close(g.norms(), flat.norm(dim=1), tolerance, scale, "norms")


def assert_reducers(model, loss, each, tolerance):
    """`loss(model)` is the loss that `each` belongs to. The first block may learn; later ones remember."""
    flat = torch.cat([v.double().flatten(1) for v in each.values()], 1)
    squares, scale = flat.square().sum(1), float(flat.norm(dim=1).max())
    clip = lambda norms: (norms.median() / norms).clamp_max(1)
    factor = clip(squares.sqrt())
    for kinds in ("all", "norms", "norms"):
        norms, project = unsum.Norms(), unsum.Project(2, 3)
        sums = (unsum.WeightedSum(clip), unsum.WeightedSum(clip, memory=0))  # of gradients, of factors
        others = (*sums, unsum.SecondMoment(), project) if kinds == "all" else ()
        model.zero_grad()
        with unsum.gradients(model, norms, *others) as g:
            loss(model).backward()
        close(g[norms].sq_norms(), squares, tolerance, scale**2, f"Norms ({kinds})")
        for name, values in each.items():
            grad = model.get_parameter(name).grad
            grad = torch.zeros_like(values[0]) if grad is None else grad.to_dense() if grad.is_sparse else grad
            close(grad, values.double().sum(0), max(tolerance, 1e-6), scale, f"{name}.grad ({kinds})")
            if others:
                clipped = torch.tensordot(factor, values.double(), 1)
                for weighted in sums:
                    how = weighted.chosen.get(name, "gradients")
                    close(weighted.sum()[name], clipped, tolerance, scale, f"{name}: clipped sum ({how})")
                moment = values.double().square().sum(0)
                close(g[unsum.SecondMoment].sum_squares()[name], moment, tolerance, scale**2, f"{name}: second moment")
        if others:
            with unsum.gradients(model, grad=False) as kept:
                loss(model).backward()
            projected = torch.cat([kept[name].project(2, 3) for name in sorted(each)], 1)
            close(g[project].matrix(), projected, tolerance, scale * 10, "Project")
