"""Stop a request, wherever it is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ops.commands.ask import open_client
from ops.commands.options import Config, Json, Kafka, StackName
from ops.stack import DEFAULT_NAME
from ops.terminal import Reporter, emit_json, run
from schemas.request import check_id


def cancel(
    request_id: Annotated[str, typer.Argument(help="Identity of the request, as `gea ask` shows it.")],
    tenant: Annotated[
        str, typer.Option("--tenant", help="Tenant of the request; that of another has no effect.")
    ] = "default",
    reason: Annotated[str, typer.Option("--reason", help="Why; its readers are told.")] = "",
    kafka: Kafka = None,
    config: Config = None,
    name: StackName = DEFAULT_NAME,
    as_json: Json = False,
) -> None:
    """Cancel a request: every pool stops its work on it, and its stream ends with status cancelled.

    It may come before the request itself. For a request that has ended, or is not known, it does nothing.
    """
    check_id("request_id", request_id)
    check_id("tenant", tenant)
    run(_cancel(request_id, tenant, reason, kafka, config, name))
    if as_json:
        emit_json({"request_id": request_id, "tenant": tenant, "reason": reason, "is_sent": True})
    else:
        where = f" --kafka {kafka}" if kafka else f" --name {name}" if name != DEFAULT_NAME else ""
        Reporter().note(f"cancel of {request_id} is sent; `gea replay {request_id}{where}` shows how it ended")


async def _cancel(request_id: str, tenant: str, reason: str, kafka: str | None, config: Path | None, name: str) -> None:
    async with open_client(kafka, config, name, tenant=tenant) as client:
        await client.cancel(request_id, reason=reason)
