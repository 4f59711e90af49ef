"""Prompts, examples and conversations: from files to batches of token ids.

Start with ``sources`` (where rows come from) and ``prompt_set`` (what a rollout draws from).
Rooms from ``models`` upward may import it.
"""
