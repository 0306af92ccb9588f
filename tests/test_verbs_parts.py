"""Parts of tensors: what `replace` and `mean_ablate` put there, outer and paired indices, and what messages repeat."""

import pytest
import torch
from torch import nn

import unsum
from unsum.errors import SiteError, VerbError

T = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0))


def values(*shape):
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape) * 100


@pytest.mark.parametrize("shape", [(), (4,), (1,), (5, 4), (5, 1), (1, 5, 4), (3, 1, 4), (3, 5, 1), (3, 5, 4)], ids=str)
def test_replace_puts_what_assignment_in_torch_would(shape):
    truth = T.clone()
    truth[:] = values(*shape)
    assert torch.equal(unsum.replace(values(*shape))(T), truth)


@pytest.mark.parametrize("shape", [(), (4,), (2, 4), (1, 2, 4), (3, 1, 4), (3, 2, 4), (3, 2, 1)], ids=str)
def test_replace_at_a_part_puts_what_assignment_to_the_part_would(shape):
    truth = T.clone()
    truth[:, [3, 0]] = values(*shape)
    assert torch.equal(unsum.replace(values(*shape)).at(positions=[3, 0])(T), truth)


@pytest.mark.parametrize("shape", [(5, 4), (1, 5, 4), (3, 5, 4), (3, 5, 1)], ids=str)
def test_of_a_value_for_the_whole_the_same_part_is_taken(shape):
    truth = T.clone()
    truth[:, [3, 0]] = values(*shape).expand(3, 5, 4)[:, [3, 0]]
    assert torch.equal(unsum.replace(values(*shape)).at(positions=[3, 0])(T), truth)


def test_a_value_may_be_for_all_samples_and_for_some_positions():
    truth, v = T.clone(), values(3, 2, 4)
    truth[1, [4, 2]] = v[1]
    assert torch.equal(unsum.replace(v).at(samples=1, positions=[4, 2])(T), truth)


def test_gradients_of_a_broadcast_value_are_sums():
    v, t = torch.ones(4, requires_grad=True), T.clone().requires_grad_()
    (unsum.replace(v).at(positions=[1, 2])(t) * T).sum().backward()
    torch.testing.assert_close(v.grad, T[:, [1, 2]].sum((0, 1)))
    kept = torch.ones(3, 5, 4)
    kept[:, [1, 2]] = 0
    torch.testing.assert_close(t.grad, T * kept)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


def test_patching_between_runs_of_different_lengths():
    net, long, short = Net(), torch.randn(1, 7, 4), torch.randn(1, 5, 4)
    with torch.no_grad(), unsum.capture(net, "up:output") as got:
        net(long)
    patch = got["up:output"][:, [6, 2]]
    with torch.no_grad(), unsum.edit(net, {"up:output": unsum.replace(patch).at(positions=[0, 4])}):
        patched = net(short)
    mixed = short.clone()
    mixed[:, [0, 4]] = long[:, [6, 2]]
    torch.testing.assert_close(patched, net(mixed))


def code_in(error):
    """The code that a message proposes."""
    return [line.partition(": ")[2] for line in str(error).splitlines() if line.strip().startswith(("write:", "or:"))]


@pytest.mark.parametrize("long_is_clean", [True, False])
def test_what_the_error_proposes_for_another_length_patches_the_last_positions(long_is_clean):
    net, clean, corrupt = Net(), torch.randn(1, 7, 4), torch.randn(1, 5, 4)
    if not long_is_clean:
        clean, corrupt = corrupt, clean
    with torch.no_grad(), unsum.capture(net, "up:output") as got:
        net(clean)
    v = got["up:output"]
    with pytest.raises(SiteError) as told, unsum.edit(net, {"up:output": unsum.replace(v)}):
        net(corrupt)
    for part in (str(tuple(v.shape)), f"{clean.shape[1]} positions for {corrupt.shape[1]}"):
        assert part in str(told.value)
    (code,) = code_in(told.value)
    with torch.no_grad(), unsum.edit(net, {"up:output": eval(code, {"unsum": unsum, "v": v})}):
        patched = net(corrupt)
    mixed = corrupt.clone()
    mixed[:, -5:] = clean[:, -5:]
    torch.testing.assert_close(patched, net(mixed))
    with pytest.raises(SiteError) as told, unsum.edit(net, {"up:output": unsum.replace(v).at(positions=[0, 4])}):
        net(corrupt)
    (code,) = code_in(told.value)  # as many positions as are chosen
    assert code == f"unsum.replace(v, positions=range({v.shape[1] - 2}, {v.shape[1]})).at(positions=[0, 4])"
    with torch.no_grad(), unsum.edit(net, {"up:output": eval(code, {"unsum": unsum, "v": v})}):
        net(corrupt)


