"""What a reader sees of a report."""

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
        if tag in ("td", "th", "dt"):
            self._text.append(" ")

    def handle_data(self, data):
        if not {"style", "script"} & set(self._open):
            self._text.append(data)
