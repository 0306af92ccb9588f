"""`unsum demo`: a story that needs the library (`story`), and the articles' programs that it grew from (`seeds`)."""

from unsum.demo.story import main

__all__ = ["main"]
