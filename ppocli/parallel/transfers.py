"""Copies between the host and the device that make the host wait no more than they must."""

import torch


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``tensor.to(device)``. From the host it goes by pinned memory: a copy from any other memory
    waits until the device has done all it was told before."""
    if tensor.device.type != "cpu" or device.type in ("cpu", "meta"):
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def to_host(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Tensors of one device on the CPU, for one wait: the last copy ends after the others."""
    return [*(one.to("cpu", non_blocking=True) for one in tensors[:-1]), tensors[-1].cpu()]
