// Loads prebuilt code objects and launches them through the vendor's driver. The driver is opened at run time, so the
// build needs only a C++ compiler, and neither ROCm nor CUDA. frontier_llm/ops/driver.py calls it through ctypes.
//
// Every function returns 0 if it succeeds. Otherwise it returns -1, and frontier_gpu_error returns the error's text to
// the same thread.
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>

#include <array>
#include <atomic>
#include <initializer_list>
#include <type_traits>

namespace {

using Handle = void*;

// Functions of HIP and CUDA that differ only in their names (hip*, cu*). All return 0 on success.
struct Driver {
  bool amd = false;
  int (*init)(unsigned) = nullptr;
  int (*module_load)(Handle* module, const void* image) = nullptr;
  int (*module_get_function)(Handle* function, Handle module, const char* symbol) = nullptr;
  int (*launch)(Handle function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                unsigned block_z, unsigned shared_bytes, Handle stream, void** arguments, void** extra) = nullptr;
  int (*set_device)(int device) = nullptr;                                     // HIP
  int (*context_get_current)(Handle* context) = nullptr;                       // CUDA, like the next five functions
  int (*context_set_current)(Handle context) = nullptr;
  int (*device_get)(int* device, int ordinal) = nullptr;
  int (*primary_context_retain)(Handle* context, int device) = nullptr;
  int (*function_set_attribute)(Handle function, int attribute, int value) = nullptr;
  int (*error_text)(int code, const char** text) = nullptr;
  const char* (*hip_error_text)(int code) = nullptr;
};

Driver driver;

// CUDA: the context that torch uses on each device, stored at the first load.
constexpr int kMaxDevices = 64;
std::array<std::atomic<Handle>, kMaxDevices> primary_contexts;

constexpr int kMaxArguments = 64;
constexpr int kMaxDynamicSharedBytes = 8;  // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES

thread_local char error[512];

template <class... Values>
int fail_with(const char* format, Values... values) {
  snprintf(error, sizeof error, format, values...);
  return -1;
}

// Stores an error text: `format` describes the failed operation, and the driver's own text for `code` follows.
template <class... Values>
int fail(int code, const char* format, Values... values) {
  char what[256];
  snprintf(what, sizeof what, format, values...);
  const char* text = nullptr;
  if (driver.amd && driver.hip_error_text)
    text = driver.hip_error_text(code);
  else if (driver.error_text)
    driver.error_text(code, &text);
  return fail_with("%s: %s (code %d)", what, text ? text : "unknown error", code);
}

// Returns the library that torch has loaded, if any. A second HIP runtime in one process would have its own state of
// every device.
Handle open_library(std::initializer_list<const char*> names) {
  for (const int extra : {RTLD_NOLOAD, 0})
    for (const char* name : names)
      if (Handle library = dlopen(name, RTLD_NOW | RTLD_LOCAL | extra)) return library;
  return nullptr;
}

// Sets the thread's current device. A thread of autograd can call this before torch has created a context for that
// thread.
int make_current(int device) {
  if (driver.amd) return driver.set_device(device);
  Handle wanted = primary_contexts[device], current = nullptr;
  if (!wanted) {
    int cuda_device = 0;
    if (const int code = driver.device_get(&cuda_device, device)) return code;
    if (const int code = driver.primary_context_retain(&wanted, cuda_device)) return code;
    primary_contexts[device] = wanted;
  }
  if (const int code = driver.context_get_current(&current)) return code;
  return current == wanted ? 0 : driver.context_set_current(wanted);
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

// Returns the error of this thread's last call that returned -1.
EXPORT const char* frontier_gpu_error() { return error; }

// Opens the driver: libamdhip64 (amd) or libcuda.
EXPORT int frontier_gpu_open(int amd) {
  Driver found;
  found.amd = amd;
  const Handle library =
      amd ? open_library({"libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5"})
          : open_library({"libcuda.so.1", "libcuda.so"});
  if (!library) return fail_with("cannot open the GPU driver: %s", dlerror());
  const char* missing = nullptr;
  const auto resolve = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
    if (!function) missing = name;
  };
  resolve(found.init, amd ? "hipInit" : "cuInit");
  resolve(found.module_load, amd ? "hipModuleLoadData" : "cuModuleLoadData");
  resolve(found.module_get_function, amd ? "hipModuleGetFunction" : "cuModuleGetFunction");
  resolve(found.launch, amd ? "hipModuleLaunchKernel" : "cuLaunchKernel");
  if (amd) {
    resolve(found.set_device, "hipSetDevice");
    resolve(found.hip_error_text, "hipGetErrorString");
  } else {
    resolve(found.context_get_current, "cuCtxGetCurrent");
    resolve(found.context_set_current, "cuCtxSetCurrent");
    resolve(found.device_get, "cuDeviceGet");
    resolve(found.primary_context_retain, "cuDevicePrimaryCtxRetain");
    resolve(found.function_set_attribute, "cuFuncSetAttribute");
    resolve(found.error_text, "cuGetErrorString");
  }
  if (missing) return fail_with("the GPU driver lacks the function %s", missing);
  driver = found;
  if (const int code = driver.init(0)) return fail(code, "the GPU driver cannot be initialised");
  return 0;
}

// Loads one code object on a device. *function is the argument of frontier_gpu_launch.
EXPORT int frontier_gpu_load(int device, const void* image, const char* symbol, int shared_bytes, Handle* function) {
  Handle module = nullptr;
  if (device < 0 || device >= kMaxDevices)
    return fail_with("device %d does not exist: devices have numbers from 0 to %d", device, kMaxDevices - 1);
  if (const int code = make_current(device)) return fail(code, "cannot select device %d", device);
  if (const int code = driver.module_load(&module, image)) return fail(code, "the driver refuses the code object");
  if (const int code = driver.module_get_function(function, module, symbol)) 
    return fail(code, "the code object does not contain the kernel %s", symbol);
  if (!driver.amd && shared_bytes > 48 * 1024)  // CUDA requires an attribute for more than 48 KiB
    if (const int code = driver.function_set_attribute(*function, kMaxDynamicSharedBytes, shared_bytes))
      return fail(code, "this device does not allow %d bytes of shared memory per block", shared_bytes);
  return 0;
}

// Launches a loaded function on its device. `arguments` has `count` slots of 8 bytes, each with a pointer, int32, int64
// or float at its start. Triton's kernels have two more arguments, pointers to scratch memory. They are null, because
// ops/aot/build.py refuses kernels that use scratch memory.
EXPORT int frontier_gpu_launch(int device, Handle function, uint32_t grid_x, uint32_t grid_y, uint32_t grid_z,
                               uint32_t threads, uint32_t shared_bytes, Handle stream, const char* arguments,
                               int count) {
  static const Handle no_scratch = nullptr;
  void* slots[kMaxArguments + 2];
  if (count > kMaxArguments)
    return fail_with("the kernel has %d arguments, and at most %d are supported", count, kMaxArguments);
  for (int i = 0; i < count; ++i) slots[i] = const_cast<char*>(arguments) + 8 * i;
  slots[count] = slots[count + 1] = const_cast<Handle*>(&no_scratch);
  if (const int code = make_current(device)) return fail(code, "cannot select device %d", device);
  if (const int code =
          driver.launch(function, grid_x, grid_y, grid_z, threads, 1, 1, shared_bytes, stream, slots, nullptr))
    return fail(code, "the driver did not start the kernel");
  return 0;
}
