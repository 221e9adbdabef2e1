"""Who is at the other end of the socket, and which methods they may call.

The kernel answers both questions: SO_PEERCRED and SO_PEERGROUPS hold what was true at connect(), so neither can be
forged nor changed by the client later.
"""

from __future__ import annotations

import enum
import grp
import os
import pwd
import socket
import struct
from dataclasses import dataclass

ADMIN_GROUP = "strata-admin"

_SO_PEERGROUPS = 59  # linux/asm-generic/socket.h; Python has no name for it
_GROUPS_BYTES = 1024  # the most that getsockopt returns through Python: 256 groups


class Access(enum.Enum):
    """What a method does, and so who may call it; the value is the sentence for `PermissionDenied.needs`."""

    READ = "membership in the group of the control socket"
    CHANGE = f"root, the service user, or membership in the group {ADMIN_GROUP}"


# The one table of permissions. A method that is missing here is treated as CHANGE.
METHODS: dict[str, Access] = {
    "org.varlink.service.GetInfo": Access.READ,
    "org.varlink.service.GetInterfaceDescription": Access.READ,
    "io.strata.Control.Version": Access.READ,
    "io.strata.Control.Status": Access.READ,
    "io.strata.Control.Watch": Access.READ,
    "io.strata.Control.Get": Access.READ,
    "io.strata.Control.ListSettings": Access.READ,
}


@dataclass(frozen=True, slots=True)
class Peer:
    """A connected process: user, process id, and every group it is in (primary first)."""

    uid: int
    pid: int
    groups: tuple[int, ...]

    def __str__(self) -> str:
        return f"uid={self.uid} pid={self.pid}"


@dataclass(frozen=True, slots=True)
class Policy:
    """Whom the access classes name on this machine: the service's user id, the socket's group, the admin group."""

    service_uid: int
    read_gid: int
    admin_gid: int | None

    @classmethod
    def of_socket(cls, read_gid: int) -> Policy:
        """The policy of this process for a socket whose group is `read_gid`."""
        try:
            admin_gid = grp.getgrnam(ADMIN_GROUP).gr_gid
        except KeyError:
            admin_gid = None
        return cls(os.geteuid(), read_gid, admin_gid)

    def allows(self, peer: Peer, access: Access) -> bool:
        """Whether `peer` may call methods of this class."""
        if peer.uid in (0, self.service_uid) or (self.admin_gid is not None and self.admin_gid in peer.groups):
            return True
        return access is Access.READ and self.read_gid in peer.groups


def access_of(method: str) -> Access:
    """The class of a fully qualified method name."""
    return METHODS.get(method, Access.CHANGE)


def peer_of(sock: socket.socket) -> Peer:
    """Credentials of the process that connected to `sock` (an AF_UNIX stream). Raises OSError."""
    layout = struct.Struct("iII")
    pid, uid, gid = layout.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, layout.size))
    try:
        raw = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _GROUPS_BYTES)
        extra = struct.unpack(f"{len(raw) // 4}I", raw)
    except OSError:  # more groups than fit, or a kernel before 4.13: ask the user database instead
        extra = _groups_on_file(uid, gid)
    return Peer(uid, pid, (gid, *(group for group in extra if group != gid)))


def _groups_on_file(uid: int, gid: int) -> tuple[int, ...]:
    try:
        return tuple(os.getgrouplist(pwd.getpwuid(uid).pw_name, gid))
    except (KeyError, OSError):
        return ()
