"""Query parameters of the routes that return a part of a list."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query

Limit = Annotated[int, Query(ge=0, le=10_000)]
Offset = Annotated[int, Query(ge=0)]
