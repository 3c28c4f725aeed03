"""What the examples' command lines have in common: help that tells defaults, and numbers that are above zero."""

from __future__ import annotations

import argparse


class _Defaults(argparse.ArgumentDefaultsHelpFormatter):
    """Tells a default where there is one to tell: neither None nor that of a switch."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None or action.default is False else super()._get_help_string(action)


def parser_for(docstring: str | None) -> argparse.ArgumentParser:
    """A parser described by the first line of a script's docstring."""
    first = (docstring or "").split("\n", 1)[0]
    return argparse.ArgumentParser(description=first, formatter_class=_Defaults)


def positive(text: str) -> int:
    """A whole number above zero."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above zero")
    return int(text)
