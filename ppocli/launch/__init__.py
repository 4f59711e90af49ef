"""From a checked configuration to a run that trains: folder, processes, worker, ending.

Start with ``launch``, then ``worker``, which runs in each training process.
``cli``, ``api`` and ``trainer`` may import it.
"""
