"""A page about the API, made from its own OpenAPI document. No script, nothing from another host."""

from html import escape
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

router = APIRouter(include_in_schema=False)


@router.get("/docs", response_class=HTMLResponse)
async def page(request: Request) -> HTMLResponse:
    document: dict[str, Any] = request.app.openapi()
    rows = "".join(
        f"<tr><td><code>{escape(method.upper())}</code></td><td><code>{escape(path)}</code></td>"
        f"<td>{escape(', '.join(operation.get('tags', [])))}</td>"
        f"<td>{escape(operation.get('description', operation.get('summary', '')))}</td></tr>"
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    )
    title = escape(document["info"]["title"])
    return HTMLResponse(
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title} API</title>"
        '<meta name=viewport content="width=device-width, initial-scale=1">'
        f"<h1>{title} API</h1><p>{escape(document['info'].get('summary', ''))} "
        'Machine-readable: <a href="/openapi.json">openapi.json</a>. Errors are application/problem+json. '
        "Admin endpoints take <code>Authorization: Bearer</code> with STUDYHALL_ADMIN_TOKEN.</p>"
        f"<table><thead><tr><th>Method<th>Path<th>Part<th>What it does</thead><tbody>{rows}</tbody></table></html>"
    )
