"""The gradients of a data set on disk: built once, asked often.

Examples:
    >>> import tempfile, torch, unsum
    >>> model, folder = torch.nn.Linear(3, 1), tempfile.mkdtemp() + "/index"
    >>> loss = lambda m, x: m(x).square().sum(1)
    >>> unsum.index.build(model, loss, [torch.randn(3) for _ in range(20)], folder)
    >>> unsum.index.open(folder).query(model, loss, torch.randn(2, 3), k=5).ids.shape
    torch.Size([2, 5])
"""

from unsum.index.alike import Pairs
from unsum.index.build import build
from unsum.index.hits import Hits
from unsum.index.index import Index, open

__all__ = ["Hits", "Index", "Pairs", "build", "open"]
