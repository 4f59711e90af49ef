"""The run folder: whole-or-absent files, checkpoints, logs, retention, listing, trust.

Start with ``run_folder`` (what lies where), then ``atomic`` and ``checkpoints``.
Every room but ``config`` and ``builtin`` may import it.
"""
