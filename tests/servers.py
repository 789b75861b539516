"""HTTP servers of the tests' own."""

from __future__ import annotations

import json
import random
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Listening(ThreadingHTTPServer):
    request_queue_size = 128  # of those that come while it is kept from running


class Server:
    """`reply(body) -> (status, answer)`, sent with `reply_headers`; notes what it was asked."""

    def __init__(self, reply=lambda body: (200, 0.0)):
        self.reply, self.bodies, self.headers = reply, [], []
        self.reply_headers: dict[str, str] = {}
        noted = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                noted.bodies.append(body)
                noted.headers.append(dict(self.headers))
                status, answer = noted.reply(body)
                data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(status)
                for name, value in (noted.reply_headers | {"Content-Length": str(len(data))}).items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args):
                pass

        self.server = Listening(("127.0.0.1", 0), Handler)
        self.base_url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.url = f"{self.base_url}/get_reward"

    def start(self):
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def close(self):
        self.server.shutdown()
        self.server.server_close()


def fickle(body):
    """Another score or grade each time, some of them late, some none; but of a run's first try of its rewards."""
    time.sleep(random.choice([0, 0, 0.02]))
    text = json.dumps(body)
    chance = 1.0 if any(first in text for first in ('"response": "0"', " 0?", "probe")) else random.random()
    if chance < 0.04:
        return (503, {}) if chance < 0.02 else (200, b"?")
    if "messages" not in body:
        return 200, random.random()
    return 200, {"choices": [{"message": {"content": f"I give {random.randint(0, 10)}."}}]}


def scored_by(base_url):
    """Settings of a run whose samples a server scores and judges."""
    endpoint = f"{{base_url: '{base_url}/v1', model: m, temperature: 1, key_env: JUDGE_KEY}}"
    return [
        f"reward.functions=[{{path: http, args: {{url: '{base_url}/score', format: sample, key_env: SCORE_KEY}}}}]",
        f"reward.judges=[{{question: 'How good is {{response}}?', votes: 2, endpoint: {endpoint}}}]",
        "reward.max_invalid_fraction=0.9",
    ]
