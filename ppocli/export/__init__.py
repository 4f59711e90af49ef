"""A trained policy as a Hugging Face folder with a model card, and its upload to the Hub.

Start with ``model_folder.py``, which saves and verifies the folder; ``provenance.py`` reads from the
run what ``card.py`` says. ``cli`` calls this room; ``launching`` calls ``card.write_card`` alone.
"""
