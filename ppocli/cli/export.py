"""``ppocli export``: a policy as a folder that others can load, and to the Hub."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from ppocli.cli.options import AsJson, Best, Run, Step, Trust, flag, option, request_of
from ppocli.cli.output import say, working
from ppocli.display.results import put
from ppocli.text import counted, format_bytes

if TYPE_CHECKING:
    from ppocli.export.facts import Mask
    from ppocli.export.folder import ExportPlan
    from ppocli.export.request import ExportRequest


def export_command(
        ctx: typer.Context, run: Run = None,
        output: Path | None = option("DIR", "Folder to write (default: RUN/export/NAME, e.g. "
            "step-000024).", "--output", "-o"),
        best: Best = False, step: Step = None,
        dtype: Literal["fp32", "bf16", "fp16"] | None = option(
            "fp32|bf16|fp16", "Store the weights in this type (default: unchanged)."),
        max_shard_size: str | None = option("SIZE", "Largest weight file (default: 5GB)."),
        include_value_head: bool = flag(
            "Add the critic as value_head.safetensors.", "--include-value-head"),
        merge: bool | None = option(None, "For a LoRA policy: a whole model with the adapter "
            "merged in (default), or the adapter's own folder.", "--merge/--adapter"),
        overwrite: bool = flag(
            "Replace an existing export; your text in its README.md is kept.", "--overwrite"),
        dry_run: bool = flag(
            "Print what would be done; write nothing, send no requests.", "--dry-run"),
        as_json: AsJson = False, trust: Trust = False,
        to_hub: bool = flag("Push the folder to the Hub once it is verified.", "--to-hub"),
        repo_id: str | None = option(
            "USER/NAME", "Repository (default: your user / the run's name)."),
        private: bool | None = option(
            None, "Visibility of the repository (default: private).", "--private/--public"),
        create_pr: bool = flag("Push as a pull request.", "--create-pr"),
        revision: str | None = option("BRANCH", "Push to this branch, created if missing.")
        ) -> None:
    """Export a policy as a verified Hugging Face folder with a model card; optionally push it.

    The folder is reloaded with transformers and compared with its source before it gets its final
    name. The last line on standard output is its path, or its address on the Hub.

    \b
    Examples:
      ppocli export runs/NAME
      ppocli export runs/NAME --best --dtype bf16 -o ./my-model
      ppocli export runs/LORA --adapter -o ./my-adapter
      ppocli export ./lm --dtype fp16 --max-shard-size 2GB -o ./lm-fp16
      ppocli export runs/NAME --to-hub --repo-id USER/NAME --dry-run
      ppocli export runs/NAME --to-hub --public
    """
    from ppocli.export.request import ExportRequest

    export(request_of(ExportRequest, ctx, output=output), as_json)


def export(request: ExportRequest, as_json: bool) -> None:
    """Export, and push where asked; the last line on standard output is the address on the Hub,
    else the folder.

    Raises:
        PpocliError: whatever keeps the export from its end.
    """
    from ppocli.config import hub
    from ppocli.export.facts import Mask
    from ppocli.export.hub import push
    from ppocli.export.request import existing, repo_name, resolve, shown

    mask = Mask.of_this_process()

    def tell(text: str) -> None:
        say(mask(text))

    request.check()
    if request.dry_run:  # it asks nobody: what isn't in the local cache isn't there
        os.environ.update({} if hub.offline_variable() else {"HF_HUB_OFFLINE": "1"})
        hub.go_offline()
    plan, done = None, {}
    if (found := existing(request)) is not None:
        folder, name = found
    else:
        plan = resolve(request, tell)
        folder, name = plan.target, plan.facts.name
    if request.dry_run:
        _dry_run(plan, request, folder, repo_name(name), mask, as_json)
        return
    if plan is not None:
        done = _write(plan, request, mask, tell)
    else:
        tell(f"{shown(folder)} is as it was exported and verified")
    if request.to_hub:
        done["url"] = push(folder, request, repo_name(name), mask, tell)
    if as_json:
        put(json.dumps({"folder": str(folder), **done}, indent=2))
    else:
        put(done.get("url", folder))


def _write(plan: ExportPlan, request: ExportRequest, mask: Mask, tell: Any) -> dict[str, Any]:
    from ppocli.export.folder import write_export
    from ppocli.export.request import check_destination, shown
    from ppocli.parallel.threads import settle_threads
    from ppocli.storage import atomic, run_folder

    settle_threads(None)  # it is verified by passes
    tell(f"exporting {plan.name} as {plan.written} ({format_bytes(plan.bytes)}) to "
         f"{shown(plan.target)}")
    with (working(fix="nothing was written; export again") as stop,
          run_folder.lock_beside(plan.target, "name another folder: --output DIR")):
        atomic.repair_published(plan.target)
        check_destination(request, plan.target, plan.source)  # another export may have ended there
        verified = write_export(plan, mask, stop.check)
    logits = "equal" if verified["logits"] == 0 else f"within {verified['logits']:.1e} (rounding)"
    tell(f"Verified: reloaded with transformers {verified['transformers']}; {verified['tensors']} "
         f"tensors equal, logits on {verified['prompts']} prompts {logits}, tokenizer equal.")
    return {"source": mask(plan.name), "step": plan.facts.step, "dtype": plan.written,
            "bytes": plan.bytes, "files": sorted(os.listdir(plan.target)),
            "verified": verified}


def _dry_run(plan: ExportPlan | None, request: ExportRequest, folder: Path, name: str,
             mask: Mask, as_json: bool) -> None:
    """Say everything that would be done; nothing is written and nobody is asked.

    Args:
        plan: None where the export is there already.
    """
    from ppocli.export.request import shown

    told: dict[str, Any] = {"dry_run": True, "folder": str(folder)}
    if plan is None:
        lines = [f"would write:   nothing; {shown(folder)} is there, as it was exported"]
    else:
        replaced = folder.exists() and request.overwrite
        told |= {"source": mask(plan.name), "step": plan.facts.step, "stored": plan.stored,
                 "dtype": plan.written, "bytes": plan.bytes, "files": plan.files(),
                 "overwrite": replaced}
        cast = (plan.written if plan.written == plan.stored
                else f"{plan.stored} cast to {plan.written}")
        lines = [f"would export:  {told['source']} ({shown(plan.source)})",
                 f"would write:   {shown(folder)}" + (" (replaced)" if replaced else ""),
                 f"weights:       {len(plan.tensors)} tensors, {cast}, {format_bytes(plan.bytes)} "
                 f"in {counted(len(plan.shards.filename_to_tensors), 'file')}",
                 f"files:         {', '.join(told['files'])}",
                 "would verify:  reload with transformers; tensors, logits on 2 prompts, tokenizer"]
    if request.to_hub:
        hub = {"repo": request.repo_id or f"USER/{name}, where USER is your token's user",
               "visibility": "public" if request.private is False else "private",
               "how": f"to the branch {request.revision}, created if missing" if request.revision
               else "as a pull request" if request.create_pr else "to the main branch"}
        told["hub"] = hub
        lines += [f"would push to: {hub['repo']} ({hub['visibility']})",
                  f"               {hub['how']}; your text in a README.md there is kept"]
    if as_json:
        put(json.dumps(mask.tree(told), indent=2))
    else:
        put("\n".join(mask(line) for line in [*lines, "Nothing was written (--dry-run)."]))
