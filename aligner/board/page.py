"""The HTML of the board and of report.html: one shell, one set of scripts.

The board's page loads the scripts from its own server. A report contains them and all answers that they would ask for.
Modules name each other as `board/NAME.js`, which an import map turns into a path or into the text itself: no build
step.
"""

from __future__ import annotations

import base64
import json
import secrets
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any

ASSETS = Path(__file__).parent / "assets"
KINDS = {".js": "text/javascript", ".css": "text/css"}
STYLES = ("uPlot.min.css", "board.css")
PLOTS = "uPlot.iife.min.js"
# With any text of files or models: only scripts that carry the nonce run, and nothing is loaded from elsewhere.
BOARD_POLICY = "default-src 'self'; script-src 'self' 'nonce-{}'; img-src data:; base-uri 'none'; form-action 'none'"
REPORT_POLICY = "default-src 'none'; script-src 'nonce-{0}'; style-src 'nonce-{0}'; img-src data:; base-uri 'none'"


def asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def assets() -> dict[str, str]:
    """Return the media type of each file that a browser may ask for, by name."""
    return {path.name: KINDS[path.suffix] for path in sorted(ASSETS.iterdir()) if path.suffix in KINDS}


def modules() -> list[str]:
    return [name for name in assets() if name.endswith(".js") and name != PLOTS]


def board_page(tabs: Iterable[str]) -> tuple[str, str]:
    """Return (page, its content security policy)."""
    nonce = secrets.token_urlsafe(16)
    style = "".join(f'<link rel="stylesheet" href="assets/{name}">' for name in STYLES)
    plots = f'<script src="assets/{PLOTS}"></script>'
    where = {name: f"./assets/{name}" for name in modules()}
    page = _shell("aligner board", nonce, style + plots, where, {"tabs": list(tabs), "answers": None})
    return page, BOARD_POLICY.format(nonce)


def report_page(title: str, tabs: Iterable[str], answers: Mapping[str, Any]) -> str:
    """Return the report's HTML. `answers`: those of the endpoints, by their names."""
    nonce = secrets.token_urlsafe(16)
    policy = f'<meta http-equiv="Content-Security-Policy" content="{REPORT_POLICY.format(nonce)}">'
    style = f'<style nonce="{nonce}">{"".join(map(asset, STYLES))}</style>'
    plots = f'<script nonce="{nonce}">{asset(PLOTS)}</script>'
    where = {name: f"data:{KINDS['.js']};base64,{_base64(asset(name))}" for name in modules()}
    return _shell(title, nonce, policy + style + plots, where, {"tabs": list(tabs), "answers": answers})


def _shell(title: str, nonce: str, head: str, where: Mapping[str, str], inlined: Mapping[str, Any]) -> str:
    imports = {f"board/{name}": url for name, url in where.items()}
    return (
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<meta name="referrer" content="no-referrer"><link rel="icon" href="data:,">{head}'
        f'<script type="importmap" nonce="{nonce}">{_json({"imports": imports})}</script></head><body>'
        f'<header><h1>{escape(title)}</h1><nav aria-label="pages"></nav></header><main></main>'
        f'<script type="application/json" id="inlined">{_json(inlined)}</script>'
        f'<script type="module" nonce="{nonce}">import {{ start }} from "board/board.js"; start();</script>'
        "</body></html>"
    )


def _json(value: Any) -> str:
    """Return JSON for use within HTML: no text in it ends its element or begins another."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _base64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()
