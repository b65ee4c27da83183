// A GPU driver that only records its calls. fake_gpu.py builds it as libcuda.so.1 and as libamdhip64.so.
#include <string.h>

#ifdef AMD
#define NAME(cuda, hip) hip
#else
#define NAME(cuda, hip) cuda
#endif
enum { kMost = 64 };

struct Record {
  int launches, loads, device, context_switches, shared_attribute, count;
  unsigned grid[3], block[3], shared;
  unsigned long long stream, function, slots[kMost];
  char symbol[64];
} record;
int wanted_count, fail_launch, fail_attribute;  // set by the test
static _Thread_local void* current;

int NAME(cuInit, hipInit)(unsigned flags) { return flags; }

int NAME(cuModuleLoadData, hipModuleLoadData)(void** module, const char* image) {
  if (memcmp(image, "\x7f" "ELF", 4)) return 200;
  ++record.loads;
  *module = &record;
  return 0;
}

int NAME(cuModuleGetFunction, hipModuleGetFunction)(void** function, void* module, const char* symbol) {
  if (module != &record || !strcmp(symbol, "absent")) return 500;
  strncpy(record.symbol, symbol, sizeof record.symbol - 1);
  *function = record.symbol + strlen(symbol);  // a different value for each length
  return 0;
}

int NAME(cuLaunchKernel, hipModuleLaunchKernel)(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                                               unsigned shared, void* stream, void** arguments, void** extra) {
  if (fail_launch || extra) return 719;
  ++record.launches;
  record.function = (unsigned long long)function;
  record.stream = (unsigned long long)stream;
  record.shared = shared;
  record.grid[0] = gx, record.grid[1] = gy, record.grid[2] = gz;
  record.block[0] = bx, record.block[1] = by, record.block[2] = bz;
  record.count = wanted_count;
  for (int i = 0; i < wanted_count; ++i) memcpy(&record.slots[i], arguments[i], 8);
  return 0;
}

#ifdef AMD
int hipSetDevice(int device) {
  record.device = device;
  return 0;
}
const char* hipGetErrorString(int code) { return code == 719 ? "unspecified launch failure" : "some error"; }
#else
static int contexts[8];
int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return 0;
}
int cuDevicePrimaryCtxRetain(void** context, int device) {
  *context = &contexts[device];
  return 0;
}
int cuCtxGetCurrent(void** context) {
  *context = current;
  return 0;
}
int cuCtxSetCurrent(void* context) {
  current = context;
  record.device = (int)((int*)context - contexts);
  ++record.context_switches;
  return 0;
}
int cuFuncSetAttribute(void* function, int attribute, int value) {
  if (!function || attribute != 8 || fail_attribute) return 1;
  record.shared_attribute = value;
  return 0;
}
int cuGetErrorString(int code, const char** text) {
  *text = code == 719 ? "unspecified launch failure" : "some error";
  return 0;
}
#endif
