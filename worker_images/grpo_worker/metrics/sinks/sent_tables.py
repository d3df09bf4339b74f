"""Note of the tables that a service has, for services that only append."""

import json

from grpo_worker.common.files import write_text
from grpo_worker.common.store_path import StorePath, has_file
from grpo_worker.metrics.sinks.base import SampleTable


class SentTables:
    """Keeps the last step of each table in a file, so that a repeated step does not double its rows."""

    def __init__(self, file: StorePath) -> None:
        self._file = file
        self._last: dict[str, int] | None = None  # by name of the table; None: the file was not read yet

    def claim(self, table: SampleTable) -> bool:
        """Return whether to send a table, and note that it is sent: a crash may lose one but doubles none."""
        if self._last is None:
            self._last = json.loads(self._file.read_text()) if has_file(self._file) else {}
        if table.step <= self._last.get(table.name, -1):
            return False
        self._last[table.name] = table.step
        self._file.parent.mkdir(parents=True, exist_ok=True)
        write_text(self._file, json.dumps(self._last))
        return True
