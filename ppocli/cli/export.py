"""``ppocli export``: a policy as a folder that others can load, and to the Hub."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from typing import Any

from ppocli.cli.output import say
from ppocli.config.as_words import training_command
from ppocli.export.facts import Mask
from ppocli.export.folder import ExportPlan, write_export
from ppocli.export.hub import push
from ppocli.export.request import (
    Existing,
    ExportRequest,
    check_destination,
    repo_name,
    resolve,
    shown,
)
from ppocli.storage.publishing import repair_published
from ppocli.storage.run_folder import lock_beside
from ppocli.text import format_bytes


def export(request: ExportRequest, as_json: bool) -> None:
    """Export, and push where asked; the last line on standard output is the address on the Hub,
    else the folder.

    Raises:
        PpocliError: whatever keeps the export from its end.
    """
    mask = Mask.of_this_process()

    def tell(text: str) -> None:
        say(mask(text))

    plan = resolve(request, tell, training_command)
    if request.dry_run:
        _dry_run(plan, request, mask, as_json)
        return
    done: dict[str, Any] = {}
    if isinstance(plan, Existing):
        folder, name = plan.folder, plan.run_name
        tell(f"{shown(folder)} is as it was exported and verified")
    else:
        folder, name = plan.target, plan.facts.name
        done = _write(plan, request, mask, tell)
    if request.to_hub:
        done["url"] = push(folder, request, repo_name(name), mask, tell)
    if as_json:
        print(json.dumps({"folder": str(folder), **done}, indent=2))
    else:
        print(done.get("url", folder), flush=True)


def _write(plan: ExportPlan, request: ExportRequest, mask: Mask, tell: Any) -> dict[str, Any]:
    from ppocli.cli.working import working

    tell(f"exporting {plan.name} as {plan.written} ({format_bytes(plan.bytes)}) to "
         f"{shown(plan.target)}")
    with (working(fix="nothing was written; export again") as stop,
          lock_beside(plan.target, "name another folder: --output DIR")):
        repair_published(plan.target)
        check_destination(request, plan.target, plan.source)  # another export may have ended there
        verified = write_export(plan, mask, stop.check)
    tell(verified.sentence())
    return {"source": mask(plan.name), "step": plan.facts.step, "dtype": plan.written,
            "bytes": plan.bytes, "files": sorted(os.listdir(plan.target)),
            "verified": asdict(verified)}


def _dry_run(plan: ExportPlan | Existing, request: ExportRequest, mask: Mask,
             as_json: bool) -> None:
    """Say everything that would be done; nothing is written and nobody is asked."""
    name = plan.run_name if isinstance(plan, Existing) else plan.facts.name
    folder = plan.folder if isinstance(plan, Existing) else plan.target
    hub = _hub_plan(request, name) if request.to_hub else None
    if isinstance(plan, Existing):
        lines = [f"would write:   nothing; {shown(folder)} is there, as it was exported"]
        told: dict[str, Any] = {}
    else:
        told = {"source": mask(plan.name), "step": plan.facts.step, "stored": plan.stored,
                "dtype": plan.written, "bytes": plan.bytes, "files": plan.files(),
                "overwrite": folder.exists() and request.overwrite}
        num_files = len(plan.weights.filename_to_tensors)
        cast = plan.written if plan.cast is None else f"{plan.stored} cast to {plan.cast}"
        lines = [f"would export:  {told['source']} ({shown(plan.source)})",
                 f"would write:   {shown(folder)}" + (" (replaced)" if told["overwrite"] else ""),
                 f"weights:       {len(plan.tensors)} tensors, {cast}, "
                 f"{format_bytes(plan.bytes)} in {num_files} file"
                 + "s" * (num_files > 1),
                 f"files:         {', '.join(told['files'])}",
                 "would verify:  reload with transformers; tensors, logits on 2 prompts, tokenizer"]
    if hub is not None:
        lines += [f"would push to: {hub['repo']} ({hub['visibility']})",
                  f"               {hub['how']}; your text in a README.md there is kept"]
    if as_json:
        print(json.dumps(mask.tree({"dry_run": True, "folder": str(folder), **told,
                                    **({"hub": hub} if hub else {})}), indent=2))
    else:
        print("\n".join(mask(line) for line in [*lines, "Nothing was written (--dry-run)."]))


def _hub_plan(request: ExportRequest, run_name: str) -> dict[str, str]:
    repo = request.repo_id or f"USER/{repo_name(run_name)}, USER being your token's"
    how = (f"to the branch {request.revision}, made where missing" if request.revision
           else "as a pull request" if request.create_pr else "to the main branch")
    return {"repo": repo, "visibility": "public" if request.private is False else "private",
            "how": how}
