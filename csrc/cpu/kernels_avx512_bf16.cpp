#define FRONTIER_ISA avx512_bf16
#define FRONTIER_ISA_NAME "avx512_bf16"
#include "kernels.inc"
