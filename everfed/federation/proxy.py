"""A reverse proxy in front of the SuperLink, as a configuration of nginx.

The SuperLink binds loopback and answers the calls of SuperNodes only there (`flower.gate`). The proxy exposes the same
calls by name, so that nothing else reaches the SuperLink from outside.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path

from everfed.errors import UserError
from everfed.federation.certificates import CA, SERVER, SERVER_KEY

# every call of a SuperNode of flwr 1.41 and 1.42; `unregister-node` and `register-node` need a key that is enrolled
FLEET = (
    "register-node", "activate-node", "deactivate-node", "unregister-node", "send-node-heartbeat", "pull-messages",
    "push-messages", "get-run", "get-fab", "push-object", "pull-object", "confirm-message-received",
)  # fmt: skip
BODY = 64  # MiB of the largest request: an object has at most 16, or all the small pieces of a packet
CONNECTIONS = 64  # from one address
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class ProxyError(UserError):
    """A proxy that would expose the SuperLink, or that cannot be configured."""


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_binding(host: str, insecure: bool) -> None:
    """Raises ProxyError unless the SuperLink binds loopback."""
    if is_loopback(host):
        return
    if insecure:
        raise ProxyError(f"--insecure binds loopback only ({', '.join(LOOPBACK)}), not {host}")
    raise ProxyError(
        f"the SuperLink must bind loopback, not {host}. Put a proxy in front of it: `everfed federation proxy`"
    )


@dataclass(frozen=True)
class Proxy:
    """listen: HOST:PORT or PORT, where clients connect. upstream: HOST:PORT of the SuperLink, on loopback.
    certificates: the folder of `everfed federation keys`."""

    listen: str
    upstream: str
    certificates: Path

    def __post_init__(self) -> None:
        host, _, port = self.upstream.rpartition(":")
        if not is_loopback(host.strip("[]")) or not port.isdecimal():
            raise ProxyError(f"upstream must be HOST:PORT on loopback; got {self.upstream!r}")
        if not all(
            part.replace(".", "").replace("[", "").replace("]", "").isalnum() for part in self.listen.split(":")
        ):
            raise ProxyError(f"listen must be HOST:PORT or PORT; got {self.listen!r}")
        if any(mark in str(self.certificates) for mark in "\"';{}$\n"):
            raise ProxyError(f"the path {self.certificates} cannot stand in nginx's configuration")


def nginx(proxy: Proxy) -> str:
    """A whole configuration, for `nginx -p FOLDER -c FILE`; logs and temporary files are in FOLDER."""
    folder = proxy.certificates.absolute()
    calls = "|".join(FLEET)
    return f"""\
# Written by `everfed federation proxy`. Exposes the calls of SuperNodes (/v1/fleet/) and nothing else. The SuperLink
# itself listens on loopback.
worker_processes auto;
pid nginx.pid;
error_log error.log warn;

events {{
    worker_connections 4096;
}}

http {{
    access_log access.log;
    server_tokens off;
    client_body_temp_path client_body;
    proxy_temp_path proxy;
    fastcgi_temp_path fastcgi;
    uwsgi_temp_path uwsgi;
    scgi_temp_path scgi;

    # one address may not take all connections, nor hold one open without sending anything
    limit_conn_zone $binary_remote_addr zone=clients:10m;
    limit_conn clients {CONNECTIONS};
    client_header_timeout 30s;
    client_body_timeout 60s;
    client_max_body_size {BODY}m;
    keepalive_timeout 75s;

    upstream superlink {{
        server {proxy.upstream};
        keepalive 16;
    }}

    server {{
        listen {proxy.listen} ssl;
        ssl_certificate "{folder / SERVER}";
        ssl_certificate_key "{folder / SERVER_KEY}";
        ssl_protocols TLSv1.2 TLSv1.3;

        # the request as it was sent: no dots, escapes or queries that nginx and the SuperLink could read differently
        if ($request_uri !~ "^/v1/fleet/({calls})$") {{
            return 404;
        }}

        location /v1/fleet/ {{
            limit_except POST {{
                deny all;
            }}
            proxy_pass https://superlink;
            proxy_http_version 1.1;
            proxy_set_header Host $host;
            proxy_set_header Connection "";
            proxy_ssl_trusted_certificate "{folder / CA}";
            proxy_ssl_verify on;
            proxy_ssl_name localhost;
            proxy_ssl_server_name on;
            proxy_read_timeout 300s;
            proxy_request_buffering off;
        }}

        location / {{
            return 404;
        }}
    }}
}}
"""
