"""Pages run and print what they say, commands parse, links lead somewhere, and the
reference has all public names.

CONTRIBUTING.md has the conventions that pages keep; `tests/pages.py` reads them.
"""

import ast
import importlib
import inspect
import re
from pathlib import Path

import gymnasium  # noqa: F401  its import sets an environment variable
import pytest

import shardjax
from experiments import config as configs
from shardjax.checkpoint import __main__ as checkpoints
from tests import pages

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
ALL = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
NO_RUN = "python no-run"  # code of other libraries, which are not installed here


def named(found):
    """Parameters of a test, with the names of pages as ids."""
    return [pytest.param(page, id=str(page.relative_to(ROOT))) for page in found]


def infos(page):
    return [block.info for block in pages.blocks_of(page)]


RUN = [page for page in ALL if "python" in infos(page)]
COMMANDS = [
    pytest.param(
        module, words, id=f"{page.relative_to(ROOT)}: {module} {' '.join(words)}"
    )
    for page in ALL
    for module, words in pages.commands_of(page)
]

# What a page has to compute where that is no fixed text, by its names and what it printed.
COMPUTED = {
    "README.md": lambda names, printed: re.search(r"\d+ \{'auc': ", printed),
    "docs/rl.md": lambda names, printed: (
        80 < int(names["state"].step) < 90 and 0 < float(names["info"]["loss"]) < 2
    ),
}


@pytest.mark.parametrize("page", named(RUN))
def test_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names, printed = pages.run_page(page)
    computed = COMPUTED.get(str(page.relative_to(ROOT)))
    assert computed is None or computed(names, printed), printed


def test_code_that_does_not_run_is_that_of_other_libraries():
    for page in ALL:
        others = [i for i in infos(page) if i.startswith("python") and i != "python"]
        assert set(others) <= {NO_RUN}, page
        assert not others or page.is_relative_to(DOCS / "migrate"), (
            f"{page}: only pages of docs/migrate show code that is not run"
        )


@pytest.mark.parametrize(("module", "words"), COMMANDS)
def test_a_command_parses(module, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if module == "shardjax.checkpoint":
        assert checkpoints._parser().parse_args(words).command == words[0]
        return
    for file in re.findall(r"--config[ =](\S+)", " ".join(words)):
        there = ROOT / file  # else it is one of the reader's
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).write_text(there.read_text() if there.exists() else "")
    program = importlib.import_module(module)
    config = configs.from_command_line(program.Config, module, "", words)
    assert isinstance(config, program.Config)


@pytest.mark.parametrize("page", named(ALL))
def test_links_lead_somewhere(page):
    for link in pages.links_of(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page}: there is no {link}"
        if anchor:
            assert anchor in pages.anchors_of(target), f"{page}: {link} is no heading"


REFERENCE = "\n".join(page.read_text() for page in sorted((DOCS / "api").glob("*.md")))
DOCUMENTED = re.findall(r"\.\. auto\w+:: (\S+)", REFERENCE)


def public_modules():
    """What `import shardjax` lists, and the modules that the reference has besides."""
    first = ast.parse(Path(shardjax.__file__).read_text()).body[1]
    assert isinstance(first, ast.ImportFrom) and first.module == "shardjax"
    listed = [f"shardjax.{a.name}" for a in first.names]
    others = re.findall(r"\.\. module:: (\S+)", REFERENCE)
    return sorted({"shardjax", *listed, *others})


def public_names(module):
    """What a module defines or hands on (`from x import y as y`), without a leading `_`."""
    names = []
    for node in ast.parse(Path(module.__file__).read_text()).body:
        if isinstance(node, ast.ImportFrom):
            names += [a.name for a in node.names if a.name == a.asname]
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.append(node.name)
    return [
        name
        for name in names
        if not name.startswith("_") and not inspect.ismodule(getattr(module, name))
    ]


def resolve(name):
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


@pytest.mark.parametrize("name", public_modules())
def test_every_public_name_is_in_the_reference(name):
    module = importlib.import_module(name)
    documented = [resolve(other) for other in DOCUMENTED]
    assert public_names(module)
    missing = [
        key
        for key in public_names(module)
        if f"{name}.{key}" not in DOCUMENTED
        and not any(getattr(module, key) is thing for thing in documented)
    ]
    assert missing == [], f"add `.. autoclass:: {name}.NAME` and so on to docs/api"


PAGE = """\
# A page: [the `first`](#a)

```python
x = 1
print("x", x / 3)
```

It prints

```text
x 0.333...
```

## Twice

    ```sh
    cd /tmp && python -m experiments.lm --steps $N \\
        --mesh 2x1 ... | tee log  # and so on
    ```

## Twice

```python
>>> x + 1
2
```
"""


@pytest.fixture
def page(tmp_path):
    path = tmp_path / "page.md"
    path.write_text(PAGE)
    return path


def test_pages_are_read(page):
    assert pages.commands_of(page) == [
        ("experiments.lm", ["--steps", "1", "--mesh", "2x1"])
    ]
    assert pages.links_of(page) == ["#a"]
    assert pages.anchors_of(page) == {"a-page-the-first", "twice", "twice-1"}
    names, printed = pages.run_page(page)
    assert names["x"] == 1 and printed.startswith("x 0.33333")


@pytest.mark.parametrize(
    ("old", "new", "error", "message"),
    [
        (
            "x 0.333...",
            "x 0.334",
            AssertionError,
            r"page.md:11: the page says .*\n\nx 0.334",
        ),
        (">>> x + 1\n2", ">>> x + 1\n3", AssertionError, "page.md.*, line 24"),
        ("x = 1", "x = y", NameError, "'y'"),
        ("2\n```\n", "2\n", ValueError, "page.md:23: a fence is opened and not closed"),
    ],
)
def test_what_is_wrong_on_a_page_is_found(page, old, new, error, message):
    assert old in PAGE
    page.write_text(PAGE.replace(old, new))
    with pytest.raises(error, match="(?s)" + message):
        pages.run_page(page)