@pytest.mark.parametrize(
    ("source", "to"),
    [
        ([6, 2], [0, 4]),
        (slice(3, 7), slice(1, 5)),
        (-1, -1),
        ([0, 0], [1, 3]),  # one position goes to two
        ([4, 3, 2, 1, 0], [0, 1, 2, 3, 4]),  # as many as the whole tensor has
        ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0]),
        (range(5), range(5)),
    ],
    ids=str,
)
def test_positions_of_the_value_go_to_positions_of_the_tensor_in_order(source, to):
    v, t = torch.randn(3, 7, 4), torch.randn(3, 5, 4)
    want = t.clone()
    for one, other in zip(_listed(source, 7), _listed(to, 5), strict=True):
        want[:, other] = v[:, one]
    assert torch.equal(unsum.replace(v, positions=source).at(positions=to)(t), want)
    want[1:] = t[1:]
    assert torch.equal(unsum.replace(v, positions=source).at(positions=to, samples=0)(t), want)


def _listed(index, size):
    numbers = list(range(size))
    found = numbers[index] if isinstance(index, slice | int) else [numbers[k] for k in index]
    return [found] if isinstance(found, int) else found


@pytest.mark.parametrize(
    ("verb", "said"),
    [
        (lambda: unsum.replace(torch.ones(3, 7, 4), positions=[1]), "say where they go"),
        (lambda: unsum.replace(torch.ones(3, 7, 4), positions=9), "there are 7 positions"),
        (lambda: unsum.replace(torch.ones(4), positions=0), "v has shape (4,), needs (samples, positions, ...)"),
        (lambda: unsum.replace(1.0, positions=0), "a number has no positions"),
        (lambda: unsum.replace(torch.ones(3, 7, 4), positions=[1, 2]).at(positions=[0, 1, 2]), "2 positions for 3"),
        (
            lambda: unsum.replace(torch.ones(3, 7, 4), positions=[1, 2]).at(
                samples=[0, 1], positions=[0, 1], paired=True
            ),
            "one for each pair",
        ),
    ],
)
def test_unclear_positions_are_refused(verb, said):
    with pytest.raises(VerbError) as told:
        verb()(T)
    assert said in str(told.value)


def test_mean_ablate_puts_the_mean_of_this_batch():
    assert torch.allclose(unsum.mean_ablate()(T), T.mean((0, 1)).expand_as(T))
    assert torch.allclose(unsum.mean_ablate(over=0)(T), T.mean(0).expand_as(T))
    assert torch.allclose(unsum.mean_ablate(over=(0, 2))(T), T.mean((0, 2))[:, None].expand_as(T))
    two = torch.randn(6, 3)
    assert torch.allclose(unsum.mean_ablate()(two), two.mean(0).expand_as(two))


def test_mean_ablate_at_a_part_puts_the_mean_of_the_whole_there():
    truth = T.clone()
    truth[1, [0, 2]] = T.mean((0, 1))
    torch.testing.assert_close(unsum.mean_ablate().at(samples=1, positions=[0, 2])(T), truth)
    truth = T.clone()
    truth[:, 3, 1:3] = T.mean(0)[3, 1:3]
    torch.testing.assert_close(unsum.mean_ablate(over=0).at(positions=3, features=[1, 2])(T), truth)
    truth = T.clone()
    truth[[0, 2], [1, 4]] = T.mean((0, 1))
    torch.testing.assert_close(unsum.mean_ablate().at(samples=[0, 2], positions=[1, 4], paired=True)(T), truth)


