"""Argument types of the commands: text is made into a value, or refused with the reason."""

from __future__ import annotations

import argparse
import math
import re
import tempfile
from pathlib import Path

__all__ = ["count", "folder", "mebibytes", "output", "seconds", "size_of"]


def count(text: str) -> int:
    """A whole number from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"should be a whole number from 1, but it is {text!r}")
    return int(text)


def mebibytes(text: str) -> float:
    """A positive number of MiB."""
    return _positive(text, "MiB")


def seconds(text: str) -> float:
    """A positive number of seconds."""
    return _positive(text, "seconds")


def _positive(text: str, unit: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"should be a positive number of {unit}, but it is {text!r}")
    return number


def size_of(text: str) -> int:
    """Bytes: a whole number from 1, with K, M or G after it for KiB, MiB, GiB."""
    match = re.fullmatch(r"([1-9][0-9]*)([KMG]?)", text.upper())
    if match is None:
        raise argparse.ArgumentTypeError(f"should be a number of bytes such as 4, 64K or 32M, but it is {text!r}")
    return int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2]]


def output(text: str) -> str:
    """A file that can be written, or - for stdout."""
    # Found out now, and not when everything has been measured.
    if text != "-" and (not Path(text).parent.is_dir() or Path(text).is_dir()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a file in a folder that exists")
    return text


def folder(text: str) -> Path:
    """A folder that files can be written to; made if there is none."""
    path = Path(text).absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
        # Permissions alone do not tell: file systems may be full or read-only.
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a folder that can be written to ({error})") from error
    return path
