"""What a directory holds, to be compared with what it held before or with another one."""

from pathlib import Path


def contents(directory: Path) -> dict[str, bytes | None]:
    """Bytes of every file by relative path; None stands for a directory."""
    return {
        str(path.relative_to(directory)): None if path.is_dir() else path.read_bytes()
        for path in sorted(directory.rglob("*"))
    }


def snapshot(directory: Path) -> dict[str, tuple[bytes | None, int]]:
    """Bytes and modification times, the directory's own among them: what any writing changes."""
    out: dict[str, tuple[bytes | None, int]] = {".": (None, directory.stat().st_mtime_ns)}
    for name, content in contents(directory).items():
        out[name] = content, (directory / name).stat().st_mtime_ns
    return out
