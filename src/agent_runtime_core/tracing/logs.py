"""Logs as JSON, with the fields of the run that a record is about."""

from __future__ import annotations

import datetime as _dt
import json
import logging
from typing import Any

from .._core.log import FIELDS, RunFields, current_fields
from .._core.validation import redacted

__all__ = ["JsonFormatter", "RunFields"]


class JsonFormatter(logging.Formatter):
    """Writes each record as a JSON object on one line.

        handler = logging.StreamHandler()
        handler.setFormatter(JsonFormatter())
        logging.basicConfig(handlers=[handler], level="INFO")

    The object contains `time` (RFC 3339, UTC), `level`, `logger`, `message`, `run_id`, `tenant`, `turn_id`, `step`,
    `step_id`, `attempt` and `trace_id`, and `exception` for a record with a traceback. `turn_id` is the conversation
    turn of the run. `step` is the name of the step in which the record was logged, and `step_id` its id. `attempt` is
    the attempt of that step, and between steps the attempt of the run. Fields without a value are left out. What your
    code logs inside a run gets the fields too. Passwords in URLs are replaced by `***`.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line of JSON."""
        known = record.__dict__
        about = known if "run_id" in known else {**current_fields(), **known}
        time = _dt.datetime.fromtimestamp(record.created, _dt.UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {
            "time": time.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": redacted(record.getMessage()),
        }
        line |= {name: str(value) if name == "run_id" else value for name in FIELDS if (value := about.get(name))}
        if record.exc_info:
            line["exception"] = redacted(self.formatException(record.exc_info))
        elif record.exc_text:  # the redact hook replaced the traceback
            line["exception"] = record.exc_text
        return json.dumps(line, default=str)
