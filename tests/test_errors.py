"""Errors by cause: a real program raises each, and the code that its message proposes makes the program right.

A program is text. Its line that ends in `# here` is the one that the proposed code replaces; `model`, `x`, `y`,
`loss_fn` and `losses` are those of `setting`. What comes out is compared with plain autograd, one sample at a time."""

import pickle
from dataclasses import dataclass, field

import pytest
import torch
from reference import each_of
from torch import nn
from torch.utils.data import TensorDataset

import unsum
from unsum import errors


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 2)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.fc(x)


class Hidden(Net):
    """What comes out cannot be followed to rows of what goes in."""

    def forward(self, x):
        return self.fc(torch.from_numpy(x.numpy() * 2))


class Normed(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(3, 2), nn.BatchNorm1d(2))


def setting(net):
    """The names that programs use."""
    torch.manual_seed(0)
    return {
        "torch": torch,
        "nn": nn,
        "unsum": unsum,
        "TensorDataset": TensorDataset,
        "model": net().double(),
        "x": torch.randn(4, 3, dtype=torch.double),
        "y": torch.tensor([0, 1, 1, 0]),
        "loss_fn": lambda out, y: out.square().sum(),
        "squares": lambda out: out.square().flatten(1).sum(1),
        "by_sample": lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none"),
    }


def run(program, net):
    names = setting(net)
    exec(program, names)
    return names


def proposed(error):
    """The lines of code in a message."""
    labels = ("  write: ", "     or: ")
    return [line[len(labels[0]) :] for line in str(error).splitlines() if line.startswith(labels)]


def corrected(program, code):
    """The program with its marked line replaced. The code's `...` stands for what the program has there already."""
    code = code.partition("  # ")[0].removesuffix(" ...")
    lines = program.splitlines()
    (at,) = (k for k, line in enumerate(lines) if line.endswith("# here"))
    old = lines[at]
    indent = old[: len(old) - len(old.lstrip())]
    name, is_assigned, _ = old.strip().partition(" = ")
    if is_assigned and name.isidentifier() and not code.startswith(f"{name} = "):
        code = f"{name} = {code}"
    lines[at] = indent + code
    return "\n".join(lines)


def gradients_of(names, losses):
    """Plain autograd of each sample's loss, on the model of a program that has run."""
    model = names["model"]
    model.zero_grad()
    return each_of(model, losses(model))


@dataclass
class Case:
    cause: type
    says: str  # part of the message: where, or with which shapes
    program: str
    right: object  # of the names after the corrected program: whether the numbers are the right ones
    net: type = Net
    proposals: list = field(default_factory=lambda: [0])  # which of the proposed lines are tried


def per_sample(name="fc.weight", losses=lambda m, names: names["squares"](m(names["x"]))):
    """The program's `g` has the right gradients by sample."""

    def right(names):
        want = gradients_of(names, lambda m: losses(m, names))
        torch.testing.assert_close(names["g"][name].per_sample(), want[name])

    return right


def norms(names):
    want = gradients_of(names, lambda m: names["squares"](m(names["x"])))
    squares = sum(g.reshape(len(g), -1).square().sum(1) for g in want.values())
    torch.testing.assert_close(names["g"].norms(), squares.sqrt())


def close(name, want):
    """What the program calls `name` is what `want` gives."""
    return lambda names: torch.testing.assert_close(names[name], want(names))


