#define FRONTIER_ISA generic
#define FRONTIER_ISA_NAME "generic"
#include "kernels.inc"
