"""A hook of mkdocs: files of the repository that the pages link to become pages of the site.

A link such as ../examples/02_layer.py, or docs/errors.md in CONTRIBUTING.md, is right on GitHub and
in a checkout. In the site the same text becomes a link to the page that this makes of the file.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
TEXTS = "CONTRIBUTING.md", "CHANGELOG.md", "bench/notes/README.md"
NOTES = tuple(
    f"bench/notes/{path.name}"
    for path in sorted((ROOT / "bench/notes").glob("*.md"))
    if path.name != "README.md"
)
FILES = ("bench/results/demo_4xh200.txt",)
LINK = re.compile(r"\]\((?!https?:|#)([^)]+)\)")


def on_files(files: Files, config: Any) -> Files:
    """Add a page for each of TEXTS and NOTES and for each example, and FILES as they are."""
    for name in TEXTS + FILES:
        files.append(File.generated(config, name, content=(ROOT / name).read_text()))
    for name in NOTES:
        page = File.generated(config, name, content=(ROOT / name).read_text())
        page.inclusion = page.inclusion.NOT_IN_NAV
        files.append(page)
    for path in sorted((ROOT / "examples").glob("*.py")):
        text = f"# {path.name}\n\n```python\n{path.read_text()}```\n"
        page = File.generated(config, f"examples/{path.stem}.md", content=text)
        page.inclusion = page.inclusion.NOT_IN_NAV
        files.append(page)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The page's text with links that hold in the site."""
    return LINK.sub(lambda link: f"]({in_site(link[1], page.file.src_uri)})", markdown)


def in_site(target: str, source: str) -> str:
    """Where a link goes, from a page whose file is `source`: ../examples/a.py to examples/a.md, and
    docs/b.md, from a page that stands outside docs/, to b.md."""
    if source in TEXTS + NOTES:
        return target.removeprefix("docs/")
    target = target.removeprefix("../")
    return re.sub(r"^(examples/\w+)\.py$", r"\1.md", target)