CASES = {
    "the model is not called": Case(
        errors.UnknownSamples,
        "the model was not called in this block",
        """
with unsum.gradients(model) as g:
    losses = squares(x @ model.fc.weight.T + model.fc.bias)
    losses.sum().backward()  # here
""",
        per_sample(),
        proposals=[0, 1],
    ),
    "two dimensions have as many rows as samples": Case(
        errors.UnknownSamples,
        "dimensions 0 and 1 have as many rows as there are samples",
        """
x = torch.randn(4, 4, 3, dtype=torch.double)
with unsum.gradients(model) as g:  # here
    loss_fn(model(x), y).backward()
""",
        per_sample(),
        net=Hidden,
    ),
    "a parameter that the loss uses after the sum": Case(
        errors.UnknownSamples,
        "MulBackward0, parameter scale, result of shape (); the batch has 4 samples",
        """
with unsum.gradients(model) as g:
    losses = squares(model(x)) * model.scale
    (squares(model(x)).sum() * model.scale).backward()  # here
""",
        per_sample("scale", lambda m, names: names["squares"](m(names["x"])) * m.scale),
    ),
    "a parameter that the loss uses after the sum is left out": Case(
        errors.UnknownSamples,
        "parameter scale",
        """
with unsum.gradients(model) as g:  # here
    (squares(model(x)).sum() * model.scale).backward()
""",
        per_sample(),
        proposals=[1],
    ),
    "a number for samples=": Case(
        errors.BadSamples,
        "samples=1",
        """
x = torch.randn(5, 4, 3, dtype=torch.double)
with unsum.gradients(model, samples=1) as g:  # here
    loss_fn(model(x), y).backward()
""",
        per_sample(losses=lambda m, names: names["squares"](m(names["x"]).transpose(0, 1))),
    ),
    "a dimension counted from the end": Case(
        errors.BadSamples,
        "dim(-2)",
        """
x = torch.randn(5, 4, 3, dtype=torch.double)
with unsum.gradients(model, samples=unsum.dim(-2)) as g:  # here
    loss_fn(model(x), y).backward()
""",
        per_sample(losses=lambda m, names: names["squares"](m(names["x"]).transpose(0, 1))),
    ),
    "lengths of documents that are no whole numbers": Case(
        errors.BadSamples,
        "torch.float32",
        """
x = torch.randn(1, 5, 3, dtype=torch.double)
samples = unsum.packed(torch.tensor([0.0, 3.0, 5.0]))  # here
with unsum.gradients(model, samples=samples) as g:
    loss_fn(model(x), y).backward()
""",
        per_sample(losses=lambda m, names: [m(part).square().sum() for part in names["x"][0].split([3, 2])]),
    ),
    "ids that are no whole numbers": Case(
        errors.BadSamples,
        "torch.float32 of shape (3,)",
        """
x = x[:3]
with unsum.gradients(model, samples=torch.tensor([0.0, 0.0, 1.0])) as g:  # here
    loss_fn(model(x), y).backward()
""",
        per_sample(losses=lambda m, names: [m(part).square().sum() for part in names["x"].split([2, 1])]),
    ),
    "a loss is marked that has no samples any more": Case(
        errors.BadSamples,
        "this one is a scalar",
        """
with unsum.gradients(model) as g:
    losses = squares(model(x))
    unsum.mark_samples(losses.sum()).backward()  # here
""",
        per_sample(),
    ),
    "one loss for the batch": Case(
        errors.WrongCount,
        "got shape (), a single number",
        """
def mine(model, batch):
    x, y = batch
    return torch.nn.functional.cross_entropy(model(x), y)  # here
ok = unsum.check(model, mine, (x, y)).ok
""",
        lambda names: names["ok"] or pytest.fail("not ok"),
    ),
    "a loss for each position": Case(
        errors.WrongCount,
        "got shape (4, 2)",
        """
def mine(model, batch):
    losses = model(batch).square()
    return losses  # here
ok = unsum.check(model, mine, x).ok
""",
        lambda names: names["ok"] or pytest.fail("not ok"),
    ),
    "weights for another number of samples": Case(
        errors.WrongCount,
        "6 weights for 4 samples",
        """
reducer = unsum.WeightedSum(torch.ones(6))  # here
with unsum.gradients(model, reducer) as g:
    loss_fn(model(x), y).backward()
total = reducer.sum()["fc.weight"]
""",
        close("total", lambda names: names["model"].fc.weight.grad),
        proposals=[0],
    ),
    "a weighted sum with a weight too many": Case(
        errors.WrongCount,
        "fc.weight: got 5 weights for 4 samples",
        """
with unsum.gradients(model) as g:
    loss_fn(model(x), y).backward()
total = g["fc.weight"].weighted_sum(torch.ones(5))  # here
""",
        close("total", lambda names: names["model"].fc.weight.grad),
    ),
    "vectors that are flat": Case(
        errors.WrongShape,
        "fc.weight has shape (2, 3); got a tensor of shape (5, 6)",
        """
with unsum.gradients(model) as g:
    loss_fn(model(x), y).backward()
tensor = torch.randn(5, 6, dtype=torch.double)
dots = g["fc.weight"].dot(tensor)  # here
""",
        close("dots", lambda names: names["g"]["fc.weight"].per_sample().flatten(1) @ names["tensor"].T),
    ),
    "no training data": Case(
        errors.EmptyData,
        "train: the data is empty",
        """
query_x, query_y = x[:1], y[:1]
loss_fn = by_sample
scores = unsum.influence(model, loss_fn, [], TensorDataset(query_x, query_y))  # here
scores = scores.matrix
""",
        close("scores", lambda names: _dots(names)),
    ),
    "every parameter is frozen": Case(
        errors.NoGradient,
        "Net",
        """
model.requires_grad_(False)
pass  # here
ok = unsum.check(model, by_sample, (x, y)).ok
""",
        lambda names: names["ok"] or pytest.fail("not ok"),
    ),
    "a block without a backward": Case(
        errors.NoBackward,
        "no backward ran inside the block",
        """
with unsum.gradients(model) as g: pass  # here
norms = g.norms()
""",
        norms,
    ),
    "a block with a forward alone": Case(
        errors.NoBackward,
        "the block saw a forward and no backward",
        """
with unsum.gradients(model) as g: model(x)  # here
norms = g.norms()
""",
        norms,
    ),
    "a reducer without a backward": Case(
        errors.NoBackward,
        "Norms: no backward ran inside the block",
        """
reducer = unsum.Norms()
with unsum.gradients(model, reducer) as g: pass  # here
norms = reducer.norms()
""",
        lambda names: torch.testing.assert_close(names["norms"], names["g"][unsum.Norms].norms()),
    ),
    "two backwards through the same samples": Case(
        errors.BackwardOrder,
        "Norms: a second backward",
        """
with unsum.gradients(model, unsum.Norms()) as g:
    out = model(x)
    first_loss, second_loss = out[:, 0].square().sum(), out[:, 1].square().sum()
    first_loss.backward(retain_graph=True); second_loss.backward()  # here
""",
        norms,
    ),
    "factors of a block with reducers": Case(
        errors.NotAvailable,
        "fc.weight: a block with reducers does not keep the factors",
        """
reducer = unsum.Norms()
with unsum.gradients(model, reducer) as g:  # here
    loss_fn(model(x), y).backward()
read = g["fc.weight"]
""",
        per_sample(),
        proposals=[1],
    ),
    "norms by position of a bias that met data twice": Case(
        errors.NotAvailable,
        "fc.bias met data 2 times",
        """
with unsum.gradients(model) as g:
    (loss_fn(model(x), y) + loss_fn(model(2 * x), y)).backward()
read = g["fc.bias"].token_sq_norms()  # here
""",
        close("read", lambda names: gradients_of(names, lambda m: _twice(m, names))["fc.bias"]),
    ),
    "the input of a parameter that has none": Case(
        errors.NotAvailable,
        "fc.bias: its gradients are not outer products",
        """
with unsum.gradients(model) as g:
    loss_fn(model(x), y).backward()
read = g["fc.bias"].a  # here
""",
        close("read", lambda names: gradients_of(names, lambda m: names["squares"](m(names["x"])))["fc.bias"]),
    ),
    "norms of a weighted sum whose weights are given": Case(
        errors.NotAvailable,
        "no norms were computed",
        """
w = torch.ones(4)
with unsum.gradients(model, unsum.WeightedSum(w)) as g:  # here
    loss_fn(model(x), y).backward()
read = g[unsum.Norms if unsum.Norms in map(type, g._reducers) else unsum.WeightedSum].norms()
""",
        norms,
    ),
    "a sample that is not finite": Case(
        errors.NotFinite,
        "sample 2 of this backward is not finite",
        """
x[2, 0] = torch.inf
with unsum.clip_per_sample(model, max_norm=1e9, verify=False) as clipped:
    losses = squares(model(x))
    losses.sum().backward()  # here
total = model.fc.weight.grad.clone()
""",
        close("total", lambda names: _without(names, 2)),
    ),
    "an example that is not finite": Case(
        errors.NotFinite,
        "train: example 2 (row 2 of its batch)",
        """
x[2, 0] = torch.nan
query_x, query_y = x[:1], y[:1]
data = TensorDataset(x, y)
data = data  # here
scores = unsum.influence(model, by_sample, data, TensorDataset(query_x, query_y)).matrix
""",
        close("scores", lambda names: _dots(names, [0, 1, 3])),
    ),
    "batch norm in training": Case(
        errors.InteractionError,
        "samples interact at",
        """
x = x + 0
with unsum.gradients(model) as g:  # here
    loss_fn(model(x), y).backward()
total = g["0.weight"].sum()
""",
        close("total", lambda names: names["model"][0].weight.grad),
        net=Normed,
    ),
    "batch norm in training, put into eval": Case(
        errors.InteractionError,
        "samples interact at",
        """
pass  # here
with unsum.gradients(model) as g:
    loss_fn(model(x), y).backward()
""",
        per_sample("0.weight"),
        net=Normed,
        proposals=[1],
    ),
    "a backward with create_graph=True": Case(
        errors.UnsupportedError,
        "create_graph=True",
        """
with unsum.gradients(model) as g:
    loss = loss_fn(model(x), y)
    loss.backward(create_graph=True)  # here
""",
        per_sample(),
    ),
    "a gradient edit that ends before the backward": Case(
        errors.SiteError,
        "fc:grad_output: the block of a gradient edit was closed",
        """
edits = {"fc:grad_output": unsum.scale(2.0)}
with unsum.edit(model, edits, missing="ignore"): loss = loss_fn(model(x), y)  # here
if model.fc.weight.grad is None: loss.backward()
total = model.fc.weight.grad.clone()
""",
        close("total", lambda names: 2 * _without(names)),
    ),
}


