"""How much memory and disk a run needs, told before any weight is loaded.

``parts`` says what models there are and how large, ``trace`` what one pass keeps, ``memory`` adds
both up for a rank and a host, ``machine`` says what is there, ``check`` compares.
"""
