"""Which example a row belongs to: with rows for tokens, packed documents, batches in any order, and in messages."""

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

import unsum
from curvature_nets import Batches, Examples, classified, ids, mlp, numbers
from test_index_tokens import EQUAL, TOKENS, UNEQUAL, build, padded, reader
from unsum.errors import OptionError, SamplesError

X, Y = numbers(0, 23, 4), ids(1, 23, high=3)


@pytest.mark.parametrize("workers", [0, 1])
def test_rows_of_tokens_of_batches_have_the_numbers_of_their_examples(workers, tmp_path):
    model = reader()
    loader = DataLoader(EQUAL, batch_size=2, num_workers=workers)
    i = build(tmp_path / "i", model, loader, tokens=True, shard_size=2)
    wanted = build(tmp_path / "j", model, EQUAL, tokens=True)
    assert i.info["examples"] == len(TOKENS)
    assert all(
        torch.equal(one, other) for one, other in zip(i.tokens(0, len(i)), wanted.tokens(0, len(i)), strict=True)
    )


@pytest.mark.parametrize("options", [{}, {"batch_tokens": 24}])
def test_examples_without_tokens_count(options, tmp_path):
    data = list(UNEQUAL)
    data[4] = data[-1] = (torch.zeros(0, dtype=torch.long), torch.zeros(0, dtype=torch.long))
    texts = [str(k) for k in range(len(data))]
    i = build(tmp_path / "i", reader(), data, collate=padded, tokens=True, shard_size=5, text=texts, **options)
    assert i.info["examples"] == len(data) and i.verify() == []
    assert i.tokens(0, len(i))[0].tolist() == [k for k, (tokens, _) in enumerate(data) for _ in tokens]
    hits = i.query(reader(), classified, padded(data[5:6]), k=3)
    assert hits.texts == [[str(k) for k in hits.ids[0].tolist()]]


def test_packed_documents_of_which_one_batch_has_as_many_as_examples(tmp_path):
    model = mlp()
    rows = [(X[k : k + 3], Y[k : k + 3]) for k in range(0, 9, 3)] + [(X[9:10], Y[9:10]), (X[10:16], Y[10:16])]

    def joined(some):
        return torch.cat([x for x, _ in some]), torch.cat([y for _, y in some])

    order = [*range(9, 16), *range(9)]
    for size in (1, 2, 5):
        folder, each = tmp_path / str(size), lambda batch: torch.arange(len(batch[0]))
        for _ in range(2):  # the second time nothing is refused
            unsum.index.build(
                model, classified, rows[3:] + rows[:3], folder,
                dtype="float32", samples=each, batch_size=size, shard_size=4, collate=joined,
            )  # fmt: skip
        wanted = build(tmp_path / f"{size} whole", model, Examples(X[order], Y[order]), project=16)
        torch.testing.assert_close(unsum.index.open(folder).rows(0, 16), wanted.rows(0, 16))


def test_padding_on_the_left_is_no_token_and_tokens_are_no_padding(tmp_path):
    def left(examples):
        tokens, labels = padded([(tokens.flip(0), labels.flip(0)) for tokens, labels in examples])
        return tokens.flip(1), labels.flip(1)

    with pytest.raises(OptionError, match="pad on the right"):
        build(tmp_path / "i", reader(), UNEQUAL, collate=left, tokens=True)
    short = [(torch.zeros(2), *pair) for pair in EQUAL]  # the first part of an example is not its tokens
    loss = lambda model, batch: classified(model, batch[1:])
    with pytest.raises(OptionError, match="give length="):
        unsum.index.build(reader(), loss, short, tmp_path / "j", tokens=True)
    unsum.index.build(reader(), loss, short, tmp_path / "k", tokens=True, length=lambda example: len(example[1]))
    assert len(unsum.index.open(tmp_path / "k")) == TOKENS.numel()


def not_finite(model, batch):
    return classified(model, batch) + batch[0].flatten(1).sum(1) * 0


@pytest.mark.parametrize(
    "options", [{}, {"batch_size": 3}, {"batch_size": 3, "shard_size": 7}, {"batch_size": 5, "shards": 9}]
)
@pytest.mark.parametrize("kind", ["list", "loader", "batches", "documents"])
def test_an_example_that_is_not_finite_has_its_own_number(kind, options, tmp_path):
    x = X.clone()
    x[17, 1] = torch.nan
    data = Examples(x, Y)
    size = options.get("batch_size", 32)
    if kind == "loader":
        data = DataLoader(data, batch_size=size)
    if kind == "batches":
        data = Batches(*zip(x.split(size), Y.split(size), strict=True))
        options = {name: value for name, value in options.items() if name != "shards"}
    if kind == "documents":
        options = options | {"samples": lambda batch: torch.arange(len(batch[0]))}
    with pytest.raises(SamplesError, match=r"example 17 \("):
        unsum.index.build(mlp(), not_finite, data, tmp_path / "i", **options)


