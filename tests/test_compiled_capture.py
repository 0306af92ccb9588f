"""`capture` in compiled models: it runs compiled, and values and gradients are those of the model itself."""

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn import functional as F

import unsum
from compiled_nets import Attention, Checkpointed, Choosing, Images, ids, images, rows

FIRST = 2  # calls that run eagerly
TELLS_HOOKS = torch.__version__ >= "2.13"  # whether torch tells where in the model a hook was put on


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        h = self.first(x).tanh()
        return self.last(h + self.first(h))


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        x = x + self.a(x)
        return self.out(x + self.b(x))


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.head = Branching(), nn.Linear(4, 2)

    def forward(self, x):
        found = self.inner(x, scale=x.square())
        return {"logits": self.head(found["parts"][1]), "aux": found["parts"][0].sum(1)}


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, *, scale):
        return {"parts": (self.left(x), self.right(x) * scale), "none": None}


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.ReLU(inplace=True))
        self.out = nn.Linear(8, 2)

    def forward(self, x):
        return self.out(self.layers(x))


class Flattened(nn.Module):
    """Returns views of what its modules return."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x):
        h = self.a(x.unflatten(1, (2, 2)).repeat(1, 1, 2))
        return self.b(h).flatten(1)[:, ::2]


class Mixing(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.norm, self.out = nn.LayerNorm(4), nn.Linear(4, 2)

    def forward(self, x):
        x = x[:, None, :] * torch.arange(1, 4, device=x.device, dtype=x.dtype)[None, :, None]
        mixed, _ = self.attention(x, x, x, need_weights=False)
        return self.out(self.norm(x + mixed)).mean(1)


class Identities(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.same, self.out = nn.Linear(4, 4), nn.Identity(), nn.Linear(4, 2)

    def forward(self, x):
        h = self.a(x)
        return self.out(self.same(h) + h)


class BatchNormed(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2))


class Frozen(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))
        for parameter in self[0].parameters():
            parameter.requires_grad_(False)


NETS = {
    "attention": (Attention, ids),
    "images": (Images, images),
    "twice": (Twice, rows),
    "residual": (Residual, rows),
    "nested": (Nested, rows),
    "flattened": (Flattened, rows),
    "multihead": (Mixing, rows),
    "batch norm": (BatchNormed, rows),
    "frozen": (Frozen, rows),
    "identities": (Identities, rows),
}
VALUES = ("*:input", "*:output")
ALL = (*VALUES, "*:grad_output")


def loss_of(out):
    parts = out.values() if isinstance(out, dict) else [out]
    return sum((part.flatten(1) if part.dim() > 1 else part[:, None]).tanh().square().sum() for part in parts)


def build(name, backend="aot_eager", nets=NETS, **options):
    torch.manual_seed(0)
    make, batch = nets[name]
    model = make().double()
    return model, torch.compile(model, backend=backend, **options), batch


def captured(model, x, sites, loss=loss_of, **options):
    """The values, by name and in order; the gradients of parameters, and the buffers after it."""
    model.zero_grad()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with unsum.capture(model, *sites, missing="ignore", **options) as got:
        loss(model(x)).backward()
    grads = {unsum_name(name): p.grad for name, p in model.named_parameters()}
    after = {unsum_name(name): buffer.clone() for name, buffer in model.named_buffers()}
    for name, buffer in model.named_buffers():
        buffer.copy_(before[name])
    return got, grads, after


def unsum_name(name):
    return name.removeprefix("_orig_mod.")


def same(model, compiled, x, sites, in_order=lambda each: each, **options):
    plain, grads, buffers = captured(model, x, sites, **options)
    got, others, after = captured(compiled, x, sites, **options)
    assert in_order([str(event) for event in got.trace()]) == in_order([str(event) for event in plain.trace()])
    by_name = lambda got: list(got.items()) if in_order is not sorted else sorted(got.items(), key=lambda each: each[0])
    for (name, value), (other, expected) in zip(by_name(got), by_name(plain), strict=True):
        assert name == other
        torch.testing.assert_close(value, expected, msg=lambda text, name=name: f"{name}: {text}")
        assert not value.requires_grad
    for name, grad in grads.items():
        if grad is not None:
            torch.testing.assert_close(others[name], grad)
        else:  # a compiled model has zeros for parameters that the loss does not reach
            assert others[name] is None or not others[name].any()
    torch.testing.assert_close(after, buffers)
    return got


@pytest.fixture
def ran(compiled_calls):
    """How often a model ran compiled so far."""
    return lambda: len(compiled_calls)


@pytest.mark.parametrize("name", NETS)
def test_values_and_gradients_are_those_of_the_model_itself(name, ran):
    model, compiled, batch = build(name)
    sizes = [3, 3, 3, 3, 4, 5]
    for step, n in enumerate(sizes):
        same(model, compiled, batch(n, step), ALL)
    assert ran() == len(sizes) - FIRST


@pytest.mark.parametrize("name", ["attention", "nested"])
@pytest.mark.slow
def test_inductor(name, ran):
    model, compiled, batch = build(name, "inductor")
    for step, n in enumerate([3, 3, 3, 4]):
        same(model, compiled, batch(n, step), ALL)
    assert ran() == 2


@pytest.mark.parametrize("sites", [("*:grad_input",), (*ALL, "*:grad_input")], ids=["alone", "all"])
@pytest.mark.parametrize("name", NETS)
def test_shares_of_inputs_are_those_of_the_model_itself(name, sites, ran):
    model, compiled, batch = build(name)
    in_order = sorted if name == "identities" else lambda each: each  # of a module that returns what it is given
    for step, n in enumerate([3, 3, 3, 4, 5]):
        same(model, compiled, batch(n, step), sites, in_order=in_order)
    assert ran() == 3


class Several(nn.Module):
    """Several arguments, by place and by keyword; `how` says whether one of them also comes in another way."""

    def __init__(self, how):
        super().__init__()
        self.first, self.inner, self.out = nn.Linear(4, 4), Product(), nn.Linear(4, 2)
        self.how = how

    def forward(self, x):
        h = self.first(x)
        self.inner.beside = h if self.how == "attribute" else None
        more = (h,) if self.how == "nested" else ()
        h = h * 1 if self.how == "view" else h
        other = h.view_as(h) if self.how == "view" else h
        return self.out(self.inner(h, other, c=h.sin(), more=more) + self.inner(h, x, c=h) + h)


class Product(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.beside = nn.Linear(4, 4), None

    def forward(self, a, b, *, c, more=()):
        found = self.layer(a) * b + c + sum(more)
        return found if self.beside is None else found + self.beside.cos()


@pytest.mark.parametrize("how", ["twice", "view", "nested", "attribute"])
def test_shares_of_arguments_that_are_one_tensor(how, ran):
    sites = ("inner:grad_input", "inner:grad_input[1]", "inner:grad_input.c")
    model, compiled, batch = build("several", nets={"several": (lambda: Several(how), rows)})
    for step in range(5):
        same(model, compiled, batch(3, step), sites, in_order=sorted)
    assert ran() == 3


class Paired(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.inner, self.out = nn.Linear(4, 4), Sum(), nn.Linear(4, 2)

    def forward(self, x):
        h = self.first(x)
        return self.out(self.inner((h, h.tanh())) + h)


class Sum(nn.Module):
    def forward(self, pair):
        return pair[0].exp() + pair[1]


def test_shares_of_arguments_in_a_tuple(ran):
    model, compiled, batch = build("paired", nets={"paired": (Paired, rows)})
    for step in range(4):
        same(model, compiled, batch(3, step), ("inner:grad_input[0]", "inner:grad_input[0][1]"), in_order=sorted)
    assert ran() == 4 - FIRST


class Looking(nn.Module):
    """Its inner module looks at more of its argument than the numbers, or does more with it than compute."""

    def __init__(self, how):
        super().__init__()
        self.first, self.inner, self.out = nn.Linear(4, 4), Looked(how), nn.Linear(4, 2)
        self.scale, self.how = nn.Parameter(torch.rand(4)), how

    def forward(self, x):
        h = self.inner.last = self.first(x)
        h.by = 2.0
        y = self.inner(self.scale if self.how == "parameter" else h, [h]) * h
        return self.out(y + self.inner.last.cos() + (self.inner.kept if self.how == "stored" else h))


class Looked(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.layer, self.how, self.last = nn.Linear(4, 4), how, None

    def forward(self, h, others):
        y = self.layer(h)
        if self.how == "hook":
            h.register_hook(lambda grad: grad * 5)
            return y + h.sin()
        if self.how == "stored":
            self.kept = h
            return y
        is_so = {
            "parameter": lambda: isinstance(h, nn.Parameter), "note": lambda: hasattr(h, "by"),
            "is in a list": lambda: others[0] is h, "is an attribute": lambda: self.last is h,
            "view": lambda: h._base is None,
        }[self.how]  # fmt: skip
        return y if is_so() else y * 3


@pytest.mark.parametrize("sites", [("*:grad_input",), (*ALL, "*:grad_input")], ids=["alone", "all"])
@pytest.mark.parametrize("how", ["parameter", "note", "is in a list", "is an attribute", "view", "hook", "stored"])
def test_a_module_whose_share_is_wanted_sees_the_argument_itself(how, sites, ran):
    model, compiled, batch = build("looking", nets={"looking": (lambda: Looking(how), rows)})
    for step in range(4):
        x = batch(3, step)
        same(model, compiled, x, sites, in_order=sorted)
        torch.testing.assert_close(compiled(x), model(x))
    assert ran() == (4 - FIRST if how != "hook" or TELLS_HOOKS else 0)


class Passing(nn.Module):
    """Its inner module returns its argument beside what it computes."""

    def __init__(self):
        super().__init__()
        self.first, self.inner, self.out = nn.Linear(4, 4), Beside(), nn.Linear(4, 2)

    def forward(self, x):
        h, y = self.inner(self.first(x))
        return self.out(h.sin() * y)


class Beside(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, h):
        return h, self.layer(h)


def test_shares_of_a_module_that_returns_its_argument_inside_a_tuple_run_eagerly(ran):
    model, compiled, batch = build("passing", nets={"passing": (Passing, rows)})
    for step in range(4):
        same(model, compiled, batch(3, step), (*ALL, "*:grad_input"), in_order=sorted)
    assert ran() == 0


def test_parts_of_outputs_calls_and_keywords(ran):
    model, compiled, batch = build("nested")
    sites = ("inner:output.parts[1]", "inner:input.scale", "inner:grad_output.parts[0]", ":output.aux", "inner:input")
    for step in range(4):
        got = same(model, compiled, batch(3, step), sites)
    assert len(got) == 5 and ran() == 2
    model, compiled, batch = build("twice")
    for step in range(4):
        got = same(model, compiled, batch(3, step), ("first:output@1", "first:grad_output@0"))
        assert got.keys() == ["first:output@1", "first:grad_output@0"]
    assert ran() == 4


@pytest.mark.parametrize(
    "options",
    [{"keep": "clone"}, {"reduce": "norm"}, {"slice": (slice(None), 0)}, {"dtype": torch.float32}, {"scaler": 8.0}],
    ids=str,
)
def test_options_of_captures(options, ran):
    model, compiled, batch = build("twice")
    for step in range(3):
        same(model, compiled, batch(3, step), ALL, **options)
    assert ran() == 1


def test_outputs_that_the_loss_does_not_use_leave_their_modules_without_a_gradient(ran):
    model, compiled, batch = build("nested")
    losses = [loss_of, loss_of, loss_of, lambda out: out["aux"].sum(), lambda out: out["logits"].sum(), loss_of]
    for step, loss in enumerate(losses):
        got = same(model, compiled, batch(3, step), ALL, loss=loss)
        assert ("inner.left:grad_output" in got) == (loss is not losses[4])
        assert ("head:grad_output" in got) == (loss is not losses[3])
    assert ran() == 4


def test_two_backwards_and_autograd_grad(ran):
    model, compiled, batch = build("residual")
    x = batch(3)
    for _ in range(3):
        found = []
        for each in (model, compiled):
            with unsum.capture(each, "a:grad_output", "b:output") as got:
                out = each(x)
                out.sum().backward(retain_graph=True)
                torch.autograd.grad(out.square().sum(), model.a.weight)
            found.append(got)
        for one, other in zip(found[0].calls("a:grad_output"), found[1].calls("a:grad_output"), strict=True):
            torch.testing.assert_close(one, other)
        assert len(found[1].calls("a:grad_output")) == 2
    assert ran() == 1


def test_several_calls_in_one_block_and_micro_batches(ran):
    model, compiled, batch = build("residual")
    found = []
    for each in (model, compiled):
        with unsum.capture(each, "a:output", "a:grad_output") as got:
            losses = [each(batch(3, step)).square().sum() for step in range(5)]
            for loss in losses[::-1]:
                loss.backward()
        found.append(got)
    for site in ("a:output", "a:grad_output"):
        for one, other in zip(found[0].calls(site), found[1].calls(site), strict=True):
            torch.testing.assert_close(one, other)
    assert ran() == 3


def test_without_gradients(ran):
    model, compiled, batch = build("residual")
    for step in range(4):
        with torch.no_grad(), unsum.capture(compiled, "a:output", "b:grad_output", missing="ignore") as got:
            compiled(batch(3, step))
        torch.testing.assert_close(got["a:output"], model.a(batch(3, step)))
        with pytest.raises(unsum.errors.SiteError, match="gradients switched off"):
            got["b:grad_output"]
    assert ran() == 2


def test_frozen_sites_say_why(ran):
    _, compiled, batch = build("frozen")
    for step in range(3):
        with pytest.raises(unsum.errors.SiteError, match="needs no gradient"):
            with unsum.capture(compiled, "0:grad_output"):
                compiled(batch(3, step)).sum().backward()
    assert ran() == 1


def test_one_compilation_for_many_blocks(ran):
    model, compiled, batch = build("twice", torch_backend := Counting(), dynamic=False)
    for step in range(6):
        same(model, compiled, batch(3, step), ALL)
    assert ran() == 4 and torch_backend.times == 1
    compiled(batch(3))
    assert torch_backend.times == 2  # its own


class Counting:
    """A backend that counts how often it is asked."""

    def __init__(self):
        self.times = 0

    def __call__(self, graph, inputs):
        from torch._dynamo.backends.debugging import aot_eager

        self.times += 1
        return aot_eager(graph, inputs)


class ChangesItsInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        h = self.a(x.unsqueeze(1))
        h += 1
        return self.b(h)


class Breaks(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        h = self.a(x)
        torch._dynamo.graph_break()
        return self.b(h)


class Loops(nn.Module):
    """Breaks inside a module that is called in a loop."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Breaks() for _ in range(3))
        self.first, self.out = nn.Linear(4, 4), nn.Linear(2, 2)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x).repeat(1, 2)
        self.count += 1
        return self.out(x[:, :2])