def _dots(names, rows=slice(None)):
    """(queries, examples): inner products of gradients, the query being the first example."""
    grads = gradients_of(names, lambda m: names["by_sample"](m, (names["x"][rows], names["y"][rows])))
    flat = torch.cat([g.reshape(len(g), -1) for g in grads.values()], 1)
    return flat[:1] @ flat.T


def _twice(model, names):
    return names["squares"](model(names["x"])) + names["squares"](model(2 * names["x"]))


def _without(names, row=None):
    """What plain autograd brings to `fc.weight`, without one of the samples."""
    keep = [k for k in range(4) if k != row]
    loss = names["squares"](names["model"](names["x"][keep])).sum()
    return torch.autograd.grad(loss, names["model"].fc.weight)[0]


@pytest.mark.parametrize("name", CASES)
def test_the_code_that_an_error_proposes_gives_the_right_numbers(name):
    case = CASES[name]
    with pytest.raises(case.cause) as told:
        run(case.program, case.net)
    assert type(told.value) is case.cause
    assert case.says in str(told.value)
    codes = proposed(told.value)
    for number in case.proposals:
        case.right(run(corrected(case.program, codes[number]), case.net))


CAUSES = [cause for cause in vars(errors).values() if isinstance(cause, type) and cause.__module__ == errors.__name__]


