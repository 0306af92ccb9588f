"""Runs the code blocks of the README and the docs as tests."""

import importlib.util
import os
from collections.abc import Iterable
from unittest import SkipTest

import torch
from sybil import Document, Example, Region, Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser
from sybil.parsers.markdown.lexers import DirectiveInHTMLCommentLexer

if not torch.cuda.is_available():  # before anything imports triton
    os.environ.setdefault("TRITON_INTERPRET", "1")


collect_ignore = [] if importlib.util.find_spec("lightning") else ["src/unsum/integrations/lightning.py"]


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


pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser(), SkipParser(), Needs()],
    patterns=["*.md"],
    excludes=["*/from/nnsight.md"],  # nnsight replaces Tensor.backward for good: tests/test_docs.py gives it a process
).pytest()
