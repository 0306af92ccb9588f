"""A plain site, whose tensor is seen at a glance, against the same site beside one that makes the block look through
all that a call was given: the same values, order, notes and errors. And names that are remembered are never stale."""

import gc
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import unsum
from unsum import tree


class Calls(nn.Module):
    """Calls its own `m` as a case says."""

    def __init__(self, m, how=lambda self, x: self.m(x)):
        super().__init__()
        self.first, self.m, self.last = nn.Linear(4, 4), m, nn.Linear(4, 4)
        self.how = how

    def forward(self, x):
        return self.last(self.how(self, self.first(x)))


class Own(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.ones(2, 3, 4))

    def forward(self, *args, **kwargs):
        return self.function(self, *args, **kwargs)


def again(self, x, depth=2):
    return x if depth == 0 else self(torch.tanh(x), depth - 1)


def tried(self, x):
    with pytest.raises(ValueError, match="this once"):
        self.m(x, fails=True)
    return self.m(x)


def failing(self, x, fails=False):
    if fails:
        raise ValueError("this once")
    return x * 2


def handled(self, x):
    try:
        raise KeyError
    except KeyError:
        return self.m(x)


def of_another_thread(x):
    """Twice x, by a node that another thread has given a higher number than is next here."""
    made, here = [], torch._C._autograd._get_sequence_nr()

    def make():
        while torch._C._autograd._get_sequence_nr() < here + 100:
            x.view_as(x)
        made.append(x * 2)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    return made[0]


def elsewhere(self, x):
    made = of_another_thread(x)
    return self.m(made) + made.sin()


def elsewhere_by_keyword(self, x):
    made = of_another_thread(x)
    return self.m(x, other=made) + made.sin()


def kept_aside(self, x):
    """The module returns a tensor that is older than the call, and no argument of it."""
    self.m.aside = [x * 2]
    return self.m(x) + self.m.aside[0].sin()


def no_grad(self, x):
    with torch.no_grad():
        self.m(x)
    return self.m(x)


def inference(self, x):
    with torch.inference_mode():
        made = torch.ones(2, 3, 4)
    return x + self.m(made)


def switching_off(self, x):
    torch.set_grad_enabled(False)
    return x * 2


def switching_off_late(self, x):
    y = x * 2
    torch.set_grad_enabled(False)
    return y


def back_on(self, x):
    self.m(x)
    torch.set_grad_enabled(True)
    return x


def changed_by_a_hook(self, x):
    handle = self.m.register_forward_pre_hook(lambda _, args: (args[0] * 2,))
    y = self.m(x)
    handle.remove()
    return y


def full_backward_hook(self, x):
    handle = self.m.register_full_backward_hook(lambda *_: None)
    y = self.m(x)
    handle.remove()
    return y


def listened_to(self, x):
    y = self.m(x)
    y.register_hook(lambda grad: grad * 3)  # what is captured is what came before
    return y


