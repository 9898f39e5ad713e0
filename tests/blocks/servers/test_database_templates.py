"""Templates of databases, against databases that Prefect and MLflow migrate themselves."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from blocks.servers.database_templates import MLFLOW_TEMPLATE, PREFECT_TEMPLATE, DatabaseTemplate, is_missing
from blocks.servers.processes import local_prefect_server, prefect_database, prepare_prefect_database
from blocks.tracking import MLflowTracking

MIGRATE = "PREFECT_API_DATABASE_MIGRATE_ON_START"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TINKER_FLOWS_HOME", str(tmp_path / "home"))
    return tmp_path / "cache"


def schema(database: Path) -> list[tuple[str, str]]:
    with closing(sqlite3.connect(database)) as connection:
        query = "SELECT name, sql FROM sqlite_master WHERE name NOT LIKE 'sqlite_%' ORDER BY name"
        return connection.execute(query).fetchall()


def rows(database: Path, table: str) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(database)) as connection:
        return connection.execute(f'SELECT * FROM "{table}"').fetchall()


def small_database(path: Path, revision: str) -> Path:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE alembic_version (version_num TEXT)")
        connection.execute("CREATE TABLE secret (value TEXT)")
        connection.execute("INSERT INTO alembic_version VALUES (?)", (revision,))
        connection.execute("INSERT INTO secret VALUES ('of a user')")
        connection.commit()
    return path


def test_a_copy_has_the_tables_and_only_the_rows_that_every_database_has(tmp_path: Path) -> None:
    template = DatabaseTemplate("mlflow", frozenset({"alembic_version"}))
    assert not template.prepare(tmp_path / "first.db")
    assert is_missing(tmp_path / "first.db")
    template.save(small_database(tmp_path / "first.db", "1"))
    assert template.prepare(tmp_path / "copy.db")
    assert schema(tmp_path / "copy.db") == schema(tmp_path / "first.db")
    assert rows(tmp_path / "copy.db", "alembic_version") == [("1",)]
    assert rows(tmp_path / "copy.db", "secret") == []
    assert b"of a user" not in (tmp_path / "copy.db").read_bytes()
    assert [path.name for path in template.path.parent.iterdir()] == [template.path.name]  # no temporary files


def test_an_existing_database_is_kept_and_migrated_if_it_has_another_revision(tmp_path: Path) -> None:
    template = DatabaseTemplate("mlflow", frozenset({"alembic_version"}))
    template.save(small_database(tmp_path / "new.db", "2"))
    assert template.prepare(tmp_path / "new.db")
    assert not template.prepare(small_database(tmp_path / "old.db", "1"))
    assert rows(tmp_path / "old.db", "secret") == rows(tmp_path / "new.db", "secret") == [("of a user",)]


@pytest.mark.parametrize("content", [b"", b"torn", b"SQLite format 3\0torn"])
def test_a_broken_template_means_a_migration(tmp_path: Path, content: bytes) -> None:
    PREFECT_TEMPLATE.path.parent.mkdir(parents=True)
    PREFECT_TEMPLATE.path.write_bytes(content)
    assert not PREFECT_TEMPLATE.prepare(small_database(tmp_path / "mine.db", "1"))
    assert not PREFECT_TEMPLATE.prepare(tmp_path / "new.db")
    assert is_missing(tmp_path / "new.db")


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path, cache: Path) -> None:
    cache.write_text("a file")
    PREFECT_TEMPLATE.save(small_database(tmp_path / "mine.db", "1"))
    assert not PREFECT_TEMPLATE.prepare(tmp_path / "other.db")


@pytest.mark.process
def test_prefect_serves_a_copy_without_migrations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert MIGRATE not in prepare_prefect_database()
    with local_prefect_server():
        pass
    migrated = prefect_database()
    assert PREFECT_TEMPLATE.path.exists()
    monkeypatch.setenv("TINKER_FLOWS_HOME", str(tmp_path / "other"))
    assert prepare_prefect_database()[MIGRATE] == "false"
    assert schema(prefect_database()) == schema(migrated)
    assert {row[0] for row in rows(prefect_database(), "block_type")} == {
        row[0] for row in rows(migrated, "block_type")
    }
    with local_prefect_server():
        pass


def test_mlflow_opens_a_copy_as_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("migrated", "copy")
    stores = {name: MLflowTracking(tracking_uri=f"sqlite:///{tmp_path / name}.db") for name in names}
    clients = {name: store.get_client() for name, store in stores.items()}
    assert MLFLOW_TEMPLATE.path.exists()
    assert schema(tmp_path / "copy.db") == schema(tmp_path / "migrated.db")
    for name, client in clients.items():
        assert {experiment.name for experiment in client.search_experiments()} == {"Default", "tinker-flows"}
        run = client.create_run(stores[name].experiment_id(client))
        client.log_metric(run.info.run_id, "loss", 1.5)
        assert client.get_run(run.info.run_id).data.metrics == {"loss": 1.5}


def test_files_of_a_deleted_database_are_not_replayed_onto_the_copy(tmp_path: Path) -> None:
    template = DatabaseTemplate("mlflow", frozenset({"alembic_version"}))
    template.save(small_database(tmp_path / "template.db", "1"))
    old = tmp_path / "old" / "mlflow.db"
    old.parent.mkdir()
    with closing(sqlite3.connect(old)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("CREATE TABLE leftover (value TEXT)")
        connection.commit()
        shutil.copytree(old.parent, tmp_path / "killed")  # with the -wal file of the open database
    killed = tmp_path / "killed" / "mlflow.db"
    assert killed.with_name("mlflow.db-wal").stat().st_size
    killed.unlink()
    assert template.prepare(killed)
    assert schema(killed) == schema(template.path)


def test_a_link_to_a_database_on_another_disk_stays_a_link(tmp_path: Path) -> None:
    template = DatabaseTemplate("mlflow", frozenset({"alembic_version"}))
    template.save(small_database(tmp_path / "template.db", "1"))
    (tmp_path / "disk").mkdir()
    link = tmp_path / "mlflow.db"
    link.symlink_to(tmp_path / "disk" / "mlflow.db")
    assert template.prepare(link)
    assert link.is_symlink()
    assert schema(tmp_path / "disk" / "mlflow.db") == schema(template.path)


def test_a_database_whose_first_migration_was_killed_is_migrated(tmp_path: Path) -> None:
    template = DatabaseTemplate("mlflow", frozenset({"alembic_version"}))
    template.save(small_database(tmp_path / "template.db", "1"))
    database = small_database(tmp_path / "half.db", "1")
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("DELETE FROM alembic_version")
        connection.commit()
    assert not template.prepare(database)
