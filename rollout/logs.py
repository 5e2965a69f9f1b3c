"""What the processes of a server log, and in which form."""

from __future__ import annotations

import json
import logging

from rollout.config import EngineConfig


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, process, logger, message, what the record gives as `fields`, and the
    traceback of an exception."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "process": record.processName,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def configure(config: EngineConfig, *, force: bool = False) -> None:
    """Log to stderr as --log-level and --log-format say; `force`: also where the process logs already."""
    handler = logging.StreamHandler()
    text = logging.Formatter("%(asctime)s %(levelname)s %(processName)s: %(message)s")
    handler.setFormatter(JsonFormatter() if config.log_format == "json" else text)
    logging.basicConfig(level=config.log_level.upper(), handlers=[handler], force=force)
