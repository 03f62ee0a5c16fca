"""The field ``kv_transfer_params``, with which vLLM's proxies connect prefill and decode.

Such a proxy sends a prompt to a prefill server with ``do_remote_decode`` and one token to generate,
and then to a decode server with the parameters of that answer. Here the second request alone would
do, since a decode server asks prefill servers itself. The parameters tell it which one has the
pages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request

from dsv3_jax.server.errors import ApiError

if TYPE_CHECKING:  # the types of bodies can be imported without JAX
    from dsv3_jax.disaggregation.peers import Peer
    from dsv3_jax.server.service import Service

_NAME = "kv_transfer_params"


class KvTransferParams(BaseModel):
    """Parameters of a proxy. Those of vLLM's connectors that have no meaning here are ignored."""

    model_config = ConfigDict(extra="ignore", strict=True)

    do_remote_decode: bool | None = None
    """Whether the answer should say where the pages of the prompt are."""
    do_remote_prefill: bool | None = None
    """Whether a prefill server has the pages of the prompt."""
    remote_host: str | None = None
    """Host of that server, which has to be one of ``--prefill-url``."""
    remote_port: Annotated[int, Field(ge=1, lt=2**16)] | None = None

    def peer(self, service: Service) -> Peer | None:
        """Returns the prefill server that has the pages, or None."""
        if self.do_remote_decode and not service.is_prefill_server:
            raise _refused("do_remote_decode", "a server with --role prefill")
        if not self.do_remote_prefill:
            return None
        if service.remote is None:
            raise _refused("do_remote_prefill", "a server with --role decode")
        peer = service.remote.peers.at(self.remote_host, self.remote_port)
        if peer is None:
            where = f"{self.remote_host}:{self.remote_port}"
            raise _refused("remote_host", f"the host and port of a --prefill-url, got {where:.200}")
        return peer

    def answer(self, request: Request) -> dict[str, Any]:
        """Returns the fields that the answer of a prefill server has in addition."""
        if not self.do_remote_decode:
            return {}
        host, port = _address(request)
        params = {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": host,
            "remote_port": port,
        }
        return {_NAME: params}


def _address(request: Request) -> tuple[str | None, int | None]:
    """Returns the host and port at which the client has reached the server."""
    try:
        return request.url.hostname, request.url.port
    except ValueError:  # the header Host has another form
        host, port = request.scope.get("server") or (None, None)
        return host, port


def _refused(field: str, expected: str) -> ApiError:
    return ApiError(400, f"{_NAME}.{field}: expected {expected}", param=_NAME)