def test_every_cause_below_samples_error_has_a_case():
    causes = {cause for cause in CAUSES if issubclass(cause, errors.SamplesError)} - {errors.SamplesError}
    assert causes == {case.cause for case in CASES.values() if issubclass(case.cause, errors.SamplesError)}


@pytest.mark.parametrize("cause", CAUSES, ids=lambda cause: cause.__name__)
def test_every_class_is_drawn_in_the_tree_below_its_parent(cause):
    """The depth of its line is the depth of the class, and its parent stands above it."""
    lines = [line for line in errors.__doc__.splitlines() if "  " in line or line.strip() in ("UnsumError",)]
    drawn = {word: (k, line.index(word)) for k, line in enumerate(lines) for word in [_name(line)] if word}
    at, depth = drawn[cause.__name__]
    parent = cause.__mro__[1].__name__
    if parent in drawn:
        assert drawn[parent][0] < at and drawn[parent][1] < depth


def _name(line):
    words = line.strip("│├└─ ").split()
    return words[0] if words and words[0].isidentifier() else None


def test_a_message_has_a_place_and_lines_to_paste():
    error = errors.UnknownSamples("what happened.", at="fc, (4, 3)", write=["first()", "second()"])
    assert str(error) == "what happened.\n  at: fc, (4, 3)\n  write: first()\n     or: second()"
    assert str(errors.SiteError("what happened.")) == "what happened."


@pytest.mark.parametrize("cause", [c for c in CAUSES if issubclass(c, Exception)], ids=lambda cause: cause.__name__)
def test_an_error_comes_through_a_pickle_as_it_was(cause):
    """Ranks and workers send theirs."""
    error = cause("what happened.") if issubclass(cause, Warning) else cause("what happened.", at="here", write="this")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is cause and str(copy) == str(error)


@pytest.mark.parametrize(
    ("cause", "also"),
    [
        (errors.BadSamples, errors.OptionError),
        (errors.BadSamples, ValueError),
        (errors.WrongCount, ValueError),
        (errors.WrongShape, ValueError),
        (errors.EmptyData, ValueError),
        (errors.UnreadEdit, UserWarning),
    ],
    ids=str,
)
def test_causes_are_also_what_python_calls_them(cause, also):
    assert issubclass(cause, also)
