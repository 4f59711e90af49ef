"""``ppocli export``: a policy as a folder that others can load, and to the Hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import typer

from ppocli.cli.options import AsJson, Best, Run, Step, Trust, flag, option
from ppocli.cli.output import say, working
from ppocli.config.text import short_path
from ppocli.distributed.standard_output import put
from ppocli.errors import ConfigError


def export_command(
        run: Run = None,
        output: Path | None = option("DIR", "Folder to write (default: RUN/export/NAME, e.g. "
            "step-000024).", "--output", "-o"),
        best: Best = False, step: Step = None,
        dtype: Literal["fp32", "bf16", "fp16"] | None = option(
            "fp32|bf16|fp16", "Store the weights in this type (default: unchanged)."),
        merge: bool | None = option(None, "For a LoRA policy: a whole model with the adapter "
            "merged in (default), or the adapter's own folder.", "--merge/--adapter"),
        overwrite: bool = flag("Replace an existing export.", "--overwrite"),
        dry_run: bool = flag("Print what would be done and write nothing.", "--dry-run"),
        as_json: AsJson = False, trust: Trust = False,
        to_hub: str | None = option("USER/NAME", "Push the verified folder to this repository on "
            "the Hub."),
        public: bool = typer.Option(False, "--public/--private", help="Visibility of the "
            "repository (default: private).")) -> None:
    """Export a policy as a verified Hugging Face folder with a model card; optionally push it.

    The folder is reloaded with transformers and compared with its source before it gets its final
    name. The last line on standard output is its path, or its address on the Hub.

    \b
    Examples:
      ppocli export runs/NAME
      ppocli export runs/NAME --best --dtype bf16 -o ./my-model
      ppocli export runs/LORA --adapter -o ./my-adapter
      ppocli export ./lm --dtype fp16 -o ./lm-fp16
      ppocli export runs/NAME --to-hub USER/NAME --dry-run
      ppocli export ./my-model --to-hub USER/NAME --public
    """
    from ppocli.publish import model_folder
    from ppocli.runs.run_folder import lock_beside
    from ppocli.runs.target import find_target

    if public and to_hub is None:
        raise ConfigError("--public is the visibility of a repository, and none is named.",
                          where="--public", fix="add --to-hub USER/NAME")
    folder, result = Path(run or "").expanduser().absolute(), dict[str, Any]()
    changes = output or best or dtype or overwrite or step is not None or merge is not None
    if to_hub is None or changes or model_folder.read_record(folder) is None:
        target = find_target(run, say=say, step=step, best=best)
        plan = model_folder.plan_export(target, output, to_hub, merge, dtype, overwrite, trust)
        folder, what = plan.folder, f"{target.name} to {short_path(str(plan.folder))}"
        if dry_run:
            put(f"would export:  {what}")
        else:
            say(f"exporting {what}")
            with (working(fix="nothing was written; export again") as stop,
                  lock_beside(folder, "name another folder: --output DIR")):
                result = model_folder.write_export(plan, stop.check)
            say("Verified: reloaded with transformers, relative difference of logits "
                f"{result['logits_difference']:.1g}.")
    if dry_run:
        put(f"would push to: {to_hub or 'nothing'} ({'public' if public else 'private'})\n"
            "Nothing was written (--dry-run).")
        return
    if to_hub is not None:
        result["url"] = model_folder.push(folder, to_hub, public=public)
    put(json.dumps({"folder": str(folder), **result}, indent=2) if as_json else
        result.get("url", folder))
