"""The socket that the server listens on."""

import socket

from dsv3_jax.server.run import bind


def test_answers_are_sent_at_once():
    """A small answer does not wait for the acknowledgement of the one before."""
    with bind("127.0.0.1", 0) as bound:
        bound.listen()
        with socket.create_connection(bound.getsockname()), bound.accept()[0] as accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert accepted.proto == socket.IPPROTO_TCP
