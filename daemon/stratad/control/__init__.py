"""The control socket: Varlink interface `io.strata.Control` for `stratactl` and any other Varlink client.

`wire` frames and bounds messages, `peer` says who may do what, `unixsocket` owns the file, `interface` holds the
methods, `failures` their errors, `server` accepts and answers.
"""

from stratad.control.failures import INTERFACE
from stratad.control.interface import PROTOCOL
from stratad.control.server import ControlServer, Limits, serve

__all__ = ["INTERFACE", "PROTOCOL", "ControlServer", "Limits", "serve"]
