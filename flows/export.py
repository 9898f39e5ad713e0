"""Export of a checkpoint: as a PEFT adapter and as a merged model, both as Hugging Face tools read them.

python -m flows.export checkpoint=RUN@best output=exported
"""

# No postponed annotations here: Prefect reads the flow's types from this file without importing it as a module.
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from prefect import flow
from pydantic import Field
from rich.console import Console

from blocks import TinkerService
from blocks.errors import ConfigError
from flows.blocks_of import service_of, storage_of
from flows.command_line import main
from flows.named_checkpoint import CHECKPOINT, WHAT, WeightsConfig, find_checkpoint, with_model
from tasks.export import build_adapter, build_merged, describe_export, download_adapter
from tasks.service_errors import service_errors

Form = Literal["adapter", "merged", "both"]


class ExportConfig(WeightsConfig):
    """What to export, and where to."""

    checkpoint: str = Field(title="Checkpoint", description=WHAT, pattern=CHECKPOINT)
    output: str = Field(
        title="Output",
        description="A directory: the adapter is written into its folder `adapter`, the merged model into `merged`.",
        min_length=1,
    )
    form: Form = Field(
        default="both",
        title="Form",
        description="The adapter alone, which peft, vLLM and SGLang load beside the base model; the merged model, as "
        "large as the base model; or both.",
    )
    base_model: str = Field(
        default="",
        title="Base model",
        description="Where its weights are: a Hugging Face name or a directory. Empty: where the service says that its "
        "tokenizer is.",
    )


@dataclass(frozen=True, slots=True)
class ExportResult:
    """What an export left.

    Attributes:
        path: the tinker:// path that was exported.
        base_model: of the adapter.
        adapter, merged: their directories; empty where that was not asked for.
    """

    path: str
    base_model: str
    adapter: str
    merged: str


@flow(name="export", flow_run_name="export {config.checkpoint}")
def export(config: ExportConfig) -> ExportResult:
    """Write the adapter of a checkpoint, the model merged with it, or both, as Hugging Face tools read them."""
    chosen = find_checkpoint(config.checkpoint, storage_of(config))
    if not chosen.path:
        raise ConfigError("checkpoint is `base`, which has no adapter to export: name a checkpoint.")
    config = with_model(config, chosen)
    output = Path(config.output).expanduser().resolve()
    folders = {kind: str(output / kind) for kind in ("adapter", "merged") if config.form in (kind, "both")}
    with service_of(config) as service, tempfile.TemporaryDirectory(prefix="tinker-flows-export-") as temporary:
        base_model = config.base_model or _base_model(service, config.model)
        downloaded = Path(temporary) / "downloaded"
        download_adapter(service, chosen.path, downloaded)
        if "adapter" in folders:
            build_adapter(base_model, downloaded, output / "adapter")
        if "merged" in folders:
            build_merged(base_model, downloaded, output / "merged")
    describe_export(config.checkpoint, chosen.path, base_model, folders)
    return ExportResult(chosen.path, base_model, folders.get("adapter", ""), folders.get("merged", ""))


def show_export(result: ExportResult) -> None:
    """Print what lies where."""
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"checkpoint   {result.path}")
    console.print(f"base model   {result.base_model}")
    for kind, folder in (("adapter", result.adapter), ("merged", result.merged)):
        if folder:
            console.print(f"{kind:12} {folder}")


def _base_model(service: TinkerService, model: str) -> str:
    """Where the SDK finds the tokenizer: the engine's own directory of the model, or its name on the hub."""
    with service.session() as session, service_errors(f"say where {model} is"):
        return session.create_lora_training_client(model, rank=1).result().get_tokenizer().name_or_path


if __name__ == "__main__":
    main(export, ExportConfig, show=show_export)
