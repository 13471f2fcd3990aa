"""What mkdocs does not do by itself: pages made of the code, the list of decisions, and checks of
the pages it has made.

A warning logged here ends `mkdocs build --strict` with an error.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
logger = logging.getLogger("mkdocs.hooks.copus")

_DECISIONS = "Decisions"
_OUTER = re.compile(
    r"<(?:script|link|img|iframe|source)\b[^>]*\b(?:src|href)=[\"']?(?:https?:)?//[^>]*>"
)
_OUTER_STYLE = re.compile(r"(?:@import|url\()\s*[\"']?(?:https?:)?//[^\"')]+")
_LOST_BLOCK = re.compile(r"<p>(?:[^<]|<(?!/p>))*?\n(?:[-*] |\d+\. |\|.*\|\n\|[-: |]+\||```)")
"""A list, table or fence that the line before it has swallowed: other Markdown shows it, this does
not."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Lists the decisions behind their first page, newest first."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    decisions = sorted((Path(config.docs_dir) / "decisions").glob("[0-9]*.md"), reverse=True)
    for entry in config.nav or []:
        if _DECISIONS in entry:
            entry[_DECISIONS] += [f"decisions/{d.name}" for d in decisions if d.name[:3] != "000"]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that are made of the code."""
    from megatron.trainer.config.known_flags import known_flags
    from scripts.docs.flags import all_groups, flags_page

    made = {"flags.md": flags_page(all_groups(), known_flags().values())}
    for page in _pages(config.nav):
        module = page.removeprefix("api/").removesuffix(".md")
        if page.startswith("api/"):
            made[page] = f"# {module}\n\n::: {module}\n"
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    return files


def _pages(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for entry in nav.values() if isinstance(nav, dict) else nav or []:
            yield from _pages(entry)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Warns of blocks that this Markdown shows as running text."""
    found = _LOST_BLOCK.search(html)
    if found:
        logger.warning(
            "%s: put an empty line before the list, table or fence at %r",
            page.file.src_uri,
            found[0][-60:],
        )
    return html


def on_post_build(config: MkDocsConfig) -> None:
    """Warns of whatever a browser would fetch from another host."""
    for path in sorted(Path(config.site_dir).rglob("*")):
        pattern = {".html": _OUTER, ".css": _OUTER_STYLE}.get(path.suffix)
        found = pattern.search(path.read_text()) if pattern else None
        if found:
            logger.warning("%s fetches from another host: %s", path.name, found[0][:120])
