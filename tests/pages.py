"""Pages of Markdown as tests see them: code to run, commands to parse, links to follow."""

import contextlib
import doctest
import io
import itertools
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

_FENCE = re.compile(r"^(?P<indent> *)(?P<fence>```+)(?P<info>[^`\n]*)$")
_OURS = re.compile(r"experiments\.\w+|shardjax\.checkpoint")
_VARIABLE = re.compile(r"\$\w+|\$\{\w+\}")
_COMPARED = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    info: str
    """What follows the opening fence, such as "python"."""
    line: int
    """Number of the first line within the fence, from 1."""
    text: str


def blocks_of(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    blocks, opened, lines, start = [], None, [], 0
    for number, line in enumerate(page.read_text().splitlines(), 1):
        found = _FENCE.match(line)
        if opened is None and found:
            opened, lines, start = found, [], number + 1
        elif opened is not None and line.strip() == opened["fence"]:
            text = "".join(f"{x}\n" for x in lines)
            blocks.append(Block(opened["info"].strip(), start, text))
            opened = None
        elif opened is not None:
            lines.append(line.removeprefix(opened["indent"]))
    if opened is not None:
        raise ValueError(f"{page}:{start - 1}: a fence is opened and not closed")
    return blocks


def prose_of(page: Path) -> str:
    """A page without its fenced blocks and the code within lines."""
    kept, fence = [], None
    for line in page.read_text().splitlines():
        found = _FENCE.match(line)
        if fence is None and found:
            fence = found["fence"]
        elif fence is not None:
            fence = None if line.strip() == fence else fence
        else:
            kept.append(line)
    return re.sub(r"(`+).+?\1", "", "\n".join(kept), flags=re.S)


def run_page(page: Path) -> tuple[dict[str, Any], str]:
    """Runs the ```python blocks of a page, one after the other, in one fresh module.

    A ```text block is what the python block before it prints; `...` stands for anything,
    and white space may differ. A block that begins with `>>>` is a session, as in docstrings.

    Returns:
      What the page has defined, by name; all that it printed.

    Raises:
      AssertionError: if something else was printed than the page says.
    """
    module = ModuleType(f"page_{re.sub(r'[^a-z0-9]', '_', page.stem.lower())}")
    sys.modules[module.__name__] = module  # where pickle and dataclasses look
    everything, printed = "", None
    try:
        for block in blocks_of(page):
            if block.info == "python":
                printed = _run(page, block, vars(module))
                everything += printed
            elif block.info == "text" and printed is not None:
                _compare(page, block, printed)
                printed = None
    finally:
        del sys.modules[module.__name__]
    return dict(vars(module)), everything


def _run(page: Path, block: Block, namespace: dict) -> str:
    out = io.StringIO()
    if block.text.lstrip().startswith(">>>"):
        parser = doctest.DocTestParser()
        name, at = page.name, block.line - 1
        session = parser.get_doctest(block.text, namespace, name, str(page), at)
        runner = doctest.DocTestRunner(verbose=False, optionflags=_COMPARED)
        result = runner.run(session, out=out.write, clear_globs=False)
        namespace.update(session.globs)  # the runner works on a copy
        assert result.failed == 0, out.getvalue()
        return ""
    # As many empty lines before it as the page has: errors show the line of the page.
    source = "\n" * (block.line - 1) + block.text
    with contextlib.redirect_stdout(out):
        exec(compile(source, str(page), "exec"), namespace)
    return out.getvalue()


def _compare(page: Path, block: Block, printed: str) -> None:
    same = doctest.OutputChecker().check_output(block.text, printed, _COMPARED)
    assert same, (
        f"{page}:{block.line}: the page says that this is printed\n\n{block.text}\n"
        f"but what the block before it printed is\n\n{printed}"
    )


def commands_of(page: Path) -> list[tuple[str, list[str]]]:
    """The calls of our programs in ```sh blocks: module and arguments.

    A variable of the shell becomes a number; `...`, which stands for options that are left
    out, is left out.
    """
    found = []
    for block in blocks_of(page):
        if block.info != "sh":
            continue
        for line in block.text.replace("\\\n", " ").splitlines():
            shell = shlex.shlex(line, posix=True, punctuation_chars=True)
            shell.whitespace_split = True  # and at `;`, `|`, `&`, `(`, `)`, `<`, `>`
            words = list(shell)
            for i, word in enumerate(words):
                if words[max(0, i - 1)] != "-m" or not _OURS.fullmatch(word):
                    continue
                given = itertools.takewhile(
                    lambda w: set(w) - set(";&|()<>"), words[i + 1 :]
                )
                numbers = [_VARIABLE.sub("1", w) for w in given if w != "..."]
                found.append((word, numbers))
    return found


def links_of(page: Path) -> list[str]:
    """The targets of links and pictures of a page, but for those with a scheme."""
    targets = re.findall(r"\]\(<?([^)\s>]+)>?[^)]*\)", prose_of(page))
    return [t for t in targets if not re.match(r"[a-z]+:", t)]


def anchors_of(page: Path) -> set[str]:
    """What `#...` may name in a page: its headings, as GitHub and MyST call them."""
    text = page.read_text()
    anchors = set(re.findall(r"^\(([\w-]+)\)=$", text, re.M))
    for block in blocks_of(page):
        text = text.replace(block.text, "")
    for heading in re.findall(r"^#{1,6} +(.+?)[ #]*$", text, re.M):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        others = (f"{slug}-{n}" for n in itertools.count(1))
        anchors.add(slug if slug not in anchors else next(others))
    return anchors
