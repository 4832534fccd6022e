"""The documentation site's links to files outside docs/, which GitHub and a checkout have and the site hasn't."""

from __future__ import annotations

import os
import re
from typing import Any

_CODE_OR_LINK = re.compile(
    r"^ {0,3}(?P<fence>```+|~~~+).*?^ {0,3}(?P=fence)[^\n]*$"
    r"|(?<!!)\[(?P<text>[^\]\n]*)\]\((?P<target>[^)\s]+)\)"
    r"|`[^`\n]*`",
    re.DOTALL | re.MULTILINE,
)


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """The page with its links made fit for the site; MkDocs calls it for every page."""
    return mended(markdown, page.file.src_uri, config.docs_dir, config.extra.get("source_url") or "")


def mended(markdown: str, page: str, docs: str, source: str) -> str:
    """``markdown`` of ``page`` (its path below the folder ``docs``) without links that leave ``docs``.

    A link to a file outside becomes one to ``source`` (the repository's files on the web) or, without a source, its
    text and path. A link to a folder of pages leads to its README.md. Code stays as it is.
    """
    here = os.path.dirname(page)

    def link(found: re.Match[str]) -> str:
        text, target = found["text"], found["target"] or ""
        path, sharp, anchor = target.partition("#")
        if re.match(r"[a-z]+:", target) or not path:
            return found[0]
        inside = os.path.normpath(os.path.join(here, path))
        if not inside.startswith(".."):
            folder = os.path.isfile(os.path.join(docs, inside, "README.md"))
            return f"[{text}]({path.rstrip('/')}/README.md{sharp}{anchor})" if folder else found[0]
        outside = os.path.relpath(os.path.join(docs, inside), os.path.dirname(docs)).replace(os.sep, "/")
        if source:
            return f"[{text}]({source.rstrip('/')}/{outside}{sharp}{anchor})"
        return text if text.strip("`").endswith(os.path.basename(outside)) else f"{text} (`{outside}`)"

    return _CODE_OR_LINK.sub(link, markdown)
