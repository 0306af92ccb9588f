"""Tensors that are computed from parameters alone are no data, however they look."""

import pytest
import torch
from reference import each_of, per_sample_gradients
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

import unsum
from one_by_one import assert_rows, assert_same, random, same, squares
from unsum.errors import InteractionError

T, D = 3, 6


class Symmetric(nn.Module):
    def forward(self, w):
        return w.triu() + w.triu(1).T


PARAMETRIZED = {
    "symmetric": lambda layer: parametrize.register_parametrization(layer, "weight", Symmetric()),
    "weight norm": parametrizations.weight_norm,
    "orthogonal": parametrizations.orthogonal,
    "spectral norm": lambda layer: parametrizations.spectral_norm(layer).eval(),
}


@pytest.mark.parametrize("outside", [False, True], ids=["cached inside the block", "cached around the block"])
@pytest.mark.parametrize("n", [4, D], ids=["no sizes coincide", "n = features"])
@pytest.mark.parametrize("how", PARAMETRIZED)
def test_a_parametrized_weight_that_is_cached_is_no_data(how, n, outside):
    torch.manual_seed(0)
    layer = PARAMETRIZED[how](nn.Linear(D, D)).double()
    model = nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(D, 2).double())
    x = random(n, D)

    def run(m, x):
        with parametrize.cached():
            return squares(m, x) + squares(m, 2 * x)

    if not outside:
        assert_rows(model, run, x)
        return
    each = per_sample_gradients(model, run, x)
    for reducer in (None, unsum.Norms()) * 2:
        with parametrize.cached():
            layer.weight  # computed before the block begins
            with unsum.gradients(model, *([reducer] if reducer else [])) as g:
                (squares(model, x) + squares(model, 2 * x)).backward()
        assert_same(g, each, reducer)


class Dora(nn.Module):
    """A frozen weight, a low-rank change, and a magnitude for each output. `norm` is taken of the sum's rows."""

    def __init__(self, norm, first):
        super().__init__()
        self.base = nn.Linear(D, D).requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(2, D)), nn.Parameter(torch.randn(D, 2))
        self.magnitude, self.norm, self.first = nn.Parameter(torch.rand(D) + 1), norm, first

    def forward(self, x):
        whole = self.base.weight + self.up @ self.down
        if self.first:  # merged before it meets data
            return F.linear(x, self.magnitude[:, None] * whole / self.norm(whole)[:, None], self.base.bias)
        scale = self.magnitude / self.norm(whole)
        return (F.linear(x, self.base.weight) + F.linear(F.linear(x, self.down), self.up)) * scale + self.base.bias


@pytest.mark.parametrize("n", [4, D], ids=["no sizes coincide", "n = features"])
@pytest.mark.parametrize("first", [True, False], ids=["merged", "apart"])
@pytest.mark.parametrize(
    "norm",
    [lambda w: w.norm(dim=1), lambda w: w.norm(dim=1).detach(), lambda w: torch.linalg.norm(w, dim=1)],
    ids=["norm", "detached", "linalg"],
)
def test_magnitudes_of_weights_are_no_data(norm, first, n):
    torch.manual_seed(0)
    assert_rows(nn.Sequential(Dora(norm, first), nn.Tanh(), nn.Linear(D, 2)).double(), squares, random(n, T, D))


@pytest.mark.parametrize("n", [4, D], ids=["no sizes coincide", "n = features"])
def test_a_weight_that_was_merged_before_the_block_is_no_data(n):
    class Merged(Dora):
        def merge(self):
            whole = self.base.weight + self.up @ self.down
            self.merged = self.magnitude[:, None] * whole / whole.norm(dim=1, keepdim=True)

        def forward(self, x):
            return torch.tanh(F.linear(x, self.merged))

    torch.manual_seed(0)
    model, x = Merged(None, True).double(), random(n, D)
    model.merge()
    each = each_of(model, model(x).square().sum(1))
    for reducer in (None, unsum.Norms()):
        model.merge()
        with unsum.gradients(model, *([reducer] if reducer else [])) as g:
            squares(model, x).backward()
        assert_same(g, each, reducer)
        if reducer is None:
            for name, wanted in each.items():
                same(g[name].per_sample(), wanted, 1e-9 * float(wanted.norm()), name)


