"""What the examples' command lines have in common: help that tells defaults, and numbers that are above zero."""

from __future__ import annotations

import argparse


def parser_for(docstring: str | None) -> argparse.ArgumentParser:
    """A parser described by the first line of a script's docstring."""
    first = (docstring or "").split("\n", 1)[0]
    return argparse.ArgumentParser(description=first, formatter_class=argparse.ArgumentDefaultsHelpFormatter)


def positive(text: str) -> int:
    """A whole number above zero."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above zero")
    return int(text)
