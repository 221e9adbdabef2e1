/* AVX-VNNI (256 bits, VEX): processors with VNNI but without AVX-512. */
#define TABLE st_kernels_avxvnni
#include "vnni256.inc"
