"""Supervised fine-tuning and reward models: tasks on a fixed data set.

Start with ``supervised_task``, what both share.
``launch`` and the rooms above ``ppo`` may import it; ``ppo`` does for its pretraining term.
"""
