"""Checks of a machine and an installation, each with a verdict and a way out. They run before
anything else works, so none of them needs torch in this process."""
