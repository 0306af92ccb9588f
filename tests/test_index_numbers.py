"""Which example a row belongs to: with rows for tokens, packed documents, batches in any order, and in messages."""

import pytest
import torch
from torch.utils.data import DataLoader

import unsum
from curvature_nets import Examples, classified, ids, mlp, numbers
from test_index_tokens import EQUAL, TOKENS, UNEQUAL, build, padded, reader

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
