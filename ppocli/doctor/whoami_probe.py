"""``python -m ppocli.doctor.whoami_probe``: what the Hub says of the token, without naming it or
its owner, as JSON."""

from __future__ import annotations

import json
import sys


def main() -> int:
    """Print ``{"role": ...}``, ``{"refused": true}`` or ``{"error": ...}`` as the last line."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    facts: dict[str, object]
    try:
        answer = HfApi().whoami()
        token = (answer.get("auth") or {}).get("accessToken") or {}
        facts = {"role": token.get("role")}
    except HfHubHTTPError as error:
        code = getattr(error.response, "status_code", None)
        facts = {"refused": True} if code in (401, 403) else {"error": f"HTTP status {code}"}
    except Exception as error:  # httpx's errors are of several families; their texts may hold URLs
        facts = {"error": type(error).__name__}
    sys.stdout.write("\n" + json.dumps(facts) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
