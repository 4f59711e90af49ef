"""Displays that can't show something, or are gone."""

from __future__ import annotations

import io

from ppocli.display.live_view import Outlet


class Gone(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_what_the_terminal_cannot_encode_is_escaped_and_the_rest_goes_on():
    raw = io.BytesIO()
    console = Outlet(io.TextIOWrapper(raw, encoding="ascii"))
    console.print("0.4±0.1")
    console.print("and on")
    console.file.flush()
    assert raw.getvalue().decode("ascii").splitlines() == ["0.4\\xb10.1", "and on"]


def test_a_reader_that_left_ends_neither_the_process_nor_raises():
    console = Outlet(Gone())
    console.print("one")
    console.print("two")
    console.file.flush()
    closed = io.StringIO()
    console = Outlet(closed)
    closed.close()
    console.print("three")
    console.file.flush()
