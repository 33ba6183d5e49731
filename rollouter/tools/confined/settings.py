"""What a confined process is told on its command line. Neither `dataclasses` nor `json`: importing them takes longer
than all else that the process does before it runs the code."""

from __future__ import annotations

import marshal


class Settings:
    """Limits are those of `rollouter.tools.sandbox.Limits`."""

    def __init__(
        self,
        *,
        work_dir: str,
        read_paths: list[str],
        import_paths: list[str],
        mechanisms: list[str],
        network: bool,
        cpu_s: int,
        memory_bytes: int,
        file_bytes: int,
        disk_bytes: int,
        open_files: int,
        threads: int,
        output_bytes: int,
        keep: bool,
    ) -> None:
        self.work_dir = work_dir
        self.read_paths = read_paths
        """Besides Python's own: what may be read."""
        self.import_paths = import_paths
        """Directories of packages; readable too."""
        self.mechanisms = mechanisms
        """Which of `walls.MECHANISMS` to try."""
        self.network = network
        """It may be used."""
        self.cpu_s = cpu_s
        self.memory_bytes = memory_bytes
        self.file_bytes = file_bytes
        self.disk_bytes = disk_bytes
        self.open_files = open_files
        self.threads = threads
        self.output_bytes = output_bytes
        self.keep = keep
        """Go on after the first piece of code, with its variables."""

    def encode(self) -> str:
        return marshal.dumps(vars(self)).hex()

    @classmethod
    def decode(cls, text: str) -> Settings:
        return cls(**marshal.loads(bytes.fromhex(text)))
