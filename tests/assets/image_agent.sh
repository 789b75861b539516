#!/bin/bash
# An agent of an image that has no Python: what the model says is bash, until its output has `done`.
input=$(cat)
[[ $input =~ \"sampling\":\ \{([^}]*)\} ]] && sampling=${BASH_REMATCH[1]}
[[ $input =~ Task\ [0-9]+ ]] && heard=${BASH_REMATCH[0]}
[[ $OPENAI_BASE_URL =~ http://([^:]*):([0-9]*)(/.*) ]] && read -r host port path <<< "${BASH_REMATCH[*]:1}"
while [[ $heard != *done* ]]; do
  body="{\"messages\": [{\"role\": \"user\", \"content\": \"$heard\"}], $sampling}"
  exec 3<> "/dev/tcp/$host/$port"
  printf 'POST %s/chat/completions HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n' "$path" "$host" >&3
  printf 'Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s' ${#body} "$body" >&3
  reply=$(cat <&3)
  exec 3>&-
  [[ $reply =~ \"content\":\"([^\"]*)\" ]] || exit 3
  heard=$(bash -c "${BASH_REMATCH[1]}")
done