@pytest.mark.parametrize("options", [{}, {"shard_size": 4}, {"tokens": True}])
def test_also_where_examples_of_like_length_go_together(options, tmp_path):
    data = [(tokens, labels, torch.tensor(torch.nan if k == 9 else 1.0)) for k, (tokens, labels) in enumerate(UNEQUAL)]
    collate = lambda some: (*padded([example[:2] for example in some]), torch.stack([example[2] for example in some]))
    loss = lambda model, batch: classified(model, batch[:2]) * batch[2]
    with pytest.raises(SamplesError, match=r"example 9 \("):
        unsum.index.build(reader(), loss, data, tmp_path / "i", collate=collate, batch_tokens=32, **options)


def test_a_loader_whose_sampler_gives_lists(tmp_path):
    data, model = Examples(X, Y), mlp()
    lists = BatchSampler(SequentialSampler(data), 5, drop_last=False)

    class Taken(Examples):
        def __getitem__(self, chosen):
            return tuple(tensor[chosen] for tensor in self.tensors)

    wanted = build(tmp_path / "i", model, data)
    for workers in (0, 1):
        loader = DataLoader(Taken(X, Y), sampler=lists, batch_size=None, num_workers=workers)
        found = build(tmp_path / f"{workers}", model, loader, shard_size=2)
        torch.testing.assert_close(found.rows(0, 23), wanted.rows(0, 23))


class Said(Batches):
    """Batches that say that they are so many."""

    def __init__(self, length, *batches):
        super().__init__(*batches)
        self.length = length

    def __len__(self):
        return self.length


@pytest.mark.parametrize("length", [1, 3, 5, 6, 23])
def test_data_that_says_a_wrong_length_is_read_to_its_end(length, tmp_path):
    batches = list(zip(X.split(5), Y.split(5), strict=True))
    i = build(tmp_path / "i", mlp(), Said(length, *batches), shard_size=2)
    wanted = build(tmp_path / "j", mlp(), Batches(*batches))
    assert torch.equal(i.rows(0, 23), wanted.rows(0, 23))
    build(tmp_path / "i", mlp(), Said(length, *batches), shard_size=2)
    assert i.verify() == []


def test_processes_that_share_data_which_says_too_little_are_told(tmp_path):
    batches = list(zip(X.split(5), Y.split(5), strict=True))
    with pytest.raises(OptionError, match=r"2 batches \(len\(\)\), and has more"):
        build(tmp_path / "i", mlp(), Said(2, *batches), shard_size=2, part=(0, 1))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"ids": ["a"]}, "a list of 1, and the data has 23"),
        ({"text": [str(k) for k in range(24)]}, "a list of 24, and the data has 23"),
        ({"ids": 3}, "ids=3"),
        ({"collate": 3}, "collate=3: a function"),
        ({"length": 3}, "length=3: a function"),
        ({"batch_tokens": 8, "length": lambda example: -1}, "length= gave -1"),
    ],
)
def test_what_says_nothing_of_the_examples_is_refused(options, match, tmp_path):
    with pytest.raises(OptionError, match=match):
        build(tmp_path / "i", mlp(), Examples(X, Y), **options)


def test_texts_of_examples_are_not_those_of_their_documents(tmp_path):
    pairs = [(X[k : k + 2], Y[k : k + 2]) for k in range(0, 22, 2)]
    joined = lambda some: tuple(torch.cat(parts) for parts in zip(*some, strict=True))
    options = {"collate": joined, "samples": lambda batch: torch.arange(len(batch[0]))}
    with pytest.raises(OptionError, match="11 for a batch of 22 rows; for packed documents"):
        build(tmp_path / "i", mlp(), pairs, text=lambda example: "two", **options)


def test_other_shards_are_refused(tmp_path):
    for _ in range(2):
        build(tmp_path / "i", mlp(), Examples(X, Y), shards=3)
    with pytest.raises(OptionError, match="shards=4, and it has 3"):
        build(tmp_path / "i", mlp(), Examples(X, Y), shards=4)


def test_one_batch_is_told_how_to_be_data(tmp_path):
    with pytest.raises(OptionError, match=r"one batch: DataLoader\(\[batch\], batch_size=None\)"):
        build(tmp_path / "i", mlp(), (X, Y))
    assert len(build(tmp_path / "i", mlp(), DataLoader([(X, Y)], batch_size=None))) == 23
