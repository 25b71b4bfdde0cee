"""A database that an application keeps its own tables, views and triggers in: they do not break our migrations."""

from __future__ import annotations

import contextlib
import dataclasses
import sqlite3
from pathlib import Path

import pytest

from agent_runtime_core import AgentRunner, RunStatus
from agent_runtime_core._engines.sqlite import engine as sqlite
from agent_runtime_core._engines.sqlite.engine import SQLiteEngine
from agent_runtime_core._journal import sqlite as journal
from agent_runtime_core.events import sqlite as events
from agent_runtime_core.persistence import Conversation, ConversationMessage, PersistenceConfig, PersistenceManager
from agent_runtime_core.persistence.documents import sqlite as documents
from agent_runtime_core.queue import sqlite as queue
from agent_runtime_core.state import sqlite as state
from tests.support.cases import for_each
from tests.support.runs import Script

QUEUE = queue.SQLiteQueue.operation_sets[0]

SCHEMAS = {
    "a view on a table that is gone": """
        CREATE TABLE old (a); CREATE VIEW report AS SELECT a FROM old; DROP TABLE old""",
    "a view on a column that is gone": """
        CREATE TABLE old (a, b); CREATE VIEW report AS SELECT b FROM old; DROP TABLE old; CREATE TABLE old (a)""",
    "views on each other": "CREATE VIEW one AS SELECT * FROM two; CREATE VIEW two AS SELECT * FROM one",
    "a view on a table of ours that has another name now": "CREATE VIEW report AS SELECT token FROM arc_fence",
    "a view on a function that is not there": "CREATE VIEW report AS SELECT missing(1)",
    "a trigger on a table that is gone": """
        CREATE TABLE orders (id); CREATE TABLE audit (n);
        CREATE TRIGGER fence AFTER INSERT ON orders BEGIN INSERT INTO audit SELECT id FROM gone; END;
        DROP TABLE audit""",
    "triggers named like columns and tables of ours": """
        CREATE TABLE orders (id);
        CREATE TRIGGER token AFTER INSERT ON orders BEGIN SELECT gone.x FROM gone; END;
        CREATE TRIGGER arc_carried AFTER DELETE ON orders BEGIN SELECT 1; END""",
    "a trigger of a view": """
        CREATE VIEW report AS SELECT 1 AS a;
        CREATE TRIGGER t INSTEAD OF INSERT ON report BEGIN INSERT INTO gone VALUES (new.b); END""",
    "a foreign key to a table that is gone": """
        CREATE TABLE orders (id, customer REFERENCES customer (id)); INSERT INTO orders VALUES (1, 1)""",
    "a foreign key to a column of ours that is not unique": """
        CREATE TABLE jobs (key REFERENCES arc_fence (token), kept REFERENCES arc_carried (token))""",
    "strange names": """
        CREATE TABLE "ta;\nble ""x" ("select", "a""b"); CREATE INDEX "from" ON "ta;\nble ""x" ("select");
        CREATE VIEW "[x" AS SELECT "a""b" FROM "ta;\nble ""x"; CREATE TABLE "" (a); CREATE TABLE 'arc' (arc_fence)""",
    "text in double quotes": """
        CREATE TABLE t (a CHECK (a <> "none")); CREATE INDEX i ON t (a) WHERE a <> 'x';
        CREATE VIEW v AS SELECT "gone" FROM t""",
    "full-text search": "CREATE VIRTUAL TABLE words USING fts5 (text); INSERT INTO words VALUES ('one')",
}


TABLES = (
    "SELECT type, name, sql FROM sqlite_master"
    " WHERE tbl_name NOT LIKE 'arc!_%' ESCAPE '!' AND tbl_name <> 'sqlite_sequence'"
)


def made(path: Path, schema: str) -> None:
    with contextlib.closing(sqlite3.connect(path)) as conn:
        conn.executescript(schema)


@for_each("schema", SCHEMAS)
async def test_whatever_an_application_has_in_its_file_ours_is_made_and_used(tmp_path: Path, schema: str) -> None:
    path = tmp_path / "app.db"
    made(path, SCHEMAS[schema])
    with contextlib.closing(sqlite3.connect(path)) as conn:
        before = sorted(conn.execute(TABLES))

    for n in range(2):  # as new, and as it is then
        async with AgentRunner.open(path) as runner:
            result = await runner.execute(Script(lambda ctx: ctx.step("s", lambda: 1)), f"r{n}")
            assert result.status == RunStatus.SUCCEEDED, result.error
            engine = runner.queue.engine  # type: ignore[attr-defined]
            async with PersistenceManager(PersistenceConfig.on(engine)) as stores:
                await stores.memory.set("k", n)
                talk = Conversation()
                await stores.conversations.save(talk)
                await stores.conversations.append(talk.id, [ConversationMessage(role="user", content="words")])
                assert len(await stores.conversations.search("words")) >= 1
            await engine.compact()
    with contextlib.closing(sqlite3.connect(path)) as conn:
        assert sorted(conn.execute(TABLES)) == before
        assert conn.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


@for_each("schema", SCHEMAS)
async def test_a_file_of_the_first_version_is_brought_to_the_newest(
    tmp_path: Path, schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "app.db"
    with monkeypatch.context() as patch:
        patch.setattr(sqlite, "FENCES", sqlite.FENCES[:1])
        engine = SQLiteEngine.open(path)
        for concern in (journal.CONCERN, events.CONCERN, QUEUE, state.CONCERN, documents.CONCERN):
            engine.file.migrate(dataclasses.replace(concern, migrations=concern.migrations[:1]))
        engine.close_now()
    made(path, SCHEMAS[schema])
    async with AgentRunner.open(path) as runner:
        result = await runner.execute(Script(lambda ctx: ctx.step("s", lambda: 1)))
        assert result.status == RunStatus.SUCCEEDED, result.error
    with contextlib.closing(sqlite3.connect(path)) as conn:
        versions = dict(conn.execute("SELECT concern, version FROM arc_schema"))
        assert versions["fence"] == len(sqlite.FENCES)
        assert versions["queue"] == len(QUEUE.migrations)


async def test_a_foreign_key_that_the_application_declares_later_does_not_stop_a_migration(tmp_path: Path) -> None:
    """To a column that is not unique, it fails every write of that table which checks foreign keys."""
    path = tmp_path / "app.db"
    engine = SQLiteEngine.open(path)
    engine.close_now()
    made(path, "CREATE TABLE jobs (key REFERENCES arc_carried (token)); INSERT INTO jobs VALUES ('x')")
    async with AgentRunner.open(path) as runner:  # the queue's second migration deletes from arc_carried
        assert (await runner.execute(Script(lambda ctx: ctx.step("s", lambda: 1)))).status == RunStatus.SUCCEEDED
