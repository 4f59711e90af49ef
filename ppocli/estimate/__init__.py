"""How much memory and disk a run needs, told before any weight is loaded.

``parts`` says what models there are and how large, ``passes`` what a pass of them takes, ``memory``
adds both up for a rank and a host, ``check`` makes the estimate and compares it with what is there.
"""
