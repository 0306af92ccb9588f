"""The suite's architectures on batches that change from step to step: samples, lengths, sizes of images, masks, order.
Nothing here needs pytest, so that a machine without it can run them (`tests/gpu_architectures.py`)."""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from reference import each_of
from torch import Tensor, nn

from architectures import BOTH, DECODERS, ENCODERS, VISION

KINDS = (
    (DECODERS, "AutoModelForCausalLM"),
    (ENCODERS, "AutoModelForMaskedLM"),
    (BOTH, "AutoModelForSeq2SeqLM"),
    (VISION, "AutoModelForImageClassification"),
)
TIMM = (
    "resnet10t", "resnetv2_18", "mobilenetv2_035", "mobilenetv3_small_050", "efficientnet_lite0", "convnext_atto",
    "convnextv2_atto", "regnetx_002", "repvgg_a0", "ghostnet_050", "lcnet_035", "tinynet_e", "mnasnet_small",
    "rexnet_100",
    "hrnet_w18_small", "densenet121", "dla46_c", "edgenext_xx_small", "mobilevit_xxs", "fastvit_t8", "poolformer_s12",
    "resmlp_12_224", "mixer_s32_224", "vit_tiny_patch16_224", "deit_tiny_patch16_224", "xcit_nano_12_p16_224",
    "pvt_v2_b0", "levit_128s", "coat_lite_tiny", "efficientformer_l1", "swin_tiny_patch4_window7_224",
)  # fmt: skip
SMALLER: dict[str, dict[str, Any]] = {  # than they are, for the sake of time
    "resnet10t": {"channels": (16, 24, 32, 48)},
    "resnetv2_18": {"channels": (16, 24, 32, 48)},
    "rexnet_100": {"width_mult": 0.5},
    "convnext_atto": {"depths": (1, 1, 2, 1), "dims": (16, 24, 32, 48)},
    "convnextv2_atto": {"depths": (1, 1, 2, 1), "dims": (16, 24, 32, 48)},
    "densenet121": {"growth_rate": 8, "block_config": (2, 3, 3, 2)},
    "fastvit_t8": {"layers": (1, 1, 2, 1), "embed_dims": (24, 48, 96, 192)},
    "pvt_v2_b0": {"depths": (1, 1, 1, 1), "embed_dims": (16, 32, 40, 64)},
    "deit_tiny_patch16_224": {"img_size": 64, "depth": 2, "dynamic_img_size": True},
    "coat_lite_tiny": {"embed_dims": (16, 32, 48, 64), "serial_depths": (1, 1, 2, 1), "img_size": 64},
    "efficientformer_l1": {"depths": (1, 1, 1, 2), "embed_dims": (16, 24, 32, 48)},
    "swin_tiny_patch4_window7_224": {"embed_dim": 24, "depths": (1, 1, 2, 1), "img_size": 64},
}
SHORTER = ("poolformer_s12", "resmlp_12_224", "mixer_s32_224")  # two blocks of each stage, where no option says so
ONLY_224 = ("efficientformer_l1",)  # its attention has a bias for each place of such an image
ONLY_ONE_SIZE = ("swin",)  # an image of another size changes its windows for good
LENGTH = 6  # what is usual: other lengths are tried where the model takes them


# ---- steps ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """One batch: how many samples of which length (or share of the usual image), which of their tokens are masked."""

    n: int
    length: int = LENGTH
    image: tuple[float, float] = (1, 1)
    padded: str = ""  # "right", "left"
    seed: int = 0
    turned: bool = False  # the samples of that seed, last first

    def simpler(self) -> Iterator[Step]:
        """This step, then without what a model may not take: the mask, the length, both."""
        usual = replace(self, length=min(self.length, LENGTH), image=(1, 1))
        yield from dict.fromkeys((self, replace(self, padded=""), usual, replace(usual, padded="")))

    def __str__(self) -> str:
        size = f"T={self.length}" if self.length else f"image ×{self.image[0]:g} ×{self.image[1]:g}"
        return f"n={self.n}, {size}" + (f", padded {self.padded}" if self.padded else "")


STEPS = (
    Step(3),
    Step(3, 8, (1, 0.5), "right", seed=1),  # another length, and a mask
    Step(2, seed=2),  # fewer samples, at a length that was seen
    Step(5, 5, (0.5, 1), "right", seed=3),  # as many samples as tokens
    Step(3, 8, (1, 0.5), "left", seed=1, turned=True),  # a shape that was seen: other masks, another order
    Step(1, 7, seed=5),  # one that is left over
)


def ids_of(step: Step, vocabulary: int = 40) -> Tensor:
    ids = torch.randint(3, vocabulary, (step.n, step.length), generator=torch.Generator().manual_seed(step.seed))
    return ids.flip(0) if step.turned else ids


def numbers_of(step: Step, *shape: int) -> Tensor:
    made = torch.randn(step.n, *shape, generator=torch.Generator().manual_seed(100 + step.seed))
    return made.flip(0) if step.turned else made


