#define FRONTIER_ISA avx2
#define FRONTIER_ISA_NAME "avx2"
#include "kernels.inc"
