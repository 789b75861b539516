"""The hosts that a terminal reaches: those that are listed, by HTTP, and nothing else."""

from __future__ import annotations

import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from typing import ClassVar

import pytest

from aligner.config.sections.environment import EnvironmentConfig
from aligner.environments.terminal import Terminal
from aligner.environments.tools import load_tools
from aligner.errors import ConfigError, EnvironmentCodeError
from aligner.sandbox.proxy import HostList, Refused, is_public
from aligner.sandbox.terminal import lacks

pytestmark = pytest.mark.skipif(bool(why := lacks()), reason=str(why))

PRIVATE = [str(ip_address(number)) for number in (0x0A000001, 0xAC100001, 0xC0A80001)]
# in the sandbox: the answer to each request, and what is left of the way past the proxy
ASK = """
import http.client, json, os, socket, urllib.request
def get(url, method="GET", headers={}):
    link = http.client.HTTPConnection("127.0.0.1", 3128, timeout=20)
    try:
        link.request(method, url, headers=headers)
        answer = link.getresponse()
        return [answer.status, answer.read().decode()]
    except OSError as error:
        return [0, str(error)]
def tunnel(host, port):
    link = http.client.HTTPConnection("127.0.0.1", 3128, timeout=20)
    link.set_tunnel(host, port)
    try:
        link.request("GET", "/tunnel")
        return [200, link.getresponse().read().decode()]
    except OSError as error:
        return [0, str(error)]
def raw(text):
    with socket.create_connection(("127.0.0.1", 3128)) as link:
        link.sendall(text)
        data = b""
        while piece := link.recv(4096):
            data += piece
    return [int(data.split()[1]), data.decode().partition("\\r\\n\\r\\n")[2]]
def direct():
    try:
        return [200, str(socket.create_connection(("127.0.0.1", PORT), 5))]
    except OSError as error:
        return [0, str(error)]
os.environ["no_proxy"] = os.environ["NO_PROXY"] = ""
print(json.dumps({
    "by the environment": [200, urllib.request.urlopen(f"http://localhost:{PORT}/env").read().decode()],
    "get": get(f"http://localhost:{PORT}/x?y=1", "GET", {"Host": "other", "Accept": "a/b", "Proxy-Authorization": "z"}),
    "head": get(f"http://127.0.0.1:{PORT}/", "HEAD"),
    "connect": tunnel("localhost", PORT),
    "pipelined": raw(b"GET http://localhost:%d/1 HTTP/1.1\\r\\n\\r\\nGET /2 HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n" % PORT),
    "another port": tunnel("localhost", PORT + 1),
    "another name": get(f"http://elsewhere.test:{PORT}/"),
    "another address": get(f"http://127.0.0.2:{PORT}/"),
    "its number": get(f"http://2130706433:{PORT}/"),
    "a suffix": get(f"http://notlocalhost:{PORT}/"),
    "a user": get(f"http://localhost:{PORT}@elsewhere.test/"),
    "post": get(f"http://localhost:{PORT}/", "POST"),
    "no address": get("/"),
    "another scheme": get(f"ftp://localhost:{PORT}/"),
    "a torn head": raw(b"GET http://localhost:%d/ HTTP/1.1\\r\\nA: b\\nHost: c\\r\\n\\r\\n" % PORT),
    "a long head": raw(b"GET http://localhost:%d/ HTTP/1.1\\r\\nA: " % PORT + b"a" * 40000 + b"\\r\\n\\r\\n"),
    "no proxy": direct(),
}))
"""
STATUS = {
    **{"another port": 0, "another name": 403, "another address": 403, "its number": 403, "a suffix": 403},
    **{"a user": 400, "post": 405, "no address": 405, "another scheme": 405, "a torn head": 400, "a long head": 431},
    **{"no proxy": 0},
}


class Seen(BaseHTTPRequestHandler):
    requests: ClassVar[list[tuple[str, dict[str, str]]]] = []

    def do_GET(self) -> None:
        Seen.requests.append((f"{self.command} {self.path}", dict(self.headers)))
        self.send_response(200)
        self.send_header("Content-Length", "5")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(b"hello")

    do_HEAD = do_POST = do_GET

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def port():
    with ThreadingHTTPServer(("127.0.0.1", 0), Seen) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        Seen.requests.clear()
        yield server.server_port
        server.shutdown()


