"""An agent in a sandbox without packages: what the model says is bash, until its output has `done`. With the name of a
file it stands for one of the commands there, by its checksum."""

import json
import os
import subprocess
import sys
import urllib.request
import zlib
from pathlib import Path

commands = json.loads(Path(sys.argv[1]).read_text()) if sys.argv[1:] else []
data = json.load(sys.stdin)
messages = data["task"]["messages"] + [{"role": "user", "content": json.dumps(data["task"]["row"])}]
while True:
    body = json.dumps({"messages": messages, **data["sampling"]}).encode()
    address = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
    request = urllib.request.Request(address, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as reply:
        text = json.load(reply)["choices"][0]["message"]["content"]
    command = commands[zlib.crc32(text.encode()) % len(commands)] if commands else text
    done = subprocess.run(["bash", "-c", command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": done.stdout}]
    if "done" in done.stdout:
        break
    if "fail" in done.stdout:
        sys.exit(3)
print(json.dumps({"reward": 99}))
