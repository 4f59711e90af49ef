"""``python -m ppocli.doctor.torch_probe``: torch, its devices, and a product on each, as JSON."""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any

SIZE = 256
TOLERANCE = 1e-2
"""of entries of size 1 or so; far above the rounding of TF32, far below a wrong product"""


def _product_error(device: Any) -> float:
    """Largest difference of a matrix product on the device to the same in float64 on the CPU."""
    import torch

    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(SIZE, SIZE, generator=generator) / SIZE**0.25 for _ in range(2))
    exact = a.double() @ b.double()
    found = (a.to(device) @ b.to(device)).cpu().double()
    return float((found - exact).abs().max())


def _device(name: str) -> dict[str, Any]:
    import torch

    facts: dict[str, Any] = {"device": name}
    try:
        if name != "cpu":
            properties = torch.cuda.get_device_properties(name)
            free, total = torch.cuda.mem_get_info(name)
            facts |= {"name": properties.name, "free_gib": free / 2**30, "total_gib": total / 2**30,
                      "capability": f"{properties.major}.{properties.minor}"}
            with torch.cuda.device(name):
                facts["bf16"] = torch.cuda.is_bf16_supported(including_emulation=False)
        facts["product_error"] = _product_error(name)
    except Exception as error:  # drivers raise what they like; the text is the finding
        facts["error"] = (str(error).splitlines() or [type(error).__name__])[0]
    return facts


def main() -> int:
    """Print the facts as the last line."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        import torch

        available = torch.cuda.is_available()
        count = torch.cuda.device_count() if available else 0
        devices = [_device(name) for name in ("cpu", *(f"cuda:{i}" for i in range(count)))]
    reasons = [str(w.message).splitlines()[0] for w in said if "CUDA" in str(w.message)]
    facts = {"version": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip,
             "available": available, "reason": reasons[0] if reasons else None,
             "threads": torch.get_num_threads(), "devices": devices}
    sys.stdout.write("\n" + json.dumps(facts) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
