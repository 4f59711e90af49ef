"""Models, prompts and data that ship with ppocli, and the names they go by.

Start with ``names``; the README beside it describes the files.
Every room may import it.
"""