BROKEN = {"breaks": (Breaks, rows), "loops": (Loops, rows)}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("sites", [ALL, ("*:output",)], ids=str)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_graph_breaks(name, sites, ran):
    model, compiled, batch = build(name, nets=BROKEN)
    for step, n in enumerate([3, 3, 3, 3, 4, 5]):
        same(model, compiled, batch(n, step), sites, in_order=sorted)  # a part's gradients come all at once
    assert ran() == 4
    for step in range(4):
        with torch.no_grad(), unsum.capture(compiled, "*:output") as got:
            compiled(batch(3, step))
        with torch.no_grad(), unsum.capture(model, "*:output") as plain:
            model(batch(3, step))
        torch.testing.assert_close(dict(got.items()), dict(plain.items()))


class Recurrent(nn.Module):
    """A cell in a loop with a break: it returns its state, and what it has computed from the state."""

    def __init__(self):
        super().__init__()
        self.first, self.cell, self.out = nn.Linear(4, 4), Cell(), nn.Linear(4, 2)

    def forward(self, x):
        h = c = self.first(x)
        for _ in range(2):
            h, c = self.cell(h, c)
            torch._dynamo.graph_break()
        return self.out(h * c)


class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, h, c):
        c = self.layer(h) + c
        return c.tanh(), c


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "sites", [("cell:grad_output",), ("cell:output", "cell:grad_input")], ids=["outputs", "inputs"]
)
def test_outputs_of_one_part_of_which_one_is_computed_from_the_other(sites, ran):
    model, compiled, batch = build("recurrent", nets={"recurrent": (Recurrent, rows)})
    for step in range(4):
        same(model, compiled, batch(3, step), sites, in_order=sorted)
    assert ran() == (0 if "cell:grad_output" in sites else 4 - FIRST)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_blocks_that_are_alike_and_of_which_some_are_asked_for(ran):
    model, _, batch = build("loops", nets=BROKEN)
    backend = Counting()
    compiled = torch.compile(model, backend=backend)
    for sites in (("blocks.1.a:output", "blocks.1.b:grad_output"), ("blocks.0.b:input", "blocks.2.a:grad_output")):
        times = []
        for step in range(6):
            same(model, compiled, batch(3, step), sites, in_order=sorted)
            times.append(backend.times)
        assert times[2] > times[1] and times[2:] == times[2:3] * 4, "compiled in the third step, and not again"
    assert ran() == 8


