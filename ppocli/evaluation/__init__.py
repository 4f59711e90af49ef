"""Evaluation of a trained policy: rewards, KL, win rates, generation and chat.

Start with ``run_evaluation``, which does the work of ``ppocli eval``; ``player`` generates from a
run.
``cli``, ``launch`` and ``publish`` may import it.
"""
