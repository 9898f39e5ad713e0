"""What terms prepared of single datums, kept by the content of the datum: computed once, however often it comes."""

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
from objectives.errors import ObjectiveError
from objectives.kept import Kept
from objectives.per_datum import version_of
from objectives.regularizer import Regularizer
from objectives.term import Term, own_params


class FeatureCache(Kept):
    """The features of datums. A key is a hash of the term's ``prepare``, its version and parameters, and of
    the datum's tokens, of which of them are trained, and its text.
    """

    def features(self, regularizer: Regularizer, batch: Batch, prepare: Callable[[Batch], Sequence[Any]]) -> list[Any]:
        """One feature for each datum of a batch; `prepare` is called with those datums that are new, if any.

        Raises:
            ObjectiveError: it returns another number of features, or one that JSON cannot hold.
        """
        keys_D = _keys(regularizer, batch)
        adapter = _adapter(regularizer.term)
        found = self._typed(adapter, keys_D)
        missing = [d for d, key in enumerate(keys_D) if key not in found]
        if missing:
            part, places = _part(batch, missing)
            made = list(prepare(part))
            if len(made) != part.num_datums:
                raise ObjectiveError(
                    f"Term {regularizer.name!r} is declared per_datum and prepared {len(made)} features of "
                    f"{part.num_datums} datums: return a list with one for each."
                )
            self.keep({keys_D[d]: _dump(adapter, made[place], regularizer.name) for d, place in places.items()})
            found = self._typed(adapter, keys_D)
        return [found[key] for key in keys_D]

    def _typed(self, adapter: TypeAdapter[Any], keys_D: Sequence[str]) -> dict[str, Any]:
        """What is known of these keys; without what was kept as a type that has changed since."""
        found: dict[str, Any] = {}
        for key, value in self.find(keys_D).items():
            with suppress(ValidationError):
                found[key] = adapter.validate_python(value)
        return found


def _dump(adapter: TypeAdapter[Any], feature: object, name: str) -> Any:
    try:
        plain = json.loads(json.dumps(adapter.dump_python(feature, mode="json", warnings="error")))
        if adapter.validate_python(plain) == feature:
            return plain
        reason = f"{feature!r} is {plain!r} there"
    except (TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
    raise ObjectiveError(
        f"Term {name!r} is declared per_datum, and a feature that it prepared cannot be kept as JSON ({reason[:200]}): "
        "annotate what prepare returns, as in list[Verdict], return plain data, or leave out per_datum."
    )


def _part(batch: Batch, missing: Sequence[int]) -> tuple[Batch, dict[int, int]]:
    """The batch of some datums, and where in it each is; all of them, where these have no trained token."""
    whole = len(missing) == batch.num_datums
    if whole or not any(bool(_datum(batch.mask_DT, batch, d).any()) for d in missing):
        return batch, {d: d for d in missing}
    target_tokens_DT, offsets_D = pack([_datum(batch.target_tokens_DT, batch, d) for d in missing])
    weights_DT, _ = pack([_datum(batch.weights_DT, batch, d) for d in missing])
    texts_D = tuple(batch.texts_D[d] for d in missing) if batch.texts_D else ()
    return Batch(target_tokens_DT, weights_DT, offsets_D, texts_D), {d: place for place, d in enumerate(missing)}


def _keys(regularizer: Regularizer, batch: Batch) -> list[str]:
    prepare = regularizer.term.prepare
    assert prepare is not None
    params = json.dumps(own_params(prepare, regularizer.params), sort_keys=True, default=repr)
    start = hashlib.sha256(f"{_version(regularizer.term)}\0{params}".encode())
    keys = []
    for d in range(batch.num_datums):
        key = start.copy()
        for tensor in (_datum(batch.target_tokens_DT, batch, d), _datum(batch.mask_DT, batch, d)):
            key.update(f"\0{tuple(tensor.shape)}\0".encode() + tensor.numpy().tobytes())
        key.update(batch.texts_D[d].encode("utf-8", "surrogatepass") if batch.texts_D else b"")
        keys.append(key.hexdigest()[:32])
    return keys


@cache
def _version(term: Term) -> str:
    """What a feature depends on beside datum and parameters: the function, as far as can be seen, and its version."""
    assert term.prepare is not None
    try:
        source = inspect.getsource(inspect.getmodule(term.prepare) or term.prepare)
    except (OSError, TypeError):  # written in no file
        source = ""
    return f"{term.name}\0{term.prepare.__module__}.{term.prepare.__qualname__}\0{version_of(term.prepare)}\0{source}"


@cache
def _adapter(term: Term) -> TypeAdapter[Any]:
    """To JSON and back, by what prepare is annotated to return."""
    prepare: Any = inspect.unwrap(term.prepare) if term.prepare else None
    written = {key: value for key, value in getattr(prepare, "__annotations__", {}).items() if key == "return"}
    returned = get_type_hints(SimpleNamespace(__annotations__=written), prepare.__globals__).get("return")
    return TypeAdapter((get_args(returned) or (Any,))[0])


def _datum(values_DT: Tensor, batch: Batch, d: int) -> Tensor:
    return values_DT[int(batch.offsets_D[d]) : int(batch.offsets_D[d + 1])]
