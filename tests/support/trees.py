"""Contents of directories, for comparisons."""

from pathlib import Path


def contents(directory: Path) -> dict[str, bytes | None]:
    """Returns the bytes of every file by relative path, and None for each directory."""
    return {
        str(path.relative_to(directory)): None if path.is_dir() else path.read_bytes()
        for path in sorted(directory.rglob("*"))
    }


def snapshot(directory: Path) -> dict[str, tuple[bytes | None, int]]:
    """Returns bytes and modification times, including the directory's own, which any write
    changes."""
    out: dict[str, tuple[bytes | None, int]] = {".": (None, directory.stat().st_mtime_ns)}
    for name, content in contents(directory).items():
        out[name] = content, (directory / name).stat().st_mtime_ns
    return out
