"""What the articles show that this project grew from, run through unsum and printed."""

from unsum.demo.seeds import main

__all__ = ["main"]
