"""``ppocli export``, as the shell sees it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from ppocli.cli.options import AsJson, Run
from ppocli.cli.output import ending


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(export)


def export(
    run: Run = None,
    output: Annotated[Path | None, typer.Option(
        "--output", "-o", metavar="DIR", show_default=False,
        help="Folder to write (default: RUN/export/NAME, e.g. step-000024).")] = None,
    best: Annotated[bool, typer.Option(
        "--best", help="The checkpoint with the best evaluation.")] = False,
    step: Annotated[int | None, typer.Option(
        "--step", metavar="N", min=0, show_default=False,
        help="The checkpoint of step N (default: the final model, else the newest).")] = None,
    dtype: Annotated[Literal["fp32", "bf16", "fp16"] | None, typer.Option(
        "--dtype", show_default=False,
        help="Store the weights as this type (default: as they are).")] = None,
    max_shard_size: Annotated[str | None, typer.Option(
        "--max-shard-size", metavar="SIZE", show_default=False,
        help="Largest weight file (default: 5GB).")] = None,
    include_value_head: Annotated[bool, typer.Option(
        "--include-value-head", help="Add the critic as value_head.safetensors.")] = False,
    merge: Annotated[bool | None, typer.Option(
        "--merge/--adapter", show_default=False,
        help="Of a LoRA policy: a whole model with the adapter merged in (default), or the "
        "adapter's own folder.")] = None,
    overwrite: Annotated[bool, typer.Option(
        "--overwrite", help="Replace an export that is there; your text in its README.md "
        "stays.")] = False,
    dry_run: Annotated[bool, typer.Option(
        "--dry-run", help="Say what would be done; write nothing, ask nobody.")] = False,
    as_json: AsJson = False,
    to_hub: Annotated[bool, typer.Option(
        "--to-hub", help="Push the folder to the Hub once it is verified.")] = False,
    repo_id: Annotated[str | None, typer.Option(
        "--repo-id", metavar="USER/NAME", show_default=False,
        help="Repository (default: your user / the run's name).")] = None,
    private: Annotated[bool | None, typer.Option(
        "--private/--public", show_default=False,
        help="Visibility of the repository (default: private).")] = None,
    create_pr: Annotated[bool, typer.Option(
        "--create-pr", help="Push as a pull request.")] = False,
    revision: Annotated[str | None, typer.Option(
        "--revision", metavar="BRANCH", show_default=False,
        help="Push to this branch, made where missing.")] = None,
) -> None:
    """Write a policy as a verified Hugging Face folder with a model card; push it if asked.

    The folder is reloaded with transformers and compared with its source before it appears under
    its name. The last line on standard output is its path, or the address on the Hub.

    \b
    Examples:
      ppocli export runs/NAME
      ppocli export runs/NAME --best --dtype bf16 -o ./my-model
      ppocli export runs/LORA --adapter -o ./my-adapter
      ppocli export ./lm --dtype fp16 --max-shard-size 2GB -o ./lm-fp16
      ppocli export runs/NAME --to-hub --repo-id USER/NAME --dry-run
      ppocli export runs/NAME --to-hub --public
    """

    def run_it() -> None:
        from ppocli.cli.export import export as implementation
        from ppocli.export.request import ExportRequest

        implementation(ExportRequest(
            run=run, output=output, best=best, step=step, dtype=dtype,
            max_shard_size=max_shard_size, include_value_head=include_value_head,
            merge=merge, overwrite=overwrite, dry_run=dry_run, to_hub=to_hub, repo_id=repo_id,
            private=private, create_pr=create_pr, revision=revision), as_json)

    ending(run_it)
