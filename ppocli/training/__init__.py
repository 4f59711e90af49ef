"""The generic loop: collect, plan, optimize, evaluate, save, resume. It knows no algorithm.

Start with ``loop`` and ``task`` (what an algorithm provides); ``optimize`` makes the updates.
``ppo``, ``supervised`` and the rooms above may import it.
"""
