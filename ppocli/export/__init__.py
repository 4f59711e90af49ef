"""A trained policy as a Hugging Face folder with a model card, and its upload to the Hub.

Start with ``model_folder.py``, which saves and verifies the folder; ``provenance.py`` reads what
the card says from the run. ``cli`` calls this room, ``launching`` only ``card.write_card``.
"""