CASES = {
    "linear": Calls(nn.Linear(4, 4)),
    "no bias": Calls(nn.Linear(4, 4, bias=False)),
    "twice": Calls(nn.Linear(4, 4), lambda self, x: self.m(self.m(x))),
    "identity": Calls(nn.Identity()),
    "identity beside others": Calls(nn.Identity(), lambda self, x: self.m(x) + x.sin()),
    "an older tensor": Calls(Own(lambda self, x: self.aside[0]), kept_aside),
    "in place": Calls(nn.ReLU(inplace=True)),
    "changed after": Calls(nn.Linear(4, 4), lambda self, x: self.m(x).add_(1)),
    "changed through an alias": Calls(nn.Linear(4, 4), lambda self, x: F.relu_(self.m(x).view(6, 4)).view(2, 3, 4)),
    "transposed, then changed": Calls(
        Own(lambda _, x: (x * 2).transpose(0, 1)), lambda self, x: self.m(x).mul_(2).transpose(0, 1)
    ),
    "a view of its input": Calls(Own(lambda _, x: x.view(6, 4)), lambda self, x: self.m(x).view(2, 3, 4)),
    "viewed twice, then changed": Calls(
        Own(lambda _, x: (x * 2).view(6, 4).view(3, 2, 4)), lambda self, x: self.m(x).mul_(2).view(2, 3, 4)
    ),
    "a part, then changed": Calls(Own(lambda _, x: (x * 2)[:, :2]), lambda s, x: F.pad(s.m(x).mul_(2), (0, 0, 0, 1))),
    "a parameter": Calls(Own(lambda self, x: self.weight), lambda self, x: self.m(x) * x),
    "a view of a parameter": Calls(Own(lambda self, x: self.weight.view(6, 4)), lambda s, x: s.m(x).view(2, 3, 4) * x),
    "its input, changed out of sight": Calls(Own(lambda _, x: x.data.add_(0) is None or x), lambda s, x: s.m(x * 1)),
    "keyword": Calls(Own(lambda _, x: x * 2), lambda self, x: self.m(x=x)),
    "two arguments": Calls(Own(lambda _, x, y: x * y), lambda self, x: self.m(x, x)),
    "no arguments": Calls(Own(lambda self: self.weight * 2), lambda self, x: x * self.m()),
    "a list": Calls(Own(lambda _, x: [x * 2, x * 3]), lambda self, x: sum(self.m(x))),
    "nothing": Calls(Own(lambda _, x: None), lambda self, x: x if self.m(x) is None else None),
    "integers": Calls(Own(lambda _, x: x.argmax(-1)), lambda self, x: x * self.m(x)[..., None]),
    "detached": Calls(Own(lambda _, x: x.detach() * 2), lambda self, x: x * self.m(x)),
    "calls itself": Calls(Own(again)),
    "raises once": Calls(Own(failing), tried),
    "while an error is handled": Calls(nn.Linear(4, 4), handled),
    "nothing, while an error is handled": Calls(Own(lambda _, x: None), lambda s, x: x if handled(s, x) is None else 0),
    "made by another thread": Calls(nn.Linear(4, 4), elsewhere),
    "another thread's, returned": Calls(nn.Identity(), elsewhere),
    "another thread's, by keyword": Calls(Own(lambda _, x, other: other), elsewhere_by_keyword),
    "no_grad": Calls(nn.Linear(4, 4), no_grad),
    "an inference tensor": Calls(Own(lambda _, x: x + 1), inference),
    "an inference tensor that cannot be used": Calls(nn.Linear(4, 4), inference),
    "gradients switched off inside": Calls(Own(switching_off), back_on),
    "gradients switched off at the end": Calls(Own(switching_off_late), back_on),
    "checkpoint": Calls(nn.Linear(4, 4), lambda self, x: checkpoint(self.m, x, use_reentrant=False)),
    "reentrant checkpoint": Calls(nn.Linear(4, 4), lambda self, x: checkpoint(self.m, x, use_reentrant=True)),
    "saved tensors hooks": Calls(nn.Linear(4, 4), lambda self, x: _packed(self.m, x)),
    "a hook of the user's changes the input": Calls(nn.Linear(4, 4), changed_by_a_hook),
    "a full backward hook": Calls(nn.Identity(), full_backward_hook),
    "the user listens": Calls(nn.Linear(4, 4), listened_to),
    "frozen": Calls(nn.Linear(4, 4).requires_grad_(False)),
}


def _packed(module, x):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        return module(x)


SITES = [
    [(nn.Module, "input"), (nn.Module, "grad_output")],
    ["m:input", "m:output", "m:grad_output"],
    ["m:output"],
    ["m:grad_output", "*:grad_output"],
]


def _seen(model, sites, *others):
    """Everything that can be seen of these sites in a capture, beside `others`, which never fire."""
    model.zero_grad()
    x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    try:
        with unsum.capture(model, *sites, *others, missing="ignore") as got:
            out = model(x)
            out.square().sum().backward(retain_graph=True)
            out.sum().backward()
    finally:
        torch.set_grad_enabled(True)
    values = {}
    for name in got:
        try:
            values[name] = [None if value is None else value.clone() for value in got.calls(name)]
        except unsum.errors.SiteError as error:
            values[name] = str(error)
    acted = {site: [key[1:] for key in keys] for site, keys in got.acted.sites.items()}
    flow, places = got._flow, got._flow.requests.places
    asked = flow.requests.asked[: len(sites)]
    notes = [flow.note(place, site) for n, site in enumerate(asked) for place in places[n].values()]
    grads = {name: p.grad for name, p in model.named_parameters()}
    return got.trace(), values, acted, {site: len(refs) for site, refs in got.acted.loose.items()}, notes, out, grads