class Peft(nn.Module):
    """The low-rank change is had by sending the unit vectors through its layers, as in peft."""

    def __init__(self, detached):
        super().__init__()
        self.base, self.detached = nn.Linear(D, D, bias=False).requires_grad_(False), detached
        self.down, self.up = nn.Linear(D, 2, bias=False), nn.Linear(2, D, bias=False)
        self.magnitude = nn.Parameter(torch.rand(D) + 1)

    def forward(self, x):
        change = self.up(self.down(torch.eye(D, dtype=x.dtype))).T
        norm = (self.base.weight + (change.detach() if self.detached else change)).norm(dim=1)
        return (self.magnitude / norm).view(1, -1) * (self.base(x) + self.up(self.down(x)))


@pytest.mark.parametrize("n", [4, D], ids=["no sizes coincide", "n = features"])
@pytest.mark.parametrize("detached", [True, False])
def test_unit_vectors_that_are_sent_through_layers_are_no_data(detached, n):
    torch.manual_seed(0)
    assert_rows(nn.Sequential(Peft(detached), nn.Tanh(), nn.Linear(D, 2)).double(), squares, random(n, T, D))
    torch.manual_seed(0)
    assert_rows(nn.Sequential(Peft(detached), nn.Tanh(), nn.Linear(D, 2)).double(), squares, random(n, D))


class Biased(nn.Module):
    """Attention with a bias for each distance between positions. `look` reads it from the table."""

    def __init__(self, look, heads, entries):
        super().__init__()
        self.table, self.heads, self.look = nn.Parameter(torch.randn(entries, heads)), heads, look
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, 2)

    def forward(self, x):
        t = x.shape[1]
        q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        scores = q @ k.transpose(2, 3) + self.look(self.table, t)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


def distances(t):
    return torch.arange(t)[:, None] - torch.arange(t)[None] + t - 1


LOOKS = {
    "swin": lambda table, t: table[distances(t).view(-1)].view(t, t, -1).permute(2, 0, 1).contiguous().unsqueeze(0),
    "t5": lambda table, t: F.embedding(distances(t).clamp(max=4), table).permute(2, 0, 1)[None],
    "index_select": lambda table, t: (
        table.index_select(0, distances(t).flatten()).unflatten(0, (t, t)).permute(2, 0, 1)
    ),
    "gather": lambda table, t: (
        table[:, :, None]
        .expand(-1, -1, t)
        .gather(0, distances(t)[:, None].expand(-1, table.shape[1], -1))
        .transpose(0, 1)
    ),
    "continuous": lambda table, t: torch.tanh(table)[distances(t)].permute(2, 0, 1) * 16,
}


@pytest.mark.parametrize("heads", [2, 3], ids=["two heads", "as many heads as positions"])
@pytest.mark.parametrize("n", [4, 3, 5], ids=["n = features - 2", "n = positions", "n = entries"])
@pytest.mark.parametrize("look", LOOKS)
def test_tables_of_relative_positions_are_no_data(look, n, heads):
    torch.manual_seed(0)
    assert_rows(Biased(LOOKS[look], heads, 2 * T - 1).double(), squares, random(n, T, D))


def hf(kind, config):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    return getattr(transformers, kind)(getattr(transformers, config[0])(**config[1])).eval().double()


SMALL = {
    "num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 20, "intermediate_size": 24,
    "max_position_embeddings": 16, "pad_token_id": 0,
}  # fmt: skip
DEBERTA = SMALL | {"relative_attention": True, "max_relative_positions": 8, "pos_att_type": ["c2p", "p2c"]}
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "vocab_size": 20, "pad_token_id": 0}
RELATIVE = {
    "deberta": ("DebertaModel", ("DebertaConfig", DEBERTA | {"position_biased_input": False})),
    "deberta v2": (
        "DebertaV2Model",
        ("DebertaV2Config", DEBERTA | {"position_buckets": 4, "norm_rel_ebd": "layer_norm"}),
    ),
    "deberta v2, shared": ("DebertaV2Model", ("DebertaV2Config", DEBERTA | {"share_att_key": True})),
    "t5": ("T5EncoderModel", ("T5Config", T5)),
}