def test_mean_ablate_with_a_mean_from_before_and_its_gradient():
    net, data, x = Net(), torch.randn(8, 5, 4), torch.randn(2, 5, 4)
    with torch.no_grad(), unsum.capture(net, "up:output", reduce=lambda t: t.mean((0, 1))) as got:
        net(data)
    with unsum.edit(net, {"up:output": unsum.mean_ablate(got["up:output"]).at(positions=2)}):
        out = net(x)
    hidden = net.up(x).detach().clone()
    hidden[:, 2] = net.up(data).mean((0, 1))
    torch.testing.assert_close(out, net.down(torch.tanh(hidden)))
    with unsum.edit(net, {"up:output": unsum.mean_ablate()}):
        net(x).sum().backward()
    assert (net.up.weight.grad == 0).all()  # the mean is a constant


def test_paired_lists_change_what_indexing_in_torch_would():
    for chosen, index in {
        (("samples", (0, 2)), ("positions", (4, 1))): ([0, 2], [4, 1]),
        (("samples", (0, 2)), ("features", (3, -1))): ([0, 2], slice(None), [3, -1]),
        (("positions", (0, 2)), ("features", (3, 1))): (slice(None), [0, 2], [3, 1]),
        (("samples", 1), ("positions", (0, 2)), ("features", (3, 1))): (1, [0, 2], [3, 1]),
        (("samples", (0, 0)), ("positions", (4, 4))): (0, 4),
    }.items():
        options = {name: list(i) if isinstance(i, tuple) else i for name, i in chosen}
        truth = T.clone()
        truth[index] *= 2
        assert torch.equal(unsum.scale(2.0).at(**options, paired=True)(T), truth), options
    truth = T.clone()
    truth[[0, 2], [4, 1], 1:3] = 0
    sliced = unsum.zero().at(samples=[0, 2], positions=[4, 1], features=slice(1, 3), paired=True)(T)
    assert torch.equal(sliced, truth)
    masks = unsum.zero().at(
        samples=torch.tensor([True, False, True]), positions=[4, 1], dims={2: slice(1, 3)}, paired=True
    )
    assert torch.equal(masks(T), truth)


@pytest.mark.parametrize("shape", [(4,), (2, 4), (2, 1), (1, 4)], ids=str)
def test_a_value_for_pairs_has_one_row_for_each(shape):
    truth = T.clone()
    truth[[0, 2], [4, 1]] = values(*shape)
    pairs = {"samples": [0, 2], "positions": [4, 1], "paired": True}
    assert torch.equal(unsum.replace(values(*shape)).at(**pairs)(T), truth)
    whole = values(3, 5, 4)
    truth[[0, 2], [4, 1]] = whole[[0, 2], [4, 1]]
    assert torch.equal(unsum.replace(whole).at(**pairs)(T), truth)


def test_pairs_differentiate():
    t = T.double().requires_grad_()
    verb = unsum.clip_norm(0.5).at(samples=[0, 2], positions=[4, 1], paired=True)
    assert torch.autograd.gradcheck(verb, t)


