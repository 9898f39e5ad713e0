"""Cache of the features that terms prepare per datum, keyed by the content of the datum."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from objectives.batch import Batch, pack
from objectives.config.import_path import ImportedFunction
from objectives.errors import ObjectiveError
from objectives.jsonl_cache import JsonlCache
from objectives.term import Regularizer, Term, definition_of, globals_of, origin_of, own_params, version_of


class FeatureCache(JsonlCache):
    """Cache of features per datum.

    A key is a hash of the term's name, of its ``prepare`` (import path, bound arguments, declared version, parameters
    and the source of its module) and of the datum's tokens, mask, text and text labels.
    """

    def features(self, regularizer: Regularizer, batch: Batch, prepare: Callable[[Batch], Any]) -> list[object]:
        """Return one feature per datum of a batch; `prepare` is called for the uncached datums only.

        If no uncached datum has a trained token, it is called for the whole batch.

        Raises:
            ObjectiveError: `prepare` returns a wrong number of features, or a feature that is not JSON data.
        """
        keys_D = _keys(regularizer, batch)
        adapter = _adapter(regularizer.term)
        cached = self._find_valid(adapter, keys_D)
        missing = [d for d, key in enumerate(keys_D) if key not in cached]
        if missing:
            subset, index_of = _subset(batch, missing)
            features = prepare(subset)
            if not isinstance(features, Sequence) or len(features) != subset.num_datums:
                returned = f"{len(features)} features" if isinstance(features, Sequence) else type(features).__name__
                raise ObjectiveError(
                    f"Term {regularizer.name!r} is declared per_datum but prepared {returned} for {subset.num_datums} "
                    "datums; return a list with one feature per datum."
                )
            self.put({keys_D[d]: _dump(adapter, features[index], regularizer.name) for d, index in index_of.items()})
            cached = self._find_valid(adapter, keys_D)
        return [cached[key] for key in keys_D]

    def _find_valid(self, adapter: TypeAdapter[object], keys_D: Sequence[str]) -> dict[str, object]:
        """Find cached features; ignore those that do not fit the return type of ``prepare``, which may have changed."""
        features: dict[str, object] = {}
        for key, value in self.find(keys_D).items():
            with suppress(ValidationError):
                features[key] = adapter.validate_python(value)
        return features


def _dump(adapter: TypeAdapter[object], feature: object, name: str) -> object:
    try:
        json_data = json.loads(json.dumps(adapter.dump_python(feature, mode="json", warnings="error")))
        if adapter.validate_python(json_data) == feature:
            return json_data
        reason = f"{feature!r} becomes {json_data!r}"
    except (TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
    raise ObjectiveError(
        f"Term {name!r} is declared per_datum, but one of its features cannot be stored as JSON ({reason[:200]}); "
        "annotate the return type of prepare, such as list[Verdict], return JSON data, or remove per_datum."
    )


def _subset(batch: Batch, missing: Sequence[int]) -> tuple[Batch, dict[int, int]]:
    """Return a batch of the given datums and each datum's index in it.

    If none of them has a trained token, return the full batch, because a batch without trained tokens is invalid.
    """
    if len(missing) == batch.num_datums or not any(bool(_datum(batch.mask_DT, batch, d).any()) for d in missing):
        return batch, {d: d for d in missing}
    target_tokens_DT, offsets_D = pack([_datum(batch.target_tokens_DT, batch, d) for d in missing])
    weights_DT, _ = pack([_datum(batch.weights_DT, batch, d) for d in missing])
    texts_D = tuple(batch.texts_D[d] for d in missing) if batch.texts_D else ()
    labels_D = {name: tuple(labels[d] for d in missing) for name, labels in batch.text_labels_D.items()}
    subset = Batch(target_tokens_DT, weights_DT, offsets_D, texts_D, text_labels_D=labels_D)
    return subset, {d: index for index, d in enumerate(missing)}


def _keys(regularizer: Regularizer, batch: Batch) -> list[str]:
    """Return the key of each datum; see `FeatureCache`."""
    prepare = regularizer.term.prepare
    assert prepare is not None
    params = json.dumps(own_params(prepare, regularizer.params), sort_keys=True, default=_describe)
    start = hashlib.sha256(f"{_code_identity(regularizer.term)}\0{params}".encode())
    keys = []
    for d in range(batch.num_datums):
        key = start.copy()
        for tensor in (_datum(batch.target_tokens_DT, batch, d), _datum(batch.mask_DT, batch, d)):
            key.update(f"\0{tuple(tensor.shape)}\0".encode() + tensor.numpy().tobytes())
        key.update(batch.texts_D[d].encode("utf-8", "surrogatepass") if batch.texts_D else b"")
        if labels := {name: labels_D[d] for name, labels_D in sorted(batch.text_labels_D.items())}:
            key.update(f"\0{json.dumps(labels)}".encode())
        keys.append(key.hexdigest()[:32])
    return keys


def _describe(param: object) -> str:
    return param.fingerprint() if isinstance(param, ImportedFunction) else repr(param)


@cache
def _code_identity(term: Term) -> str:
    """Return the term's name, and the path, bound arguments, declared version and module source of its ``prepare``."""
    assert term.prepare is not None
    definition = definition_of(term.prepare)
    source = ""
    for code in (inspect.getmodule(definition), definition):  # a function of a notebook has no module with a source
        if not source and code is not None:
            with suppress(OSError, TypeError):
                source = inspect.getsource(code)
    return f"{term.name}\0{origin_of(term.prepare)}\0{version_of(term.prepare)}\0{source}"


@cache
def _adapter(term: Term) -> TypeAdapter[object]:
    """Converter of features to JSON and back, from the annotated return type of ``prepare``."""
    assert term.prepare is not None
    annotations = getattr(definition_of(term.prepare), "__annotations__", {})
    # Resolve this annotation only: others may use names that are imported for type checkers alone.
    annotations = {key: value for key, value in annotations.items() if key == "return"}
    return_type = get_type_hints(SimpleNamespace(__annotations__=annotations), globals_of(term.prepare)).get("return")
    feature_types = get_args(return_type) or (Any,)  # (Verdict,) of list[Verdict]; Any without an annotation
    return TypeAdapter(feature_types[0])


def _datum(values_DT: Tensor, batch: Batch, d: int) -> Tensor:
    return values_DT[int(batch.offsets_D[d]) : int(batch.offsets_D[d + 1])]
