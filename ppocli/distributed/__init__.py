"""Ranks and collectives, devices and threads, signals, and the retry after running out of memory.

Start with ``backend`` (device and ranks of this process) and ``ranks`` (collectives).
Rooms from ``models`` upward may import it.
"""
