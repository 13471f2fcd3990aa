"""Prints the mean number of words a sentence, longest first, and its longest sentence.

    python scripts/docs/sentences.py [PAGE ...]        # default: README.md and docs/**/*.md

Code blocks, tables and headings are left out. Aim at 17 words or fewer.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def sentences(text: str) -> list[str]:
    """The sentences of a page; an item of a list ends one, and so does an empty line."""
    text = re.sub(r"^```.*?^```|^    .*?$|^[|#!].*?$", "\n\n", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"`[^`]*`", "CODE", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    parts = re.split(r"\n\s*\n|\n\s*(?:[*-]|\d+\.) |(?<=[.!?:])[*)\"]*\s+(?=[\"*(]*[A-Z0-9])", text)
    found = [" ".join(part.split()) for part in parts]
    return [part for part in found if len(part.split()) > 2]


if __name__ == "__main__":
    pages = [Path(name) for name in sys.argv[1:]]
    pages = pages or [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    rows = []
    for page in pages:
        found = sentences(page.read_text()) or [""]
        words = [len(sentence.split()) for sentence in found]
        rows.append((sum(words) / len(words), max(words), page, max(found, key=len)))
    for mean, most, page, longest in sorted(rows, reverse=True):
        print(f"{mean:5.1f} {most:4d}  {page.resolve().relative_to(ROOT)}  {longest[:60]}")
