/* CRC-32C (Castagnoli, RFC 3720 appendix B.4), the checksum of images; the functions are public (strata.h). */
#ifndef ST_CRC32C_H
#define ST_CRC32C_H

#include "strata.h"

#endif
