"""Templates of SQLite databases of Prefect and MLflow: copying one takes milliseconds, the migrations take seconds.

A template has the tables of one version of its package and no rows of a user. It lies in the user's cache directory and
is made from the first database that the package itself has created. Without a template, or for a database of another
version, the package migrates the database as usual.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from blocks.files.local import open_private


@dataclass(frozen=True, slots=True)
class DatabaseTemplate:
    """Template of the database of a package.

    Attributes:
        package: name of the package.
        filled_tables: tables whose rows are part of the template, because every new database has them.
    """

    package: str
    filled_tables: frozenset[str]

    @property
    def path(self) -> Path:
        """File of the template for the installed version of the package."""
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        return cache / "tinker-flows" / f"{self.package}-{version(self.package)}.db"

    def prepare(self, database: Path) -> bool:
        """Create a missing database from the template; return whether the database needs no migration."""
        with suppress(OSError, ValueError, sqlite3.Error):  # the package then migrates it, or reports what is wrong
            database = database.resolve()  # replaces the target of a symbolic link, not the link
            revision = _revision(self.path)
            if is_missing(database):
                for suffix in ("-wal", "-shm"):  # left by a database that was deleted; SQLite would replay them
                    database.with_name(database.name + suffix).unlink(missing_ok=True)
                with _replacing(database) as copy, self.path.open("rb") as template, open_private(copy, "wb") as file:
                    shutil.copyfileobj(template, file)
            return _revision(database) == revision
        return False

    def save(self, database: Path) -> None:
        """Make the template from a database that the package has just created, unless the template exists."""
        with suppress(OSError, ValueError, sqlite3.Error):  # a cache that cannot be written costs time, not correctness
            if self.path.exists():
                return
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with _replacing(self.path) as copy, closing(sqlite3.connect(copy)) as template:
                with closing(sqlite3.connect(f"{database.as_uri()}?mode=ro", uri=True)) as source:
                    source.backup(template)
                template.execute("PRAGMA journal_mode = DELETE")
                for (table,) in template.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
                    if table not in self.filled_tables and not table.startswith("sqlite_"):
                        template.execute(f'DELETE FROM "{table}"')
                template.commit()
                template.execute("VACUUM")


PREFECT_TEMPLATE = DatabaseTemplate(
    "prefect", frozenset({"alembic_version", "block_type", "block_schema", "block_schema_reference"})
)
MLFLOW_TEMPLATE = DatabaseTemplate("mlflow", frozenset({"alembic_version", "workspaces"}))


def is_missing(database: Path) -> bool:
    """Return whether a database file does not exist or is empty."""
    return not database.exists() or not database.stat().st_size


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Write a file under a temporary name and rename it when it is complete."""
    with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as folder:
        temporary = Path(folder) / path.name
        yield temporary
        temporary.replace(path)


def _revision(database: Path) -> str:
    """Return the revision of a database's tables.

    Raises:
        OSError, sqlite3.Error: the database cannot be read or has no revision.
    """
    with closing(sqlite3.connect(f"{database.as_uri()}?mode=ro", uri=True)) as connection:
        row = connection.execute("SELECT version_num FROM alembic_version").fetchone()
        if row is None:  # the first migration was killed
            raise sqlite3.DatabaseError("the database has no revision")
        return row[0]
