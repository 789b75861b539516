"""The network of a terminal: HTTP by the names of listed hosts, and nothing else.

A proxy in the worker's process. It listens on the loopback of the sandbox, by a socket that the sandbox's first process
made there. A name is resolved once, here, and its address is judged before the connection.
"""

from __future__ import annotations

import ipaddress
import re
import select
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from urllib.parse import urlsplit

from aligner.errors import ConfigError

PORT = 3128  # in the sandbox
PORTS = (80, 443)  # of an entry without one
ENTRY = re.compile(r"(\*\.)?([a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?|\[[0-9a-f:]+\])(:\d{1,5})?")
HEAD_BYTES = 1 << 14
SILENT_S = 60.0  # of a connection
CONNECT_S = 20.0
DRAIN_S = 2.0
CONNECTIONS = 32  # of a terminal at a time
NOT_PASSED = ("host", "connection", "keep-alive", "proxy-", "te", "trailer", "transfer-encoding", "upgrade")
# addresses that mean an IPv4 address behind a gateway
GATEWAYS = tuple(map(ipaddress.IPv6Network, ("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32")))


class Refused(Exception):
    """A request that is not carried out: its status, and the reason."""

    def __init__(self, status: str, reason: str):
        super().__init__(reason)
        self.status = status


class HostList:
    """Hosts that programs may reach: `name`, `*.name`, an address; each with `:port`, else ports 80 and 443."""

    def __init__(self, entries: Sequence[str]):
        if isinstance(entries, str):
            raise ConfigError("hosts", entries, "a list of names such as pypi.org or *.example.org:443")
        self._entries = []
        for entry in entries:
            if not (isinstance(entry, str) and (match := ENTRY.fullmatch(entry.lower()))):
                raise ConfigError("hosts", entry, "a name such as pypi.org or *.example.org:443, or an address")
            ports = (int(match[4][1:]),) if match[4] else PORTS
            self._entries.append((bool(match[1]), match[2].strip("[]"), ports))

    def allows(self, name: str, port: int) -> bool:
        name = name.lower().rstrip(".")
        return any(
            port in ports and (name.endswith(f".{listed}") if below else name == listed)
            for below, listed, ports in self._entries
        )

    def address(self, name: str, port: int) -> tuple[int, tuple]:
        """Return a family and address of a listed host: a public one, or one that is listed itself."""
        if not self.allows(name, port):
            raise Refused("403 Forbidden", f"{name}:{port} is not among the hosts of this terminal")
        try:
            answers = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise Refused("502 Bad Gateway", f"{name}: {error}") from None
        for family, _, _, _, address in answers:
            if is_public(address[0]) or self.allows(address[0], port):
                return family, address
        raise Refused("403 Forbidden", f"{name} is at {answers[0][4][0]}, which is not public and not listed")


def is_public(text: str) -> bool:
    """Return whether an address belongs to the internet, so that no service of the node or the cluster has it."""
    address = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped:
            address = address.ipv4_mapped
        elif any(address in gateway for gateway in GATEWAYS):
            return False
    return address.is_global and not address.is_multicast


class Proxy:
    """A thread that answers at a listening socket until it is shut down."""

    def __init__(self, listener: socket.socket, hosts: HostList):
        self.listener, self.hosts = listener, hosts
        self._room = threading.BoundedSemaphore(CONNECTIONS)
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            if self._room.acquire(blocking=False):
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()
            else:
                client.close()

    def _serve(self, client: socket.socket) -> None:
        try:
            with client, suppress(OSError):
                client.settimeout(SILENT_S)
                try:
                    self._answer(client)
                except Refused as refused:
                    text = f"{refused}\n".encode(errors="replace")
                    head = f"HTTP/1.1 {refused.status}\r\nContent-Length: {len(text)}\r\nConnection: close\r\n\r\n"
                    client.sendall(head.encode() + text)
                client.shutdown(socket.SHUT_WR)
                client.settimeout(DRAIN_S)
                for _ in range(HEAD_BYTES):  # unread bytes would turn the end into a reset, which loses the answer
                    if not client.recv(1 << 12):
                        break
        finally:
            self._room.release()

    def _answer(self, client: socket.socket) -> None:
        head, rest = _head(client)
        method, target, fields = _parsed(head)
        if method == "CONNECT":
            name, port = _name_and_port(f"//{target}", 443)
            tunnel, first, reply = True, rest, b"HTTP/1.1 200 Connection established\r\n\r\n"
        elif method in ("GET", "HEAD") and target.startswith("http://"):
            name, port = _name_and_port(target, 80)
            tunnel, first, reply = False, _request(method, target, fields), b""
        else:
            raise Refused("405 Method Not Allowed", f"{method}: expected CONNECT, or GET of http://")
        family, address = self.hosts.address(name, port)
        with socket.socket(family, socket.SOCK_STREAM) as server:
            server.settimeout(CONNECT_S)
            try:
                server.connect(address)
            except OSError as error:
                raise Refused("502 Bad Gateway", f"{name}: {error}") from None
            client.sendall(reply)
            server.sendall(first)
            _pass_on(server, client, both=tunnel)


def _head(client: socket.socket) -> tuple[str, bytes]:
    data = b""
    while b"\r\n\r\n" not in data:
        if len(data) > HEAD_BYTES:
            raise Refused("431 Request Header Fields Too Large", f"expected a head of at most {HEAD_BYTES} bytes")
        piece = client.recv(1 << 12)
        if not piece:
            raise Refused("400 Bad Request", "the request has no end")
        data += piece
    head, _, rest = data.partition(b"\r\n\r\n")
    return head.decode("latin-1"), rest


def _parsed(head: str) -> tuple[str, str, list[tuple[str, str]]]:
    first, *lines = head.split("\r\n")
    words = first.split(" ")
    fields = [(name, value) for name, colon, value in (line.partition(":") for line in lines) if colon]
    if len(words) != 3 or len(fields) != len(lines) or {"\r", "\n"} & {*"".join(lines)}:
        raise Refused("400 Bad Request", "this is no request of HTTP")
    return words[0], words[1], fields


def _name_and_port(url: str, usual: int) -> tuple[str, int]:
    try:
        parts = urlsplit(url)
        name, port = parts.hostname, parts.port
    except ValueError:
        name, port = None, None
    if not name or "@" in parts.netloc:
        raise Refused("400 Bad Request", "the request names no host")
    return name, usual if port is None else port


def _request(method: str, target: str, fields: list[tuple[str, str]]) -> bytes:
    """Return what the server gets: the host that was judged, no body, and one request a connection."""
    parts = urlsplit(target)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    kept = [field for field in fields if not field[0].strip().lower().startswith((*NOT_PASSED, "content-"))]
    lines = [f"{method} {path} HTTP/1.1", f"Host: {parts.netloc}", "Connection: close"]
    lines += [f"{name}:{value}" for name, value in kept]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def _pass_on(server: socket.socket, client: socket.socket, both: bool) -> None:
    """Pass on what the server sends, and `both`: what the client does, until the server ends or both are silent."""
    targets, poll = {server.fileno(): (server, client)}, select.poll()
    if both:
        targets[client.fileno()] = (client, server)
    for fd in targets:
        poll.register(fd, select.POLLIN)
    while ready := poll.poll(1000 * SILENT_S):
        for fd, _ in ready:
            source, target = targets[fd]
            data = source.recv(1 << 16)
            if data:
                target.sendall(data)
                continue
            if source is server:
                return
            poll.unregister(fd)
            server.shutdown(socket.SHUT_WR)
