"""Make the cffi binding from the one public header, `include/strata.h`.

Usage: `_binding.py api|abi HEADER OUTPUT`. `api` writes the C source of the extension `strata_native._api`;
`abi` writes `_abi.py`, which needs no Python headers to build and opens libstrata.so at import.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from cffi import FFI


def declarations(header: Path) -> str:
    """The header's declarations as cffi reads them: without includes, guards and the C++ braces."""
    lines = []
    for line in header.read_text().splitlines():
        if re.match(r"\s*#\s*define\s+\w+\s+-?(0x)?[0-9a-fA-F]+\s*(/\*.*)?$", line):
            lines.append(re.sub(r"/\*.*", "", line))
        elif not line.lstrip().startswith("#") and 'extern "C"' not in line and "/* extern C end */" not in line:
            lines.append(line.replace("ST_API ", ""))
    return "\n".join(lines)


def main() -> None:
    """Write the binding named on the command line."""
    mode, header, output = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    ffi = FFI()
    ffi.cdef(declarations(header))
    if mode == "api":
        ffi.set_source("strata_native._api", '#include "strata.h"')
        ffi.emit_c_code(str(output))
    else:
        ffi.set_source("strata_native._abi", None)
        ffi.emit_python_code(str(output))


if __name__ == "__main__":
    main()
