"""Export a checkpoint as a PEFT adapter, as a merged model, or both, in the Hugging Face format.

python -m flows.export checkpoint=RUN@best output=exported
"""

if __name__ == "__main__":  # first, so that --help does not wait for the imports below
    from flows.runs.cli import main

    main("flows.export:export", "flows.export:ExportConfig", __doc__, show="flows.export:show_export")

# No postponed annotations here: Prefect reads the flow's types from this file without importing it as a module.
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from prefect import flow
from pydantic import Field

from blocks import TinkerService
from blocks.errors import ConfigError
from blocks.files.local import check_absent, path_of
from blocks.terminal import TextConsole
from flows.config.base import CHECKPOINT, WeightsConfig
from flows.runs.blocks import open_service, storage_of
from flows.runs.checkpoints.checkpoint_refs import find_checkpoint, with_model
from flows.runs.rights import apply_rights
from tasks.common.service_errors import service_errors
from tasks.export import build_adapter, build_merged, describe_export, download_adapter

Form = Literal["adapter", "merged", "both"]


class ExportConfig(WeightsConfig):
    """Export of a checkpoint."""

    checkpoint: str = Field(
        title="Checkpoint",
        description="`RUN`, `RUN@STEP`, `RUN@best` or `RUN@final` of a run in the storage, or a `tinker://` path.",
        pattern=CHECKPOINT,
    )
    output: str = Field(
        title="Output",
        description="Output directory. The adapter is written to its folder `adapter`, and the merged model to its "
        "folder `merged`, neither of which may exist.",
        min_length=1,
    )
    form: Form = Field(
        default="both",
        title="Form",
        description="`adapter`: only the adapter, which peft, vLLM and SGLang load alongside the base model. "
        "`merged`: only the merged model, which is as large as the base model. `both`: adapter and merged model.",
    )
    base_model: str = Field(
        default="",
        title="Base model",
        description="Hugging Face name or directory of the base model's weights. Empty: the location that the service "
        "reports for the tokenizer.",
    )


@dataclass(frozen=True, slots=True)
class ExportResult:
    """Result of an export.

    Attributes:
        path: tinker:// path of the exported checkpoint.
        base_model: Base model of the adapter.
        adapter, merged: Output directories; empty if the form was not requested.
    """

    path: str
    base_model: str
    adapter: str
    merged: str


@flow(name="export", flow_run_name="export {config.checkpoint}", on_running=[apply_rights])
def export(config: ExportConfig) -> ExportResult:
    """Write a checkpoint's adapter, merged model or both, in the Hugging Face format."""
    checkpoint = find_checkpoint(config.checkpoint, storage_of(config))
    if not checkpoint.path:
        raise ConfigError("checkpoint is `base`, which has no adapter to export: set it to a run or a tinker:// path.")
    config = with_model(config, checkpoint)
    output = path_of(config.output)
    if output is None:
        raise ConfigError(f"output is {config.output!r}, which cannot be a path: set it to a directory.")
    output = output.resolve()
    folders = {kind: str(output / kind) for kind in ("adapter", "merged") if config.form in (kind, "both")}
    for folder in folders.values():
        check_absent(Path(folder))
    with open_service(config) as service, tempfile.TemporaryDirectory(prefix="tinker-flows-export-") as temporary:
        base_model = config.base_model or _base_model(service, config.model)
        downloaded = Path(temporary) / "downloaded"
        download_adapter(service, checkpoint.path, downloaded)
        if "adapter" in folders:
            build_adapter(base_model, downloaded, output / "adapter")
        if "merged" in folders:
            build_merged(base_model, downloaded, output / "merged")
    describe_export(config.checkpoint, checkpoint.path, base_model, folders)
    return ExportResult(checkpoint.path, base_model, folders.get("adapter", ""), folders.get("merged", ""))


def show_export(result: ExportResult) -> None:
    """Print the output directories."""
    console = TextConsole()
    console.print(f"checkpoint   {result.path}")
    console.print(f"base model   {result.base_model}")
    for kind, folder in (("adapter", result.adapter), ("merged", result.merged)):
        if folder:
            console.print(f"{kind:12} {folder}")


def _base_model(service: TinkerService, model: str) -> str:
    """Return where the base model's weights are: the engine's model directory, or a name on the Hugging Face Hub.

    It is the location of the model's tokenizer, which the SDK tells only through a training client.
    """
    with service.session() as session, service_errors(f"look up the tokenizer of {model}"):
        return session.create_lora_training_client(model, rank=1).result().get_tokenizer().name_or_path
