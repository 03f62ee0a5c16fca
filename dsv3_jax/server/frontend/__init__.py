"""The server's HTTP in a process of its own, and its connection to the engine's process.

Python runs one thread at a time. In one process, the texts of some hundred open streams would keep
the engine's thread from its steps. So ``dsv3 serve`` starts a second process:

================ =============================== ===========================================
module           process                         what it does
================ =============================== ===========================================
host.py          the engine's, with the devices  answers calls, and sends what requests gain
remote_engine.py HTTP's                          an object with the engine's methods
messages.py      both                            what they send each other
process.py       both                            how they start and end
================ =============================== ===========================================

All that a step adds to all requests is one message. If HTTP falls behind, the next message has the
tokens of several steps. The engine's process gives a sign of life several times a second, so that
the other one notices if it is frozen.
"""
