"""Addresses: where a worker listens for the control connections of others, and how they reach it."""

from __future__ import annotations

import contextlib
import errno
import platform
import secrets
import socket
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from aiodist._arrays.environment import control_address

TOKEN_BYTES: Final = 16
_OTHER_FILES: Final = 256
_PATIENCE_SECONDS: Final = 2.0
_SIOCGIFADDR: Final = 0x8915
_OF_NO_USE: Final = ("127.", "::1", "fe80:")


@dataclass(frozen=True, slots=True)
class Address:
    """Where a worker listens.

    Attributes:
        hosts: names and numbers by which its machine may be reached.
        port: the port.
        token: what a connection has to say first, in hexadecimal digits.
    """

    hosts: tuple[str, ...]
    port: int
    token: str


class Listening:
    """A worker's listening socket.

    Args:
        first: the worker is the first, to which all others connect; what the user has said of its address holds.
    """

    def __init__(self, *, first: bool = True) -> None:
        self.socket = _server()
        chosen = control_address() if first else None
        hosts = (chosen,) if chosen else (*own_numbers(), platform.node())
        self.address = Address(hosts, self.socket.getsockname()[1], secrets.token_hex(TOKEN_BYTES))


def _server() -> socket.socket:
    """Return a socket that listens to IPv6 and IPv4, where the system has both."""
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # it is switched off
            return socket.create_server(("", 0), family=socket.AF_INET6, backlog=4096, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=4096)


def ways_to(address: Address, *, same_machine: bool) -> tuple[str, ...]:
    """Return the hosts by which a worker may be reached, the likeliest first."""
    return ("127.0.0.1", "::1", *address.hosts) if same_machine else address.hosts


def allow_connections(count: int) -> None:
    """Let this process have so many connections, beside what it has open.

    Raises:
        OSError: the system does not let it.
    """
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count + _OTHER_FILES
    if needed <= soft or soft == resource.RLIM_INFINITY:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise OSError(
            errno.EMFILE,
            f"the first worker keeps a connection with each of the {count} others, and so needs {needed} file "
            f"descriptors, but its system allows it {hard}; raise the hard limit on its machine (ulimit -Hn, nofile "
            "in /etc/security/limits.conf), or start fewer workers with more replicas each",
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def own_numbers() -> list[str]:
    """Return this machine's IP numbers, as far as they can be found out without asking anybody; the likeliest first.

    Those of IPv4 stand before those of IPv6. Numbers that mean something on one link alone are left out.
    """
    ipv4 = _numbers_of(socket.AF_INET, "192.0.2.1", _numbers_of_interfaces())
    return [*ipv4, *_numbers_of(socket.AF_INET6, "2001:db8::1", _ipv6_numbers_of_interfaces())]


def _numbers_of(family: socket.AddressFamily, elsewhere: str, of_interfaces: list[str]) -> list[str]:
    found: list[object] = []
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((elsewhere, 9))  # reserved for documentation; connecting a datagram socket sends nothing
        found.append(probe.getsockname()[0])
    found += of_interfaces
    if family is socket.AF_INET or sys.platform != "linux":  # else all are known, and a name server would be asked
        with contextlib.suppress(OSError):
            found += [info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None, family)]
    return [number for number in dict.fromkeys(map(str, found)) if not number.startswith(_OF_NO_USE)]


def _numbers_of_interfaces() -> list[str]:
    """Return the IPv4 numbers of all network interfaces, where the system tells them by name (Linux)."""
    if sys.platform != "linux":
        return []
    from fcntl import ioctl

    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without a number
                told = ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found.append(socket.inet_ntoa(told[20:24]))
    return found


def _ipv6_numbers_of_interfaces() -> list[str]:
    """Return the IPv6 numbers of all network interfaces, where the system lists them (Linux)."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
        return [socket.inet_ntop(socket.AF_INET6, bytes.fromhex(line.split()[0])) for line in lines]
    return []


def first_connection(hosts: Sequence[str], port: int) -> socket.socket:
    """Return a connection to the first of these hosts that answers.

    Raises:
        ConnectionError: none does.
    """
    errors = []
    for host in hosts:
        try:
            return socket.create_connection((host, port), timeout=_PATIENCE_SECONDS)
        except OSError as error:
            errors.append(f"{host}: {error}")
    raise ConnectionError(
        f"a worker cannot be reached at port {port} ({'; '.join(errors)}); where it listens on another "
        "network, set AIODIST_CONTROL_ADDRESS there"
    )


def receive_exactly(connection: socket.socket, count: int) -> bytes:
    """Return so many bytes from a connection.

    Raises:
        ConnectionError: it ends before.
    """
    data = b""
    while len(data) < count:
        more = connection.recv(count - len(data))
        if not more:
            raise ConnectionError("closed")
        data += more
    return data