def mask_of(step: Step) -> Tensor | None:
    """1 where a token counts; each sample has a length of its own, and one at least is whole."""
    if not step.padded:
        return None
    mask = torch.ones(step.n, step.length, dtype=torch.long)
    for k in range(step.n):
        missing = (k + step.turned) % 3
        if missing:
            mask[k, slice(-missing, None) if step.padded == "right" else slice(missing)] = 0
    return mask


# ---- architectures --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Architecture:
    """How a model is made, and what it says of a batch."""

    name: str
    make: Callable[[], nn.Module]
    call: Callable[[nn.Module, Step, dict[str, Any]], Tensor]  # with device and dtype
    kind: str = "tokens"  # "numbers": no mask; "images"
    train: bool = False  # recurrent kernels of a GPU have no backward in eval mode

    def steps(self) -> list[Step]:
        """The steps, of which what this model has nothing of is left out."""
        usual: dict[str, Any] = {"tokens": {"image": (1, 1)}, "numbers": {"image": (1, 1), "padded": ""},
                                 "images": {"length": 0, "padded": ""}}[self.kind]  # fmt: skip
        if self.name in ONLY_ONE_SIZE:
            usual["image"] = (1, 1)
        return [replace(step, **usual) for step in STEPS]

    def model(self) -> nn.Module:
        """The model with random weights, the same each time; float32, on the CPU."""
        torch.manual_seed(0)
        model = self.make()
        for p in model.parameters():  # what begins at zero would hide all that comes before it
            if p.numel() and p.abs().max() < 1e-4:
                nn.init.normal_(p, std=0.1)
        return model.train(self.train)

    def losses(self, model: nn.Module, step: Step) -> Tensor:
        """(n,): a loss of each sample, which no mask takes part in. In float32 at least."""
        if not self.train:
            model.train().eval()  # some keep part of a graph in eval mode, until they are told to train
        p = next(p for p in model.parameters() if p.is_floating_point())
        out = self.call(model, step, {"device": p.device, "dtype": p.dtype}).reshape(step.n, -1)
        out = out.float() if out.dtype in (torch.bfloat16, torch.float16) else out
        return (out.square().mean(1) + 0.1).log()


def plain(architecture: Architecture, model: nn.Module, step: Step) -> tuple[Step, dict[str, Tensor]] | str:
    """The step as far as torch itself can go, with the truth; or why it cannot at all."""
    why = ""
    for one in step.simpler():
        try:
            each = each_of(model, architecture.losses(model, one))
        except Exception as error:
            why = why or f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
            continue
        if all(bool(v.isfinite().all()) for v in each.values()):
            return one, each
        why = why or "gradients that are not finite"
    return why


# ---- transformers ---------------------------------------------------------------------------------------------------


def make_transformer(kind: str, name: str, options: dict[str, Any]) -> nn.Module:
    import transformers

    transformers.logging.set_verbosity_error()
    config = transformers.AutoConfig.for_model(name, **options)
    config.pad_token_id = config.bos_token_id = 0
    config.eos_token_id = 1
    return getattr(transformers, kind).from_config(config)


def call_text(model: nn.Module, step: Step, to: dict[str, Any], *, decodes: bool = False, both: bool = False) -> Tensor:
    ids, mask = ids_of(step).to(to["device"]), mask_of(step)
    given: dict[str, Any] = {"input_ids": ids}
    if decodes or both:
        given["use_cache"] = False
    if both:
        given["decoder_input_ids"] = ids.flip(1)
    if mask is not None:
        mask = mask.to(to["device"])
        if "attention_mask" not in inspect.signature(model.forward).parameters:
            raise TypeError("takes no mask")
        given["attention_mask"] = mask
    return model(**given).logits


def call_vision(model: nn.Module, step: Step, to: dict[str, Any]) -> Tensor:
    size = getattr(model.config, "image_size", 32)
    return model(pixel_values=image_of(step, size).to(**to)).logits


def image_of(step: Step, size: int) -> Tensor:
    return numbers_of(step, 3, *(int(size * share) for share in step.image))


def transformers_architectures() -> Iterator[Architecture]:
    for family, kind in KINDS:
        call = call_vision if family is VISION else functools.partial(
            call_text, decodes=family is DECODERS, both=family is BOTH
        )  # fmt: skip
        for name, options in family.items():
            make = functools.partial(make_transformer, kind, name, options)
            yield Architecture(name, make, call, "images" if family is VISION else "tokens")


# ---- timm -----------------------------------------------------------------------------------------------------------


def make_timm(name: str) -> nn.Module:
    if importlib.util.find_spec("torchvision") is None:
        import torchvision_names

        torchvision_names.install()
    import timm

    known = [SMALLER[name]] if name in SMALLER else [{"img_size": 64, "depth": 2}, {"img_size": 64}, {}]
    for options in known:
        try:
            torch.manual_seed(0)
            model = timm.create_model(name, num_classes=7, **options)
        except TypeError:
            continue
        for module in list(model.modules()) if name in SHORTER else []:
            if isinstance(getattr(module, "blocks", None), nn.Sequential):
                module.blocks = module.blocks[:2]
        return model
    raise AssertionError(name)


