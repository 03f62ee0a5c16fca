"""Serves the page and its files."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from starlette.responses import FileResponse, Response

from dsv3_jax.server.errors import ApiError

_FOLDER = Path(__file__).parent

_MEDIA_TYPES = {
    "index.html": "text/html",
    "style.css": "text/css",
    "chat.js": "text/javascript",
    "markdown.js": "text/javascript",
    "markdown-it.min.js": "text/javascript",
    "markdown-it.LICENSE.txt": "text/plain",
}

FILE_PATHS = frozenset(f"/page/{name}" for name in _MEDIA_TYPES)

_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self';"
    " connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}

router = APIRouter(include_in_schema=False)


@router.get("/")
async def page() -> Response:
    """Returns the page."""
    return await file("index.html")


@router.get("/page/{name}")
async def file(name: str) -> Response:
    """Returns a file of the page."""
    if name not in _MEDIA_TYPES:
        raise ApiError(404, f"page: expected one of {', '.join(_MEDIA_TYPES)}; got {name:.80}")
    return FileResponse(_FOLDER / name, media_type=_MEDIA_TYPES[name], headers=_HEADERS)
