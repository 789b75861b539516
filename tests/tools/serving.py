"""A server of a model in a thread of this process."""

import asyncio
import socket
import threading
from contextlib import contextmanager

from aligner.environments.endpoint import Listener, make_app


@contextmanager
def listening(served, listener: socket.socket):
    server = Listener(make_app(served, continue_text=getattr(served, "continue_text", None)))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.should_exit = True
        thread.join()
