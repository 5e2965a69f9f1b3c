"""Whose calls count: the trainer that joined last owns the weight transfer, and no call of another has an effect."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from rollout.weights.bodies import InitBody
from rollout.weights.errors import WeightUpdateError


def with_ids(method: str, params: dict[str, Any]) -> dict[str, Any]:
    """A call's body with the owner token or update id that it hands out, where its client has brought none.

    Several engines that are called as one get the same ids by it.
    """
    field_of = {"init_weight_transfer_engine": "owner", "start_weight_update": "update_id"}
    if params.get("weight_dir") is not None:
        field_of["update_weights"] = "update_id"
    name = field_of.get(method)
    if name is None or params.get(name) is not None:
        return params
    return {**params, name: secrets.token_hex(8), "handed_out": True}


@dataclass(frozen=True)
class Owner:
    """A trainer that has joined. `claims`: it brought the token itself, so that each of its calls has it."""

    token: str
    claims: bool
    where: str
    since: float = field(default_factory=time.time)

    def __str__(self) -> str:
        at = datetime.fromtimestamp(self.since, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return f"{self.where}, at {at}, {time.time() - self.since:.1f} s ago"


class Ownership:
    """The owner, if any, and the check of a call against it."""

    def __init__(self) -> None:
        self.owner: Owner | None = None

    def owns(self, token: str | None) -> bool:
        return self.owner is not None and self.owner.token == token

    def check_rejoin(self, body: InitBody) -> None:
        """Raise WeightUpdateError 409 for a trainer that rejoins though another one has joined since."""
        if body.rejoin and self.owner is not None and not self.owns(body.owner):
            raise self.displaced("init_weight_transfer_engine")

    def hand_to(self, body: InitBody) -> None:
        """Make the trainer that joins the owner."""
        assert body.owner is not None
        info = body.init_info
        where = "by files" if info.backend == "disk" else f"at {info.master_address}:{info.master_port}"
        where = f"on the device {info.device_uuid}" if info.backend == "ipc" else where
        self.owner = Owner(body.owner, not body.handed_out, where)

    def release(self) -> None:
        self.owner = None

    def check(self, method: str, token: str | None) -> None:
        """Raise WeightUpdateError 409 for a call that can be known to be another's than the owner's."""
        if self.owner is None or self.owns(token):
            return
        if token is not None:
            raise self.displaced(method)
        if self.owner.claims:
            raise WeightUpdateError(
                409,
                f"{method} without an owner token: the weight transfer belongs to a trainer that passes its own "
                f"({self.owner}); call init_weight_transfer_engine to take over",
                param="owner",
            )

    def displaced(self, method: str) -> WeightUpdateError:
        """What a trainer that is not the owner any more is told."""
        return WeightUpdateError(
            409,
            f"{method}: another trainer took over the weight transfer ({self.owner}); to take it back, call "
            "init_weight_transfer_engine with a new owner token",
            param="owner",
        )
