"""The objectives of each request of a run, and how the server is told of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from onbeat.bench.record import SentRequest
from onbeat.core.errors import ConfigError
from onbeat.workload.load import ONLY_CLASS
from onbeat.workload.slo_classes import SLOClass

SendSLO = Literal["auto", "body", "headers", "none"]
SEND_SLO: tuple[SendSLO, ...] = get_args(SendSLO)

TTFT_HEADER = "x-llm-d-slo-ttft-ms"
TPOT_HEADER = "x-llm-d-slo-tpot-ms"
TENANT_HEADER = "x-llm-d-inference-fairness-id"


@dataclass(frozen=True, slots=True, kw_only=True)
class SLOTransport:
    """How the server hears of a request's objectives.

    Parameters
    ----------
    how : `body` is an object `slo`, `headers` are llm-d's, `none` keeps the
        objectives to the client, which scores by them all the same.
    asks_to_shed : ask the server to refuse the request where it predicts that its TTFT cannot be kept.
    names_classes : whether the server is told the class beside its objectives: it must know it then.
    """

    how: Literal["body", "headers", "none"] = "none"
    asks_to_shed: bool = False
    names_classes: bool = True

    def body(self, record: SentRequest) -> dict[str, Any]:
        """Return the fields that a request's body gets."""
        has_objectives = record.slo is not None and not record.slo.is_empty
        if self.how != "body" or not (has_objectives or record.job):
            return {}
        fields: dict[str, Any] = {} if record.job is None else {"job": record.job.fields()}
        fields |= {
            f"{name}_ms": limit * 1e3
            for name in ("ttft", "tbt", "e2e")
            if (limit := getattr(record.slo, name, None)) is not None
        }
        if self.names_classes and record.request_class not in {None, ONLY_CLASS}:
            fields["class"] = record.request_class
        if record.weight != 1:
            fields["weight"] = record.weight
        if self.asks_to_shed:
            fields["shed"] = True
        return {"slo": fields}

    def headers(self, record: SentRequest) -> dict[str, str]:
        """Return the headers that a request gets; the tenant has a header where the rest is in the body."""
        if self.how == "none":
            return {}
        headers = {} if record.tenant is None else {TENANT_HEADER: record.tenant}
        if self.how == "headers" and record.slo is not None:
            limits = {TTFT_HEADER: record.slo.ttft, TPOT_HEADER: record.slo.tbt}
            headers |= {name: f"{limit * 1e3:g}" for name, limit in limits.items() if limit is not None}
        if self.how == "headers" and record.job is not None:
            fields = record.job.fields()
            headers |= {f"x-slo-job-{name.replace('_', '-')}": f"{value}" for name, value in fields.items()}
        return headers


def check_transport(
    send: SendSLO, classes: Sequence[SLOClass], *, asks_to_shed: bool, has_jobs: bool = False
) -> None:
    """Refuse ways of telling that would leave something out.

    Parameters
    ----------
    has_jobs : whether requests are calls of jobs, whose deadlines are told.

    Raises
    ------
    ConfigError : there is nothing to tell, or no word for it.
    """
    if not classes and not has_jobs:
        if asks_to_shed:
            raise ConfigError("--shed needs objectives: give --slo-ttft-ms or --slo-config")
        if send in {"body", "headers"}:
            raise ConfigError(
                f"--send-slo {send} has nothing to send: give --slo-ttft-ms, --slo-tbt-ms or --slo-config"
            )
        return
    if asks_to_shed and send not in {"auto", "body"}:
        raise ConfigError(
            f"--shed goes in the body, which --send-slo {send} does not send: use --send-slo body"
        )
    if send == "headers" and any(each.slo.e2e is not None or each.weight != 1 for each in classes):
        raise ConfigError("--send-slo headers cannot carry e2e objectives or weights: use --send-slo body")


def choose_transport(send: SendSLO, *, is_onbeat: bool, asks_to_shed: bool) -> SLOTransport:
    """Return how this server is told: `auto` speaks only to servers known to listen.

    Raises
    ------
    ConfigError : `--shed` was given for a server that would not be asked.
    """
    how = send if send != "auto" else "body" if is_onbeat else "none"
    if asks_to_shed and how != "body":
        raise ConfigError(
            "--shed asks the server to refuse requests, but this server does not say that it is "
            "onbeat: leave --shed out, or force it with --send-slo body"
        )
    return SLOTransport(how=how, asks_to_shed=asks_to_shed)
