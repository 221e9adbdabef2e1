/* The one table of tensor element types: id, name, values per block, bytes per block. */
#include "gguf.h"

static const st_ggml_type TYPES[] = {
    {ST_GGML_F32, "F32", 1, 4},          {ST_GGML_F16, "F16", 1, 2},          {ST_GGML_Q4_0, "Q4_0", 32, 18},
    {ST_GGML_Q4_1, "Q4_1", 32, 20},      {ST_GGML_Q5_0, "Q5_0", 32, 22},      {ST_GGML_Q5_1, "Q5_1", 32, 24},
    {ST_GGML_Q8_0, "Q8_0", 32, 34},      {ST_GGML_Q2_K, "Q2_K", 256, 84},     {ST_GGML_Q3_K, "Q3_K", 256, 110},
    {ST_GGML_Q4_K, "Q4_K", 256, 144},    {ST_GGML_Q5_K, "Q5_K", 256, 176},    {ST_GGML_Q6_K, "Q6_K", 256, 210},
    {ST_GGML_IQ2_XXS, "IQ2_XXS", 256, 66}, {ST_GGML_IQ2_XS, "IQ2_XS", 256, 74}, {ST_GGML_IQ3_XXS, "IQ3_XXS", 256, 98},
    {ST_GGML_IQ1_S, "IQ1_S", 256, 50},   {ST_GGML_IQ4_NL, "IQ4_NL", 32, 18},  {ST_GGML_IQ3_S, "IQ3_S", 256, 110},
    {ST_GGML_IQ2_S, "IQ2_S", 256, 82},   {ST_GGML_IQ4_XS, "IQ4_XS", 256, 136}, {ST_GGML_I8, "I8", 1, 1},
    {ST_GGML_I16, "I16", 1, 2},          {ST_GGML_I32, "I32", 1, 4},          {ST_GGML_I64, "I64", 1, 8},
    {ST_GGML_F64, "F64", 1, 8},          {ST_GGML_IQ1_M, "IQ1_M", 256, 56},   {ST_GGML_BF16, "BF16", 1, 2},
    {ST_GGML_TQ1_0, "TQ1_0", 256, 54},   {ST_GGML_TQ2_0, "TQ2_0", 256, 66},   {ST_GGML_MXFP4, "MXFP4", 32, 17},
    {ST_GGML_NVFP4, "NVFP4", 64, 36},    {ST_GGML_Q1_0, "Q1_0", 128, 18},     {ST_GGML_Q2_0, "Q2_0", 64, 18},
};
enum { N_TYPES = (int)(sizeof TYPES / sizeof TYPES[0]) };

int st_ggml_type_count(void) { return N_TYPES; }

const st_ggml_type *st_ggml_type_at(int i) { return i >= 0 && i < N_TYPES ? &TYPES[i] : NULL; }

const st_ggml_type *st_ggml_type_find(int id) {
    for (int i = 0; i < N_TYPES; i++) {
        if (TYPES[i].id == id) return &TYPES[i];
    }
    return NULL;
}
