"""The documentation holds: every snippet runs on two ranks, links and commands exist, every exception is explained."""

import os
import re
import textwrap
from pathlib import Path

import pytest
import torch.distributed as dist

import ppe_ddp
from benchmarks import COMMANDS as BENCHMARKS
from ppe_ddp import errors
from ppe_ddp.cli import COMMANDS

ROOT = Path(ppe_ddp.__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
# A snippet for the reader; code that a page needs and nobody wants to read, in a comment; why a snippet is not run.
PART = re.compile(
    r"^```python\n(?P<shown>.*?)^```$|^<!-- python\n(?P<hidden>.*?)^-->$|^<!-- not run: (?P<reason>.+) -->$",
    re.MULTILINE | re.DOTALL,
)


def snippets(page):
    """The code of a page, each part with the number of its first line."""
    found, reason = [], None
    text = page.read_text()
    for part in PART.finditer(text):
        code, line = part["shown"] or part["hidden"], text.count("\n", 0, part.start()) + 2
        if code is not None:
            compile(code, page.name, "exec")
            if reason is None:
                found.append((line, code))
        reason = part["reason"]
    return found


def run_page(name, parts, folder):
    os.makedirs(f"{folder}/{dist.get_rank()}", exist_ok=True)
    os.chdir(folder)
    names = {"__name__": name}
    for line, code in parts:
        exec(compile("\n" * (line - 1) + code, name, "exec"), names)


@pytest.mark.parametrize("page", [page for page in PAGES if snippets(page)], ids=lambda page: page.name)
def test_snippets_run_on_two_ranks(page, two_ranks, tmp_path):
    two_ranks.run(run_page, page.name, snippets(page), str(tmp_path), timeout=150)


def test_most_snippets_are_run():
    shown = sum(page.read_text().count("```python\n") for page in PAGES)
    left_out = sum(page.read_text().count("<!-- not run: ") for page in PAGES)
    assert shown > 25
    assert left_out <= 5


def test_a_snippet_that_fails_is_named_by_page_and_line(two_ranks, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# Title\n\n<!-- python\na = 1\n-->\n```python\nassert a == 1\n1 / 0\n```\n")
    with pytest.raises(Exception, match=r'File "page.md", line 8'):
        two_ranks.run(run_page, page.name, snippets(page), str(tmp_path))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_exist(page):
    for program, commands in (("ppe_ddp", COMMANDS), ("benchmarks", BENCHMARKS)):
        known = {command.words for command in commands}
        for words in re.findall(rf"python -m {program}\s((?:bench\s)?[a-z]+)", page.read_text()):
            assert " ".join(words.split()) in known or words == "bench"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_pictures_lead_somewhere(page):
    text = re.sub(r"^```python\n.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    targets = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r"```\{figure\} (\S+)", text)
    for target in targets:
        if not target.startswith("http"):
            path, _, anchor = target.partition("#")
            file = page.parent / path if path else page
            assert file.exists(), target
            if anchor:
                heads = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
                assert anchor in {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}, target


def test_every_exception_is_explained():
    text = (DOCS / "failures.md").read_text()
    public = [name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert len(public) >= 8
    assert [name for name in public if f"### {name}\n" not in text] == []


def test_messages_that_are_explained_are_those_of_the_code():
    """A message is looked up by its words, so the words must be those of the code."""
    code = "".join(path.read_text() for path in Path(ppe_ddp.__file__).parent.rglob("*.py"))
    code = re.sub(r'"\s*\n\s*f?"', "", code)  # texts of several lines
    section = (DOCS / "failures.md").read_text().split("## What does this exception mean?")[1]
    rows = [row for row in re.findall(r"^\| (`.*?) \|", section, re.MULTILINE) if not row.startswith("its message")]
    assert len(rows) > 15
    for row in rows:
        for message in re.findall(r"`([^`]+)`", row):
            for part in re.split(r"…|\b\d+\b|'x'", message):
                assert part.strip(" :;()'") in code, (message, part)


def test_all_public_names_are_listed():
    text = (DOCS / "api.md").read_text()
    assert [name for name in ppe_ddp.__all__ if not re.search(rf"\b{name}\b", text)] == []


def test_pages_are_in_the_table_of_contents():
    listed = set(re.findall(r"^([a-z-]+)$", (DOCS / "index.md").read_text(), re.MULTILINE))
    assert {page.stem for page in DOCS.glob("*.md")} - {"index"} == listed


def test_no_paragraph_is_on_two_pages():
    seen = {}
    for page in sorted(DOCS.glob("*.md")):
        for block in re.split(r"\n\s*\n", page.read_text()):
            if len(block) > 150 and not block.startswith(("<!--", "```", "|")):
                key = " ".join(textwrap.dedent(block).split())
                assert seen.setdefault(key, page.name) == page.name, key
