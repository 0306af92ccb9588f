"""Runs the code blocks of the README and the docs as tests."""

import contextlib
import doctest
import importlib.util
import io
import os
import re
from collections.abc import Iterable
from typing import Any
from unittest import SkipTest

import pytest
import torch
from sybil import Document, Example, Region, Sybil
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.markdown import CodeBlockParser, SkipParser
from sybil.parsers.markdown.lexers import DirectiveInHTMLCommentLexer

if not torch.cuda.is_available():  # before anything imports triton
    os.environ.setdefault("TRITON_INTERPRET", "1")


collect_ignore = [] if importlib.util.find_spec("lightning") else ["src/unsum/integrations/lightning.py"]


# Files whose tests share what takes long to make: with --dist loadgroup each group runs in one process. The mark for
# that, xdist_group, is lost under pytest 9.2, whose tests no longer have the attribute that pytest-xdist 3.8 changes.
TOGETHER = {
    "tests/test_demo.py": "demo",
    "tests/test_clip_ranks.py": "ranks",
    "tests/test_index_ranks.py": "ranks",
    "tests/test_private_sampling.py": "ranks",
    "tests/test_ranks.py": "ranks",
    "tests/test_trainers_ranks.py": "ranks",
    "tests/test_wrappers.py": "ranks",
}


class _WithGroups:
    """What xdist asks where it is there."""

    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> Any:
        if config.getoption("dist") != "loadgroup":
            return None
        from xdist.scheduler import LoadGroupScheduling

        class Groups(LoadGroupScheduling):
            def _split_scope(self, nodeid: str) -> str:
                return TOGETHER.get(nodeid.split("::")[0], nodeid)

        return Groups(config, log)


def pytest_configure(config: pytest.Config) -> None:
    """Hand xdist the groups."""
    if config.pluginmanager.hasplugin("xdist"):
        config.pluginmanager.register(_WithGroups())


class Needs:
    """`<!-- needs: package -->`: what follows on the page is skipped, with the reason, where the package is absent."""

    def __init__(self) -> None:
        self.lexer = DirectiveInHTMLCommentLexer("needs")
        self.absent: dict[Document, str] = {}

    def __call__(self, document: Document) -> Iterable[Region]:
        for found in self.lexer(document):
            yield Region(found.start, found.end, found.lexemes["arguments"].strip(), self.evaluate)

    def evaluate(self, example: Example) -> None:
        package = example.parsed
        if importlib.util.find_spec(package) is None:
            self.absent[example.document] = f"{package} is not installed: the page says which version it was run with"
            example.document.push_evaluator(self.skip)
            self.skip(example)

    def skip(self, example: Example) -> None:
        raise SkipTest(self.absent[example.document])


class Printed(CodeBlockParser):
    """Runs a code block and compares what it prints with the ```text block directly under it, if there is one.

    docs/printed.py fills those blocks in. A line of ... in one stands for anything.
    """

    language = "python"
    run = PythonEvaluator()
    OUTPUT = re.compile(r"\s*^```text\n(.*?)^```$", re.M | re.S)

    def evaluate(self, example: Example) -> None:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            self.run(example)
        shown = self.OUTPUT.match(example.document.text, example.end)
        if shown and not doctest.OutputChecker().check_output(shown[1], out.getvalue(), doctest.ELLIPSIS):
            raise AssertionError(f"the page shows\n{shown[1]}\nand its program prints\n{out.getvalue()}")


pytest_collect_file = Sybil(
    parsers=[Printed(), SkipParser(), Needs()],
    patterns=["*.md"],
    excludes=["*/from/nnsight.md"],  # nnsight replaces Tensor.backward for good: tests/test_docs.py gives it a process
).pytest()
