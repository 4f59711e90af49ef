"""Suites that run for hours: kills at random moments, and damaged folders, rewards, servers and
disks, drawn at random. ``make soak`` runs all of them; ``python -m tools.soak kills --cases 50``
one of them. Each case is drawn from the seed and its number alone, so that one that failed can be
played again: ``python -m tools.soak kills --seed 1 --case 17``.
"""
