"""How the site is built: `python -m sphinx -W -n --keep-going docs site`."""

import inspect
import re
from pathlib import Path

from sphinx.util.inspect import stringify_signature

import shardjax

ROOT = Path(__file__).parent.parent

project = "shardjax"
copyright = "the authors of shardjax; Apache License 2.0"
version = release = shardjax.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]

myst_heading_anchors = 4

napoleon_numpy_docstring = False
napoleon_use_ivar = (
    True  # attributes as a list in the class, not as entries of their own
)
napoleon_attr_annotations = False  # the signature has them
napoleon_use_rtype = False
autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 88

# Types that are documented elsewhere.
_OTHERS = (
    "collections|datetime|flax|jax|jaxlib|jaxtyping|numpy|optax|os|pathlib|pyarrow"
)
# Types of ours that signatures name, and that users at most pass on.
_PASSED_ON = (
    "checkpoint.checkpointer.Position|data.block_share.(Agreement|BlockDealing)"
    r"|data.delimited.Dialect|data.share.EqualDealing|data.\w+.\w+Source"
    "|embed.groups.Group|embed.in_graph.(RowBlock|TableHandle)|embed.joint.JointBatch"
    "|embed.layout.(GroupLayout|Layout)|embed.moves.(Fill|Move)|embed.stream.PlanStream"
    "|embed.table_state.TableLeaf|errands.Errand|metrics.metric.M|sharded.PartSpec"
    "|zero.piecewise.Piecewise"
)
nitpick_ignore_regex = [
    ("py:.*", rf"({_OTHERS})\..*"),
    ("py:.*", rf"shardjax\.({_PASSED_ON})"),
    ("py:class", r"shardjax\..*\._\w+"),
    ("py:class", r"ndarray|(\w+)\[.*"),  # of a type of several parts, one part
]

html_theme = "furo"
html_title = f"shardjax {version}"
copybutton_prompt_text = ">>> |... "
copybutton_prompt_is_regexp = True

_CODE = re.compile(r"(``.+?``|`[^`]+`)")
_NAME = re.compile(r"[A-Za-z_][\w.]*")
_EMPHASIS = re.compile(r"(?<![\w/\[(])\*[A-Za-z][\w -]*\*(?![\w*])")


def in_markup(app, what, name, obj, options, lines):
    """Docstrings as reStructuredText: they write `code` as Markdown does.

    A `name` becomes a link if there is something of that name. Stars and bars are what they
    are, but for those around an *emphasized* word.
    """
    session = False
    for i, line in enumerate(lines):
        session = bool(line.strip()) and (session or line.lstrip().startswith(">>>"))
        if not session and "::" not in line:
            lines[i] = "".join(map(_marked, _CODE.split(line)))
    if what in ("attribute", "property"):
        lines[:0] = ["..", ""]  # or what is before a colon in the first line is a type


def _marked(part):
    if part.startswith("``"):
        return part
    if part.startswith("`") and len(part) > 1:
        code = part.strip("`")
        return f":py:obj:`{code}`" if _NAME.fullmatch(code) else f"``{code}``"
    if _EMPHASIS.search(part):
        return part
    return re.sub(r"([*|])(?! )", r"\\\1", part)


def known_or_code(app, env, node, contnode):
    """A `name` in a docstring that is none of ours is code, such as that of an argument."""
    if node.get("reftype") == "obj":
        return contnode
    return None


def skip_fields(app, what, name, obj, skip, options):
    """Leaves out fields of named tuples and defaults that are types: the class has them."""
    of_tuple = str(getattr(obj, "__doc__", "")).startswith("Alias for field number")
    return True if of_tuple or (what == "class" and isinstance(obj, type)) else None


class _Something:
    """A default value without a text that is Python, such as a function."""

    def __repr__(self):
        return "..."


def signature_of_init(app, what, name, obj, options, signature, returns):
    """What a class is made with where Sphinx cannot tell: of Flax modules, whose metaclass
    hides it, and of dataclasses, which do not keep the source of their defaults."""
    hidden = signature == "(*args: Any, **kwargs: Any)"
    if what != "class" or not (hidden or (signature and " = <" in signature)):
        return None
    parts = list(inspect.signature(obj.__init__).parameters.values())[1:]  # no self
    for i, part in enumerate(parts):
        if part.default is not part.empty and repr(part.default).startswith("<"):
            parts[i] = part.replace(default=_Something())
    made = inspect.Signature(parts)
    return stringify_signature(made, unqualified_typehints=True), None


def by_one_name(app, what, name, obj, options, lines):
    """Lets "a, b: text" be two names and no type: Sphinx splits where there is a space."""
    for i, line in enumerate(lines):
        if found := re.match(r":(param|ivar) ([^:]*,[^:]*):", line):
            names = found[2].replace(", ", ",\u200b")
            lines[i] = f":{found[1]} {names}:{line[found.end() :]}"


def link_files(app, docname, source):
    """Lets links to files outside of docs/ work: the site has copies of them."""
    up = "../" * (docname.count("/") + 1)
    source[0] = source[0].replace(f"]({up}", f"](path:{up}")
    if docname == "notebooks":
        for path in sorted(ROOT.glob("notebooks/*.ipynb")):
            name = f"`notebooks/{path.name}`"
            link = f"[{name}](path:../notebooks/{path.name})"
            source[0] = source[0].replace(name, link)


def setup(app):
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", in_markup, priority=400)  # before napoleon
    app.connect("autodoc-process-docstring", by_one_name, priority=600)  # after it
    app.connect("autodoc-process-signature", signature_of_init)
    app.connect("autodoc-skip-member", skip_fields)
    app.connect("source-read", link_files)
    app.connect("missing-reference", known_or_code)
