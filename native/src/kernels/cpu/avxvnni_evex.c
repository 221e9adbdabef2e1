/* The 256-bit VNNI table in EVEX encoding: where AVX-512 exists but not AVX-VNNI, it can still be chosen and tested. */
#define TABLE st_kernels_avxvnni_evex
#include "vnni256.inc"
