"""Hugging Face Hub routes: with ``HF_ENDPOINT=<this engine>``, clients load the served models' tokenizers by name.

The engine implements only the routes and headers that huggingface_hub uses (https://huggingface.co/docs/hub/api).
"""

from __future__ import annotations

from fastapi import APIRouter, Response
from starlette.responses import FileResponse, JSONResponse

from engine.hub_files import HubModel, hub_model, hub_names
from engine.routes.body import JsonObject
from engine.service.engine import Engine


def hub_router(engine: Engine) -> APIRouter:
    """Return the router that serves tokenizer and configuration files as the Hugging Face Hub does."""
    router = APIRouter()
    models: dict[str, HubModel] = {}
    for base in engine.bases.values():
        model = hub_model(base.loaded)
        models.update(dict.fromkeys(hub_names(base.loaded), model))

    def file_response(name: str, file: str) -> Response:
        model = models.get(name)
        if model is None:
            return _missing("RepoNotFound", f"This engine does not serve {name!r}; it serves {', '.join(models)}.")
        if file not in model.paths:
            return _missing("EntryNotFound", f"{name} has no tokenizer or configuration file {file!r}.")
        headers = {"ETag": f'"{model.etags[file]}"', "X-Repo-Commit": model.commit}
        return FileResponse(model.paths[file], headers=headers)

    @router.api_route("/{name}/resolve/{revision}/{file:path}", methods=["GET", "HEAD"])
    def resolve(name: str, revision: str, file: str) -> Response:
        return file_response(name, file)

    @router.api_route("/{org}/{name}/resolve/{revision}/{file:path}", methods=["GET", "HEAD"])
    def resolve_of_org(org: str, name: str, revision: str, file: str) -> Response:
        return file_response(f"{org}/{name}", file)

    @router.get("/api/models/{rest:path}")
    def model_info(rest: str) -> Response:
        """Describe a model or list its files.

        ``rest`` is ``{name}``, ``{name}/revision/{revision}`` or ``{name}/tree/{revision}``; a name may have one slash.
        """
        for kind in ("tree", "revision", ""):
            name, separator, _ = rest.partition(f"/{kind}/") if kind else (rest, "/", "")
            if separator and name in models:
                model = models[name]
                return JSONResponse(_tree(model) if kind == "tree" else _repository(name, model))
        return _missing("RepoNotFound", f"This engine does not serve {rest!r}; it serves {', '.join(models)}.")

    return router


def _repository(name: str, model: HubModel) -> JsonObject:
    return {
        "id": name,
        "modelId": name,
        "sha": model.commit,
        "private": False,
        "disabled": False,
        "gated": False,
        "tags": [],
        "downloads": 0,
        "likes": 0,
        "siblings": [{"rfilename": file} for file in model.paths],
    }


def _tree(model: HubModel) -> list[JsonObject]:
    return [
        {"type": "file", "path": file, "size": path.stat().st_size, "oid": model.etags[file][:40]}
        for file, path in model.paths.items()
    ]


def _missing(code: str, sentence: str) -> Response:
    return JSONResponse({"error": sentence}, 404, {"X-Error-Code": code, "X-Error-Message": sentence})
