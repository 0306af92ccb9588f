"""An index has the same bytes whoever builds it, and nothing in it, nor in unsum, unpickles."""

import ast
import copy
import io
import pickletools
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

import unsum
from unsum import progress

VOCABULARY = 53


def texts(count=40):
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(4, 24, (count,), generator=draw).tolist()
    return [torch.randint(3, VOCABULARY, (t,), generator=draw) for t in lengths]


def padded(examples):
    return pad_sequence(examples, True), pad_sequence([torch.ones_like(example) for example in examples], True)


def word_losses(model, batch):
    ids, mask = batch
    logits = model(input_ids=ids, attention_mask=mask).logits
    return (F.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none") * mask[:, 1:]).sum(1)


def language_model(name):
    transformers = pytest.importorskip("transformers")
    small = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "vocab_size": VOCABULARY}
    if name == "GPT2LMHead":
        config = transformers.GPT2Config(
            n_layer=2, n_embd=32, n_head=2, vocab_size=VOCABULARY, n_positions=32, bos_token_id=1, eos_token_id=2
        )
    else:
        config = transformers.MixtralConfig(**small, num_key_value_heads=2, intermediate_size=48, num_local_experts=4)
    torch.manual_seed(0)
    return getattr(transformers, f"{name}Model" if name.endswith("Head") else name)(config).eval()


def convolutional():
    torch.manual_seed(0)
    parts = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=2), nn.Flatten()
    return nn.Sequential(*parts, nn.Linear(8 * 16, 5)).eval()


def recurrent():
    torch.manual_seed(0)
    return nn.LSTM(6, 5, 2, batch_first=True)


CASES = {
    "gpt2, a budget": (lambda: language_model("GPT2LMHead"), word_losses, texts, {"batch_tokens": 120}),
    "gpt2, tokens": (lambda: language_model("GPT2LMHead"), word_losses, texts, {"batch_tokens": 120, "tokens": True}),
    "mixtral": (lambda: language_model("MixtralForCausalLM"), word_losses, texts, {"batch_size": 7}),
    "convolutions": (
        convolutional, lambda m, x: m(x).logsumexp(1),
        lambda: list(torch.randn(30, 3, 8, 8, generator=torch.Generator().manual_seed(0))), {"batch_size": 4},
    ),
    "lstm": (
        recurrent, lambda m, x: m(x)[0].square().flatten(1).sum(1),
        lambda: list(torch.randn(30, 5, 6, generator=torch.Generator().manual_seed(0))), {"batch_size": 4},
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_shard_has_the_same_bytes_in_a_process_that_has_learnt_nothing(case, tmp_path):
    """A copy of the model is one of which unsum knows nothing yet, as in a new process."""
    make, loss, data, options = CASES[case]
    model, data, path = make(), data(), tmp_path / "i"
    options = options | {"project": 4, "shard_size": 11}
    options |= {"collate": padded} if loss is word_losses else {}
    unsum.index.build(copy.deepcopy(model), loss, data, path, **options)
    before = {file.name: file.read_bytes() for file in path.iterdir() if not file.name.startswith(".")}
    shards = sorted(name for name in before if name.startswith("shard"))
    assert len(shards) == -(-len(data) // 11)
    for name in shards:
        (path / name).unlink()
        unsum.index.build(copy.deepcopy(model), loss, data, path, **options)
        assert {file.name: file.read_bytes() for file in path.iterdir() if not file.name.startswith(".")} == before


def test_a_build_shows_its_rate_the_time_left_and_bytes(tmp_path, monkeypatch):
    shown = io.StringIO()
    shown.isatty = lambda: True
    monkeypatch.setattr("sys.stderr", shown)
    monkeypatch.setattr(progress, "_PAUSE", 0.0)
    monkeypatch.delenv("UNSUM_PROGRESS", raising=False)
    data = list(torch.randn(40, 3))
    unsum.index.build(nn.Linear(3, 2), lambda m, x: m(x).square().sum(1), data, tmp_path / "i", batch_size=4)
    line = shown.getvalue()
    assert "40/40" in line and "examples/s" in line and " left" in line and " B" in line


def test_nothing_is_unpickled():
    root = Path(unsum.__file__).parent
    for file in root.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.partition(".")[0] for name in names} & {"pickle", "dill", "cloudpickle", "joblib"}, file
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
                assert node.attr not in ("load", "save"), f"{file}: torch.{node.attr}"


def test_no_file_of_an_index_is_a_pickle(tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    loss = lambda m, x: m(x).square().sum(1)
    data = list(torch.randn(40, 3))
    c = unsum.curvature.fit(model, loss, data)
    unsum.index.build(model, loss, data, tmp_path / "i", curvature=c, text=lambda example: str(example.tolist()))
    endings = {file.suffix for file in tmp_path.joinpath("i").iterdir() if not file.name.startswith(".")}
    assert endings == {".safetensors", ".json", ".parquet"}
    for file in tmp_path.joinpath("i").iterdir():
        assert not file.read_bytes().startswith(b"PK"), file  # torch's zip of pickles
        with pytest.raises(ValueError, match="opcode|pickle|read|decode"), file.open("rb") as content:
            list(pickletools.genops(content))
