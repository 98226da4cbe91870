"""A keeper's lease as an object of Kubernetes.

Not by the library's own `leaderelection`: its renewals wait for an answer as long as it takes, and go by time
of day, so that they cannot end a keeper in time; and it tells nobody where the keeper is.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from onbeat.cluster.lease import CALL_SECONDS, LEASE_SECONDS, LeaseRecord, LeaseTaken
from onbeat.core.errors import ConfigError
from onbeat.core.extras import require

ADDRESS = "onbeat/keeper-address"
"""The annotation that says where the keeper is."""


class KubernetesLease:
    """Reads and writes a Lease of `coordination.k8s.io/v1`; the API server refuses what is out of date.

    Parameters
    ----------
    text : kubernetes:NAMESPACE/NAME.

    Raises
    ------
    ConfigError : it names no lease, or there is no configuration of a cluster.
    MissingExtra : the library is not installed.
    """

    def __init__(self, text: str) -> None:
        kind, _, name = text.partition(":")
        self._namespace, _, self._name = name.partition("/")
        if kind != "kubernetes" or not (self._namespace and self._name):
            raise ConfigError(f"--keeper-lease {text} names no lease; give kubernetes:NAMESPACE/NAME")
        config, self._client = (
            require(f"kubernetes.{part}", extra="kubernetes", purpose="--keeper-lease kubernetes")
            for part in ("config", "client")
        )
        try:
            try:
                config.load_incluster_config()  # of a pod
            except config.ConfigException:
                config.load_kube_config()  # as kubectl does
        except config.ConfigException as error:
            raise ConfigError(f"--keeper-lease kubernetes finds no cluster: {error}") from error
        settings = self._client.Configuration.get_default_copy()
        settings.retries = 0  # what fails is tried again, in time
        self._api = self._client.CoordinationV1Api(self._client.ApiClient(settings))
        self._last: Any = None

    def read(self) -> LeaseRecord | None:
        self._last = self._call(404, self._api.read_namespaced_lease, self._name, self._namespace)
        if self._last is None:
            return None
        about = self._last.metadata
        address = (about.annotations or {}).get(ADDRESS, "")
        return LeaseRecord(self._last.spec.holder_identity or "", address, about.resource_version)

    def write(self, record: LeaseRecord) -> None:
        now = datetime.now(UTC)
        last = None if self._last is None else self._last.spec
        is_new = last is None or last.holder_identity != record.holder
        spec = self._client.V1LeaseSpec(
            holder_identity=record.holder,
            lease_duration_seconds=round(LEASE_SECONDS),
            acquire_time=now if last is None or is_new else last.acquire_time,
            renew_time=now,
            lease_transitions=0 if last is None else (last.lease_transitions or 0) + is_new,
        )
        about = self._client.V1ObjectMeta(name=self._name, annotations={ADDRESS: record.address})
        body = self._client.V1Lease(metadata=about, spec=spec)
        if self._last is None:
            written = self._call(409, self._api.create_namespaced_lease, self._namespace, body)
        else:
            about.resource_version = self._last.metadata.resource_version
            replace = self._api.replace_namespaced_lease
            written = self._call(409, replace, self._name, self._namespace, body)
        if written is None:
            raise LeaseTaken

    def _call(self, absent: int, call: Any, *arguments: Any) -> Any:
        """Return what the API server answers; None where that is a certain status."""
        try:
            return call(*arguments, _request_timeout=CALL_SECONDS)
        except self._client.ApiException as error:
            if error.status == absent:
                return None
            what = f"the Lease {self._namespace}/{self._name}"
            if error.status in (401, 403):
                raise ConfigError(
                    f"this machine may not use {what} ({error.reason}): let its service account get, create "
                    "and update leases of coordination.k8s.io there"
                ) from error
            raise OSError(f"{what}: the API server answers {error.status} {error.reason}") from error