@pytest.mark.parametrize("n", [3, 5], ids=["no sizes coincide", "n = T"])
@pytest.mark.parametrize("name", RELATIVE)
def test_language_models_with_relative_positions(name, n):
    model = hf(*RELATIVE[name])
    ids = torch.randint(1, 20, (n, 5))
    # Some of their numbers are rounded to float32.
    assert_rows(model, lambda m, ids: m(input_ids=ids).last_hidden_state.sin().square().sum(), ids, tolerance=1e-6)


SWIN = {"img_size": 16, "patch_size": 2, "window_size": 4, "embed_dim": 8, "depths": (2, 1), "num_heads": (1, 2)}


@pytest.mark.parametrize("n", [2, 4], ids=["n = heads", "n = windows"])
@pytest.mark.parametrize("name", ["SwinTransformer", "SwinTransformerV2"])
def test_windows_with_relative_positions(name, n):
    timm = pytest.importorskip("timm", reason="timm is not installed")
    torch.manual_seed(0)
    model = getattr(timm.models, name)(num_classes=3, **SWIN).double().eval()
    assert_rows(model, squares, random(n, 3, 16, 16), tolerance=1e-6)


class Pairs(nn.Module):
    """As CLIP: embeddings of both kinds, and the similarities of all pairs."""

    def __init__(self):
        super().__init__()
        self.texts, self.images, self.scale = nn.Linear(D, 5), nn.Linear(D, 5), nn.Parameter(torch.tensor(1.0))

    def forward(self, text, image):
        text, image = F.normalize(self.texts(text), dim=1), F.normalize(self.images(image), dim=1)
        logits = self.scale.exp() * text @ image.T
        return {"logits_per_text": logits, "logits_per_image": logits.T, "text_embeds": text, "image_embeds": image}


@pytest.mark.parametrize("verify", [False, True], ids=["", "verified"])
@pytest.mark.parametrize("used", ["text_embeds", "image_embeds"])
@pytest.mark.parametrize("n", [4, 5], ids=["no sizes coincide", "n = features"])
def test_similarities_of_all_pairs_that_the_loss_does_not_use(n, used, verify):
    torch.manual_seed(0)
    text, image = random(n, D), random(n, D)
    run = lambda m, text, image: m(text, image)[used][:, :2].sin().sum()
    assert_rows(Pairs().double(), run, text, image, verify=verify)


def test_similarities_of_all_pairs_that_the_loss_uses_are_refused():
    torch.manual_seed(0)
    model, text, image = Pairs().double(), random(4, D), random(4, D)
    with pytest.raises(InteractionError):
        with unsum.gradients(model):
            F.cross_entropy(model(text, image)["logits_per_text"], torch.arange(4)).backward()


@pytest.mark.parametrize("used", ["image_embeds", "text_embeds"])
@pytest.mark.parametrize("n", [3, 5], ids=["no sizes coincide", "n = T"])
def test_clip_with_a_loss_on_one_kind_of_embedding(n, used):
    text = SMALL | {"bos_token_id": 0, "eos_token_id": 19}
    vision = {"image_size": 8, "patch_size": 4} | {k: v for k, v in SMALL.items() if "hidden" in k or "attention" in k}
    config = {"text_config": text, "vision_config": vision | {"intermediate_size": 24}, "projection_dim": 8}
    model = hf("CLIPModel", ("CLIPConfig", config))
    ids, pixels = torch.randint(1, 19, (n, 5)), random(n, 3, 8, 8)
    ids[:, -1] = 19
    run = lambda m, ids, pixels: getattr(m(input_ids=ids, pixel_values=pixels), used)[:, :3].sin().sum()
    assert_rows(model, run, ids, pixels, tolerance=1e-6)
