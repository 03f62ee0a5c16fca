"""The server's HTTP in a process of its own, and its connection to the engine's process.

Python runs one thread at a time. In one process, the texts of some hundred open streams would keep
the engine's thread from its steps. So ``dsv3 serve`` starts a second process:

==================== ============================== =================================
part                 process                        what it does
==================== ============================== =================================
:class:`EngineHost`  the engine's, with the devices answers calls, and sends what requests gain
:class:`RemoteEngine` HTTP's                        stands where the engine stood
==================== ============================== =================================

All that a step adds to all requests is one message. If HTTP falls behind, the next message has the
tokens of several steps.
"""
