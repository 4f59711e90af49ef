"""Prompts, examples and conversations: from files to batches of token ids.

Start with ``sources`` (where rows come from) and ``data_set`` (what rollouts draw from).
Rooms from ``models`` upward may import it.
"""
