"""Torch modes of the calling script, set aside while a run computes. Imports nothing heavy."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def default_modes() -> Iterator[None]:
    """Reset torch's global modes for the block, and restore the script's after it: a run trains, in
    the precision of its own configuration."""
    import torch

    dtype = torch.get_default_dtype()
    casts = {device: torch.is_autocast_enabled(device) for device in ("cpu", "cuda")}
    # within a script's contexts ours would go on with weights as they were when first rounded:
    # torch forgets those at the end of the outermost one
    nesting = torch.autocast_increment_nesting()
    for _ in range(nesting):
        torch.autocast_decrement_nesting()
    torch.set_default_dtype(torch.float32)
    for device in casts:
        torch.set_autocast_enabled(device, False)
    try:
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        torch.set_default_dtype(dtype)
        for device, enabled in casts.items():
            torch.set_autocast_enabled(device, enabled)
        for _ in range(nesting - 1):
            torch.autocast_increment_nesting()