def call_timm(model: nn.Module, step: Step, to: dict[str, Any], *, size: int) -> Tensor:
    return model(image_of(step, size).to(**to))


# ---- torch.nn -------------------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    """A language model with one of torch's recurrent layers."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.tokens, self.rnn = nn.Embedding(40, 8), kind(8, 8, num_layers=2, batch_first=True)
        self.head = nn.Linear(8, 40)

    def forward(self, ids: Tensor, mask: Tensor | None) -> Tensor:
        h = self.tokens(ids)
        return self.head(self.rnn(h if mask is None else h * mask[..., None])[0])


class Encoder(nn.Module):
    """torch's own transformer layers."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(40, 16), nn.Parameter(torch.randn(8, 16))
        layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True)
        self.layers, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(16, 40)

    def forward(self, ids: Tensor, mask: Tensor | None) -> Tensor:
        h = self.tokens(ids) + self.places[: ids.shape[1]]
        return self.head(self.layers(h, src_key_padding_mask=None if mask is None else mask == 0))


class TimeFirst(nn.Module):
    """Tokens in dimension 0 inside, samples in dimension 1; the mean over the tokens that count."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.attention = nn.Embedding(40, 8), nn.MultiheadAttention(8, 2)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 5)

    def forward(self, ids: Tensor, mask: Tensor | None) -> Tensor:
        h = self.tokens(ids.t())
        h = self.norm(h + self.attention(h, h, h, key_padding_mask=None if mask is None else mask == 0)[0])
        if mask is None:
            return self.head(h.mean(0))
        share = (mask / mask.sum(1, keepdim=True)).t()[..., None].to(h.dtype)
        return self.head((h * share).sum(0))


class Bag(nn.Module):
    """Each sample's tokens, those that count, in one bag."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.mlp = nn.EmbeddingBag(40, 8, mode="sum"), nn.Sequential(nn.Linear(8, 8), nn.SELU())
        self.head = nn.Linear(8, 5)

    def forward(self, ids: Tensor, mask: Tensor | None) -> Tensor:
        weights = torch.ones_like(ids) if mask is None else mask
        return self.head(self.mlp(self.bag(ids, per_sample_weights=weights.to(self.head.weight.dtype))))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, groups=2), nn.GELU(),
        nn.ConvTranspose2d(8, 6, 2, 2), nn.InstanceNorm2d(6, affine=True), nn.PReLU(6), nn.AdaptiveAvgPool2d(2),
        nn.Flatten(), nn.Linear(24, 5),
    )  # fmt: skip


def lines() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(4, 8, 3, padding=1), nn.Tanh(), nn.Conv1d(8, 8, 3, padding="same", dilation=2), nn.SiLU(),
        nn.AdaptiveMaxPool1d(3), nn.Flatten(), nn.LayerNorm(24), nn.Linear(24, 5),
    )  # fmt: skip


def dense() -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 8, bias=False), nn.RMSNorm(8), nn.Linear(8, 5)
    )


def call_tokens(model: nn.Module, step: Step, to: dict[str, Any]) -> Tensor:
    mask = mask_of(step)
    return model(ids_of(step).to(to["device"]), None if mask is None else mask.to(to["device"]))


def call_image(model: nn.Module, step: Step, to: dict[str, Any]) -> Tensor:
    return model(image_of(step, 12).to(**to))


def call_lines(model: nn.Module, step: Step, to: dict[str, Any]) -> Tensor:
    return model(numbers_of(step, 4, step.length).to(**to))


def call_rows(model: nn.Module, step: Step, to: dict[str, Any]) -> Tensor:
    return model(numbers_of(step, step.length, 4).to(**to))


NETS = (
    Architecture("nn/dense", dense, call_rows, "numbers", train=True),
    Architecture("nn/lines", lines, call_lines, "numbers", train=True),
    Architecture("nn/convolutions", convolutions, call_image, "images", train=True),
    Architecture("nn/lstm", functools.partial(Recurrent, nn.LSTM), call_tokens, train=True),
    Architecture("nn/gru", functools.partial(Recurrent, nn.GRU), call_tokens, train=True),
    Architecture("nn/encoder", Encoder, call_tokens, train=True),
    Architecture("nn/time_first", TimeFirst, call_tokens, train=True),
    Architecture("nn/bag", Bag, call_tokens, train=True),
)


def suite() -> dict[str, Architecture]:
    """All of them by name: "gpt2", "timm/resnet10t", "nn/lstm". Those of timm, which take longest, come first."""
    found = [
        Architecture(
            f"timm/{name}", functools.partial(make_timm, name),
            functools.partial(call_timm, size=224 if name in ONLY_224 else 64), "images",
        )
        for name in TIMM
    ]  # fmt: skip
    found += [*transformers_architectures(), *NETS]
    return {one.name: one for one in found}
