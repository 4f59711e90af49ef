"""What a reader sees of a report: of its page, and of its Markdown."""

import re
from html.parser import HTMLParser
from pathlib import Path


class Page(HTMLParser):
    """Tags of a page, and its text without what a reader doesn't see."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags, self.attributes, self._open, self._text = [], [], [], []
        self.feed(path.read_text(encoding="utf-8"))
        assert self._open == [], "every element is closed"
        self.text = " ".join("".join(self._text).split())

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in ("meta", "link", "wbr", "input"):
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if not {"style", "script"} & set(self._open):
            self._text.append(data)


def outside_fences(text: str) -> list[str]:
    """The lines of a Markdown text that aren't in a code block, as CommonMark has it."""
    found, fence = [], None
    for line in text.split("\n"):
        match = re.match(r" {0,3}(`{3,}|~{3,})", line)
        if fence is None and match:
            fence = match[1]
        elif fence is not None:
            bare = line.strip()
            if bare and set(bare) == {fence[0]} and len(bare) >= len(fence):
                fence = None
        else:
            found.append(line)
    assert fence is None, "a code block is left open"
    return found