def test_a_part_that_cannot_be_told_apart_after_others_have_run(ran):
    class Gain(nn.Module):
        def __init__(self):
            super().__init__()
            self.by = nn.Parameter(torch.rand(2))

        def forward(self):
            return self.by  # whose gradient no node inside the compiled part shows

    class Late(Loops):
        def forward(self, x):
            return super().forward(x) * self.gain()

    torch.manual_seed(0)
    model = Late()
    model.gain = Gain()
    model.double()
    compiled = torch.compile(model, backend="aot_eager")
    for step in range(4):
        same(model, compiled, rows(3, step), ALL, in_order=sorted)
    assert ran() == 0


class Writes(nn.Module):
    """Writes into a buffer, from which the loss is computed."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x, memory):
        memory.copy_(self.a(x))
        return self.b(x)


@pytest.mark.parametrize("uses", ["both", "memory", "output"])
def test_gradients_that_come_through_an_input_that_was_changed(uses, ran):
    torch.manual_seed(0)
    model = Writes().double()
    compiled = torch.compile(model, backend="aot_eager")
    for step in range(4):
        found = []
        for each in (model, compiled):
            memory = torch.zeros(3, 4, dtype=torch.float64)
            with unsum.capture(each, "a:grad_output", "b:grad_output", missing="ignore") as got:
                out = each(rows(3, step), memory)
                sum(
                    {"both": [out.sum(), memory.sum()], "memory": [memory.sum()], "output": [out.sum()]}[uses]
                ).backward()
            found.append(dict(got.items()))
        torch.testing.assert_close(found[1], found[0])
    assert ran() == 0


class OldName(nn.Module):
    """Changes a tensor in place by a module, and goes on with its old name."""

    def __init__(self):
        super().__init__()
        self.a, self.relu, self.b = nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 2)

    def forward(self, x):
        h = self.a(x)
        self.relu(h)
        return self.b(h)


class Chunks(nn.Module):
    def __init__(self):
        super().__init__()
        self.halves = Halves()

    def forward(self, x):
        one, other = self.halves(x)
        return {"one": one * 2, "other": other * 3}


class Halves(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x):
        return self.a(x).chunk(2, -1)


def test_a_module_that_works_in_place_and_whose_result_nobody_takes(ran):
    torch.manual_seed(0)
    model = OldName().double()
    compiled = torch.compile(model, backend="aot_eager")
    for step in range(4):
        same(model, compiled, rows(3, step), ("relu:grad_output", "b:grad_output"))
    assert ran() == 0


def test_of_several_results_of_one_operation_some_get_a_gradient(ran):
    torch.manual_seed(0)
    model = Chunks().double()
    compiled = torch.compile(model, backend="aot_eager")
    for step, key in enumerate(["one", "one", "one", "other", "one"]):
        got = same(model, compiled, rows(3, step), ("halves:grad_output",), loss=lambda out, key=key: out[key].sum())
        assert got.keys() == [f"halves:grad_output[{0 if key == 'one' else 1}]"]
    assert ran() == 3


def test_a_reduction_that_raises_does_so_once_and_the_model_has_run_once():
    model, compiled, batch = build("batch norm")
    for step in range(4):

        def reduce(tensor, step=step):
            if step == 3:
                raise ValueError("mine")
            return tensor.sum()

        before = int(model[1].num_batches_tracked)
        if step < 3:
            with unsum.capture(compiled, "0:output", reduce=reduce):
                compiled(batch(3, step))
        else:
            with pytest.raises(ValueError, match="mine"), unsum.capture(compiled, "0:output", reduce=reduce):
                compiled(batch(3, step))
        assert int(model[1].num_batches_tracked) == before + 1


def test_other_threads_call_the_model_meanwhile():
    import threading

    model, compiled, batch = build("attention")
    errors, over = [], threading.Event()

    def work():
        while not over.is_set():
            try:
                model(batch(3))
            except Exception as error:
                errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for step in range(3):
            with unsum.capture(compiled, "out:output", "out:grad_output"):
                compiled(batch(3, step)).sum().backward()
    finally:
        over.set()
        thread.join()
    assert not errors


def test_the_compiler_is_not_imported_before_it_is_needed():
    import subprocess
    import sys

    code = "import sys, torch, unsum; net = torch.nn.Linear(1, 1); block = unsum.capture(net, ':output')\n"
    code += "with block: net(torch.ones(1, 1))\nsys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_models_are_freed():
    import gc
    import weakref

    alive = weakref.WeakSet()
    for _ in range(3):
        model, compiled, batch = build("twice")
        alive.add(model)
        for step in range(3):
            with unsum.capture(compiled, *ALL):
                loss_of(compiled(batch(3, step))).backward()
        del model, compiled
        torch._dynamo.reset()
    gc.collect()
    assert len(alive) <= 1


ODD = {
    "in place": (InPlace, rows),
    "in place, a view": (ChangesItsInput, rows),
    "checkpoint": (Checkpointed, ids),
}


@pytest.mark.parametrize("name", ODD)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_cannot_be_told_apart_runs_eagerly_and_is_right(name, ran):
    model, compiled, batch = build(name, nets=ODD)
    for step in range(4):
        same(model, compiled, batch(3, step), sites_in(model))


def test_copies_are_what_was_there_before_the_tensor_changed(ran):
    model, compiled, batch = build("in place", nets=ODD)
    for step in range(4):
        same(model, compiled, batch(3, step), ("*:input", "*:output"), keep="clone")
    assert ran() == 4 - FIRST
    for step in range(4):
        with unsum.capture(compiled, "layers.0:output", "layers.1:output") as got:
            compiled(batch(3, step))
        with pytest.raises(unsum.errors.SiteError, match="changed in place"):
            got["layers.0:output"]
        torch.testing.assert_close(got["layers.1:output"], model.layers[:2](batch(3, step)))
    assert ran() == 2 * (4 - FIRST)


def test_a_reduction_of_a_tensor_that_is_changed_in_place_afterwards(ran):
    model, compiled, batch = build("in place", nets=ODD)
    for step in range(4):
        same(model, compiled, batch(3, step), ("*:input", "*:output"), reduce="norm")
    assert ran() == 0


def sites_in(model):
    return [f"{name}:grad_output" for name, module in model.named_modules() if isinstance(module, nn.Linear)]


def test_marks_stops_and_attached_values_run_eagerly(ran):
    _, compiled, batch = build("residual")
    for step in range(3):
        with unsum.capture(compiled, "a:output", keep="graph") as got:
            compiled(batch(3, step))
        assert got["a:output"].requires_grad
        with unsum.capture(compiled, "a:output", stop=True) as got:
            compiled(batch(3, step))
            raise AssertionError("not stopped")
        assert got["a:output"].shape == (3, 4)
    assert ran() == 0


def test_another_block_beside_it(ran):
    model, compiled, batch = build("residual")
    for step in range(4):
        with unsum.edit(compiled, {"a:output": unsum.zero()}), unsum.capture(compiled, "a:output", "b:output") as got:
            compiled(batch(3, step))
        assert not got["a:output"].any()
        torch.testing.assert_close(got["b:output"], model.b(batch(3, step)))
    assert ran() == 0


def test_outside_the_block_everything_is_as_before():
    model, compiled, batch = build("residual")
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    for step in range(4):
        with unsum.capture(compiled, *ALL):
            loss_of(compiled(batch(3, step))).backward()
    for name, module in model.named_modules():
        assert not module._forward_hooks and not module._forward_pre_hooks
        assert not module._forward_hooks_always_called and not module._forward_pre_hooks_with_kwargs
        assert vars(module).keys() == before[name].keys()
    out = compiled(batch(3))
    torch.testing.assert_close(out, model(batch(3)))
    out.sum().backward()


def test_a_backward_after_the_block_is_not_captured(ran):
    model, compiled, batch = build("residual")
    for step in range(4):
        with unsum.capture(compiled, "a:grad_output", "a:output", missing="ignore") as got:
            out = compiled(batch(3, step))
        model.zero_grad()
        loss_of(out).backward()
        assert "a:grad_output" not in got and "a:output" in got
        grad = model.a.weight.grad.clone()
        model.zero_grad()
        loss_of(model(batch(3, step))).backward()
        torch.testing.assert_close(grad, model.a.weight.grad)
    assert ran() == 2


def test_autocast(ran):
    model, compiled, batch = build("residual")
    model.float()
    for step in range(4):
        found = []
        for each in (model, compiled):
            with torch.autocast("cpu", torch.bfloat16), unsum.capture(each, "b:output", "b:grad_output") as got:
                each(batch(3, step).float()).float().square().sum().backward()
            found.append(got)
        for site in ("b:output", "b:grad_output"):
            assert found[1][site].dtype == found[0][site].dtype == torch.bfloat16
            torch.testing.assert_close(found[1][site], found[0][site], rtol=0.05, atol=0.05)
    assert ran() == 2


def test_no_growth_inside_one_long_block(ran):
    import gc
    import weakref

    _, compiled, batch = build("residual")
    alive = weakref.WeakSet()
    with unsum.capture(compiled, "a:output", "a:grad_output", reduce="norm"):
        for step in range(40):
            out = compiled(batch(3, step % 3))
            alive.add(out)
            out.sum().backward()
            del out
    gc.collect()
    assert len(alive) == 0 and ran() == 38


def test_training_and_evaluation(ran):
    model, compiled, batch = build("batch norm")
    for step in range(8):
        compiled.train(step % 2 == 0)
        same(model, compiled, batch(3, step), ALL)
    assert ran() == 6


def test_a_dropout_draws_what_the_compiled_model_draws(ran):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5), nn.Linear(64, 2)).double()
    compiled = torch.compile(model, backend="aot_eager")
    for step in range(4):
        model.zero_grad()
        with unsum.capture(compiled, "1:output", "2:grad_output") as got:
            out = compiled(rows(3, step))
            out.square().sum().backward()
        torch.testing.assert_close(F.linear(got["1:output"], model[2].weight, model[2].bias), out)
        torch.testing.assert_close(model[2].weight.grad, got["2:grad_output"].T @ got["1:output"])
    assert ran() == 2


def test_an_attribute_says_which_layer_is_called(ran):
    model, compiled, batch = build("choosing", nets={"choosing": (Choosing, rows)})
    for step in range(8):
        model.active = (model.a, model.b)[step // 3 % 2]
        same(model, compiled, batch(3, step), ("b:output", "b:grad_output"))
    assert ran() == 8 - FIRST


class Hooked(nn.Module):
    """Changes gradients inside a module and after it, by hooks on the tensor that the module returns."""

    def __init__(self):
        super().__init__()
        self.inner, self.out = HookedInside(), nn.Linear(4, 2)

    def forward(self, x):
        h = self.inner(x)
        h.register_hook(lambda grad: grad * 7)
        return self.out(h.sin())


class HookedInside(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        h = self.layer(x)
        h.register_hook(lambda grad: grad * 5)
        return h


def test_gradients_between_hooks_of_the_model_on_one_tensor(ran):
    model, compiled, batch = build("hooked", nets={"hooked": (Hooked, rows)})
    for step in range(4):
        x = batch(3, step)
        got = same(model, compiled, x, ("inner.layer:grad_output", "inner:grad_output"))
        h = model.inner.layer(x).detach().requires_grad_()
        loss_of(model.out(h.sin())).backward()
        torch.testing.assert_close(got["inner.layer:grad_output"], h.grad)
        torch.testing.assert_close(got["inner:grad_output"], h.grad * 5)
    assert ran() == (4 - FIRST if TELLS_HOOKS else 0)


def test_hooks_on_what_compile_has_returned_are_called(ran):
    _, compiled, batch = build("twice")
    compiled.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    for step in range(4):
        with unsum.capture(compiled, "first:input@0") as got:
            compiled(batch(3, step))
        torch.testing.assert_close(got["first:input@0"], batch(3, step) + 1)
    assert ran() == 0