@pytest.mark.parametrize(
    ("verb", "said"),
    [
        (lambda: unsum.zero().at(positions=5), ".at(positions=5): there are 5 positions"),
        (lambda: unsum.zero().at(samples=[0, 9]), ".at(samples=[0, 9]): there are 3 samples"),
        (lambda: unsum.zero().at(features=torch.tensor([7])), ".at(features=[7]): there are 4 features"),
        (lambda: unsum.zero().at(dims={2: 4}), ".at(dims={2: 4}): there are 4 entries"),
        (lambda: unsum.zero().at(positions=slice(2), dims={0: 3}), ".at(positions=slice(None, 2, None), dims={0: 3})"),
        (lambda: unsum.zero().at(samples=[0, 1], positions=[0, 1, 2], paired=True), "one length, got lengths 2 and 3"),
        (lambda: unsum.zero().at(samples=0, positions=[0, 1], paired=True), "name at least two"),
        (lambda: unsum.zero().at(samples=[0]).at(positions=[0, 1], paired=True), "in one .at(...)"),
        (lambda: unsum.replace(torch.ones(2, 4)), "got (2, 4), which does not broadcast to (3, 5, 4)"),
        (lambda: unsum.replace(torch.ones(1, 3, 5, 4)), "got (1, 3, 5, 4), which does not broadcast to (3, 5, 4)"),
        (lambda: unsum.replace(torch.ones(3, 9)).at(samples=0), "the shape of the part .at(samples=0)"),
        (lambda: unsum.replace(torch.ones(4).long()), "got torch.int64, needs torch.float32"),
        (lambda: unsum.mean_ablate(over=3), "over=3 names a dimension that (3, 5, 4) does not have"),
        (lambda: unsum.mean_ablate(torch.ones(4), over=0), "leave over= out"),
        (lambda: unsum.mean_ablate(torch.ones(7)), "got (7,), which does not broadcast"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_repeated_as_it_was_written(verb, said):
    with pytest.raises(VerbError) as told:
        verb()(T)
    assert said in str(told.value)


def test_a_mean_of_one_entry_is_refused():
    for t in (torch.ones(4), torch.ones(1, 4), torch.ones(1, 1, 4)):
        with pytest.raises(VerbError, match=r"mean_ablate\(mean\)"):
            unsum.mean_ablate()(t)


def test_floats_of_another_precision_take_that_of_the_place():
    t = torch.zeros(2, 3, dtype=torch.bfloat16)
    assert unsum.add(torch.ones(3))(t).dtype == torch.bfloat16


@pytest.mark.parametrize("index", ["last", 1.0, torch.ones(2, 3, dtype=torch.bool)], ids=["text", "float", "mask"])
def test_an_index_of_another_kind_is_told_what_it_may_be(index):
    with pytest.raises(unsum.errors.VerbError, match="paired=True"):
        unsum.zero().at(positions=index)(torch.zeros(2, 3, 4))


@pytest.mark.parametrize(
    ("make", "write"),
    [
        (lambda: unsum.replace(object()), r"unsum.replace\(got\[site\]\)"),
        (lambda: unsum.replace([1.0, 2.0]), r"unsum.replace\(torch.as_tensor\(v\)\)"),
        (lambda: unsum.add(T.numpy()), r"unsum.add\(torch.as_tensor\(v\)\)"),
        (lambda: unsum.mean_ablate([T, T]), r"torch.stack\(got.calls\(site\)\).mean\(0\)"),
    ],
)
def test_what_is_no_value_is_refused_at_once_and_not_printed(make, write):
    with pytest.raises(VerbError, match=write) as caught:
        make()
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("verb", [unsum.replace, unsum.mean_ablate, unsum.add])
def test_values_of_another_precision_are_taken_in_that_of_the_tensor(verb):
    found = verb(values(4) / 3)(T.bfloat16())
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, verb((values(4) / 3).bfloat16())(T.bfloat16()))


def test_an_error_in_a_later_call_names_the_call_and_the_site_of_the_first():
    model = nn.ModuleDict({"block": nn.Linear(4, 4)})

    def generate():
        model["block"](T)
        model["block"](T[:, :1])

    for verb in (unsum.replace(T), unsum.zero().at(positions=3)):
        with pytest.raises(SiteError, match=r"this is call 1 of the module.*\n  write: 'block:output@0'"):
            with unsum.edit(model, {"block:output": verb}):
                generate()
    with unsum.edit(model, {"block:output@0": unsum.zero().at(positions=3)}):
        generate()


def test_an_edit_that_is_never_opened_says_so():
    with pytest.warns(UserWarning, match="was never opened, and changed nothing"):
        unsum.edit(nn.Linear(4, 4), {":output": unsum.zero()})


def test_a_direction_with_one_row_is_told_to_be_flattened():
    with pytest.raises(VerbError, match=r"write: v.flatten\(\)"):
        unsum.steer(torch.ones(1, 4))(T)
