#define FRONTIER_ISA avx512
#define FRONTIER_ISA_NAME "avx512"
#include "kernels.inc"
