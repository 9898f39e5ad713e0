"""mkdocs hooks of `make docs`: README as the home page, a complete navigation, and links into the project as text."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(((?!https?:|#)[^)#]+)(#[^)]*)?\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the decisions and every page that the navigation lacks."""
    nav: list[dict[str, Any]] = config.nav or []
    named = set(re.findall(r"[\w-]+\.md", str(nav)))
    docs = Path(config.docs_dir)
    others = [path.name for path in sorted(docs.glob("*.md")) if path.name not in named]
    decisions = [path.relative_to(docs).as_posix() for path in sorted(docs.glob("decisions/*.md"))]
    config.nav = [*nav, *([{"More": others}] if others else []), {"Decisions": decisions}]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add README as the home page, with its links relative to docs/."""
    text = (ROOT / "README.md").read_text().replace("](docs/", "](")
    files.append(File.generated(config, "index.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace each link to a file outside the docs by its text and its path."""
    folder = posixpath.dirname(page.file.src_uri)

    def as_text(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, link[2]))
        if files.get_file_from_path(target):
            return link[0]
        # The target is relative to the project in README, and to docs/ on every other page.
        path = target if page.file.src_uri == "index.md" else posixpath.normpath(posixpath.join("docs", target))
        if not (ROOT / path).exists():
            return link[0]  # broken: the strict build reports it
        return link[1] if link[1].strip("`") == path else f"{link[1]} (`{path}`)"

    return LINK.sub(as_text, markdown)
