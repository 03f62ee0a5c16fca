"""Prefill and decode on separate servers: a decode server pulls cache pages from prefill servers.

=================== ======================================================================
protocol.py         the request to a prefill server, the frames of its answer, and transports
jax_transfer.py     the transport by jax.experimental.transfer
peers.py            the prefill servers that a decode server knows; chooses one by load
remote_prefill.py   the source of pages on the decode side: it asks a peer
=================== ======================================================================

For the engine of a decode server, prefill servers are one more source of cached pages, see
:class:`dsv3_jax.pages.PageSource`. Every page is checked when it arrives, and a page that does not
arrive is computed by the decode server itself. A lost peer, a damaged page or a deadline therefore
costs time and never changes a token.

The part of the prefill side that answers is an endpoint, :mod:`dsv3_jax.server.prefill`.
"""
