"""What a run shows and gives away: console, live view, reports, trackers, model folder, upload.

Start with ``console`` (a run's lines), ``curves`` (a run's rows as pictures) or ``model_folder``.
``cli`` and ``launch`` may import it.
"""