def _outcome(*args):
    try:
        return _seen(*args)
    except Exception as error:
        return type(error), str(error)


@pytest.mark.parametrize("sites", SITES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_a_plain_site_sees_what_it_sees_beside_others(case, sites):
    torch.manual_seed(0)
    kinds = {site[1] if isinstance(site, tuple) else site.rpartition(":")[2] for site in sites}
    alone = _outcome(CASES[case], sites)
    beside = _outcome(CASES[case], sites, *((nn.Module, f"{kind}@99") for kind in sorted(kinds)))
    assert len(alone) == len(beside)
    for one, other in zip(alone, beside, strict=True):
        assert _plain(one) == _plain(other)


def _plain(value):
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, unsum.flow.trace.Trace) else value


def _names(model):
    with unsum.capture(model, (nn.Linear, "output"), missing="ignore") as got:
        model(torch.randn(2, 4))
    return got.keys()


def net():
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Sequential(nn.Identity()))


def replaced(model):
    model[1][0] = nn.Identity()


def added(model):
    model[2].append(nn.Linear(4, 4))


def moved(model):
    model[2].insert(0, model[1].pop(0))


def renamed(model):
    model[1]._modules["other"] = model[1]._modules.pop("0")


def hung_on_a_leaf(model):
    model[0].adapter = nn.Linear(4, 4)
    model[0].register_forward_hook(lambda module, args, out: module.adapter(out))


def another_class(model):
    model[2][0].__class__ = type("Lin", (nn.Linear,), {"forward": lambda self, x: x})


def wrapped(model):
    model[1] = nn.Sequential(model[1])


def shared(model):
    model[2].append(model[0])


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (replaced, ["0:output"]),
        (added, ["0:output", "1.0:output", "2.1:output"]),
        (moved, ["0:output", "2.0:output"]),
        (renamed, ["0:output", "1.other:output"]),
        (hung_on_a_leaf, ["0.adapter:output", "0:output", "1.0:output"]),
        (another_class, ["0:output", "1.0:output", "2.0:output"]),
        (wrapped, ["0:output", "1.0.0:output"]),
        (shared, ["0:output@0", "1.0:output", "0:output@1"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_name_is_never_stale(change, names):
    model = net()
    for _ in range(2):
        assert _names(model) == ["0:output", "1.0:output"]
    assert tree.recall(model) is not None
    change(model)
    assert tree.recall(model) is None
    assert sorted(_names(model)) == sorted(names)
    assert sorted(_names(model)) == sorted(names)


def test_parameters_that_were_replaced_are_found():
    model = net()
    for _ in range(2):
        with unsum.capture(model, "*:grad") as got:
            model(torch.randn(2, 4)).sum().backward()
        assert got["0.weight:grad"].equal(model[0].weight.grad)
        model[0].weight = nn.Parameter(torch.randn(4, 4))


def test_what_is_remembered_holds_neither_model_nor_modules():
    model = net()
    _names(model)
    old, root = weakref.ref(model[1][0]), weakref.ref(model)
    model[1][0] = nn.Linear(4, 4)
    assert old() is None
    for _ in range(20):  # a new module may be where an old one was
        model[1][0] = nn.Identity()
        assert _names(model) == ["0:output"]
        model[1][0] = nn.Linear(4, 4)
        assert _names(model) == ["0:output", "1.0:output"]
    del model
    gc.collect()
    assert root() is None


def test_a_predicate_is_asked_in_every_block():
    model, wanted = net(), ["0"]

    def is_wanted(name, module):
        return name in wanted

    for name in ("0", "1.0"):
        wanted[:] = [name]
        with unsum.capture(model, (is_wanted, "output")) as got:
            model(torch.randn(2, 4))
        assert got.keys() == [f"{name}:output"]


def test_hooks_are_gone_after_the_block():
    model = net()
    with unsum.capture(model, (nn.Linear, "input"), (nn.Linear, "grad_output")):
        out = model(torch.randn(2, 4))
        hooked = out.grad_fn is not None and model[0]._forward_hooks and model[0]._forward_pre_hooks
        assert hooked
        out.sum().backward()
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert not module._forward_hooks_always_called
        assert not module._forward_pre_hooks_with_kwargs