FETCH = (
    "NO_PROXY= no_proxy= python3 -c 'import urllib.request as u; print(u.urlopen(\"http://localhost:PORT/\").read())'"
)


def opened(hosts: list[str], port: int) -> Terminal:
    made = Terminal(hosts=hosts, output_chars=20000)
    made.reset(7, tests=FETCH.replace("PORT", str(port)))
    return made


def test_listed_hosts_are_reached_and_nothing_else(port):
    made = opened([f"localhost:{port}", f"127.0.0.1:{port}"], port)
    answers = json.loads(made.python(f"PORT = {port}\n{ASK}"))
    for what in ("by the environment", "get", "connect", "pipelined"):
        assert answers[what] == [200, "hello"], (what, answers)
    assert answers["head"] == [200, ""]
    assert {what: answers[what][0] for what in STATUS} == STATUS, answers
    assert "elsewhere.test" in answers["another name"][1] and "403" in answers["another port"][1]
    assert [text for text, _ in Seen.requests] == ["GET /env", "GET /x?y=1", "HEAD /", "GET /tunnel", "GET /1"]
    passed = Seen.requests[1][1]
    assert passed["Host"] == f"localhost:{port}" and passed["Accept"] == "a/b" and "Proxy-Authorization" not in passed
    made.bash("kill -9 -1")  # it ends no proxy
    assert "hello" in made.bash(FETCH.replace("PORT", str(port))) and made.get_reward() == 1.0


def test_a_name_with_a_private_address_is_refused(port):
    code = f"""import http.client
link = http.client.HTTPConnection("127.0.0.1", 3128)
link.request("GET", "http://localhost:{port}/")
link.getresponse().read().decode()"""
    made = opened([f"localhost:{port}"], port)
    assert "which is not public and not listed" in made.python(code) and not Seen.requests
    assert "Connection refused" in opened([], port).python(code)  # by default there is no proxy


def test_a_name_is_resolved_once(monkeypatch):
    """A second answer of a hostile name server would be another address."""
    answers = [[(socket.AF_INET, 1, 6, "", ("93.184.215.14", 443))], [(socket.AF_INET, 1, 6, "", (PRIVATE[0], 443))]]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answers.pop(0))
    hosts = HostList(["*.Example.org"])
    assert hosts.address("a.example.ORG.", 443) == (socket.AF_INET, ("93.184.215.14", 443))
    with pytest.raises(Refused, match=f"{PRIVATE[0]}, which is not public"):
        hosts.address("a.example.org", 443)
    for name, number in (("example.org", 443), ("a.example.org", 22), ("aexample.org", 443), ("a.example.org.b", 443)):
        with pytest.raises(Refused, match="not among the hosts"):
            hosts.address(name, number)


@pytest.mark.parametrize(
    "text",
    [
        "127.0.0.1",
        *PRIVATE,
        "169.254.169.254",
        "100.64.0.1",
        "0.0.0.0",
        "224.0.0.1",
        "255.255.255.255",
        "::1",
        "::",
        "fe80::1%eth0",
        "fd00::1",
        f"::ffff:{PRIVATE[0]}",
        "64:ff9b::a00:1",
        "2002:a00:1::",
        "2001:0:1::",
        "ff02::1",
    ],
)
def test_private_addresses(text):
    assert not is_public(text) and is_public("1.1.1.1") and is_public("2606:4700::1111")


def test_hosts_that_are_refused_before_a_run():
    for hosts in (["http://pypi.org"], ["*"], ["a b"], [3], "pypi.org"):
        with pytest.raises(ConfigError, match="hosts="):
            HostList(hosts)
    path = "aligner.environments.terminal:Terminal"
    with pytest.raises(EnvironmentCodeError, match=r"environment\.args=.*hosts='pypi\.org/x'"):
        load_tools(EnvironmentConfig(path=path, args={"hosts": ["pypi.org/x"]}))
